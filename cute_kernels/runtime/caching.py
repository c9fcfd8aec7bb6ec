"""A cache of tensors: bounded in bytes, safe under threads, streams and CUDA graphs."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from . import plan_cache

#: All caches of the process, for `sizes`.
_caches: weakref.WeakSet[ByteCache] = weakref.WeakSet()


def capturing() -> bool:
    """Whether a CUDA graph is captured, whose replays read what is kept for it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@dataclass
class _Entry:
    value: object
    size: int
    #: Set where a CUDA graph captured a use: its replays read the tensors, whoever else does not.
    pinned: bool = False


class ByteCache:
    """The most recently used values whose tensors and arrays take at most ``limit`` bytes together.

    Values that a CUDA graph captured stay until `clear`, as nothing tells when the graph is gone;
    their bytes do not count against the limit.

    Two threads may both make a value that is missing; both get the one that was stored first.  A
    value larger than ``limit`` is returned and not kept.
    """

    def __init__(self, name: str, limit: int):
        self.name = name
        self.limit = limit
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._bytes = self._pinned = 0
        self._lock = threading.Lock()
        _caches.add(self)

    def get(self, key: Hashable, make: Callable[[], object]) -> object:
        """The value of ``key``, made at its first use; ``make`` runs outside the lock."""
        pinned = capturing()
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                self._pin(entry, pinned)
                return entry.value
        # A value outlives the call: an inference tensor could not be saved for a later backward.
        with torch.inference_mode(False):
            value = make()
        entry = _Entry(value, _bytes_of(value))
        if not pinned:
            # Whoever takes it from here may be on another stream than the one that made it.
            _wait(value, lambda device: torch.cuda.current_stream(device).synchronize())
        with self._lock:
            if (first := self._entries.get(key)) is not None:
                self._pin(first, pinned)
                return first.value
            if entry.size > self.limit and not pinned:
                return value
            self._entries[key] = entry
            self._bytes += entry.size
            self._pin(entry, pinned)
            dropped = [] if pinned else self._overflow()
        if dropped:
            plan_cache.let_go()
        # A kernel of any stream may still read what the allocator would give away.
        _wait(dropped, torch.cuda.synchronize)
        return value

    def size(self) -> dict[str, int]:
        """``{"entries", "bytes", "pinned", "limit"}`` of now; pinned: bytes beside the limit."""
        with self._lock:
            sizes = {"bytes": self._bytes, "pinned": self._pinned, "limit": self.limit}
            return {"entries": len(self._entries), **sizes}

    def clear(self) -> None:
        """Forgets every value."""
        with self._lock:
            self._entries.clear()
            self._bytes = self._pinned = 0
        plan_cache.let_go()

    def _pin(self, entry: _Entry, pinned: bool) -> None:
        """Keep an entry of ours until `clear`, if ``pinned``."""
        if pinned and not entry.pinned:
            entry.pinned = True
            self._pinned += entry.size

    def _overflow(self) -> list[_Entry]:
        """Takes out the oldest entries that are over the limit."""
        dropped: list[_Entry] = []
        most = self.limit + self._pinned
        if self._bytes <= most:
            return dropped
        for key in [key for key, entry in self._entries.items() if not entry.pinned]:
            if self._bytes <= most:
                break
            dropped.append(self._entries.pop(key))
            self._bytes -= dropped[-1].size
        return dropped


def sizes() -> dict[str, dict[str, int]]:
    """Per cache: entries, bytes, those pinned by CUDA graphs, and the limit of the others."""
    return {cache.name: cache.size() for cache in sorted(_caches, key=lambda c: c.name)}


def _wait(value: object, wait: Callable[[torch.device], None]) -> None:
    """Waits on each GPU that ``value`` has a tensor on."""
    for device in {t.device for t in _leaves(value) if isinstance(t, torch.Tensor) and t.is_cuda}:
        wait(device)


def _bytes_of(value: object) -> int:
    """Bytes of the storages and arrays behind ``value``, each counted once."""
    sizes_by_id = {}
    for leaf in _leaves(value):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            sizes_by_id[storage._cdata] = storage.nbytes()
        else:
            array = leaf if leaf.base is None else leaf.base
            sizes_by_id[id(array)] = getattr(array, "nbytes", leaf.nbytes)
    return sum(sizes_by_id.values())


def _leaves(value: object, visited: set[int] | None = None) -> Iterator[torch.Tensor | np.ndarray]:
    """Every tensor and array that ``value`` holds, through containers and plain objects."""
    visited = set() if visited is None else visited
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from _leaves(member, visited)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _leaves(member, visited)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _leaves(vars(value), visited)
