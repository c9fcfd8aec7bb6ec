"""Compiled kernels: in memory, else ahead of time, else on disk, else compiled now.

One compile per key: in a process by a lock (the DSL crashes when two threads compile at once),
between processes by a file lock.  A fork waits for a compile that another thread is in; the child
inherits what was loaded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .. import log, settings
from ..errors import AotError, ArgumentValueError, expected
from . import ahead, load, toolchain
from .kernel import Kernel, symbol_of
from .store import BadEntry, Entry, Store

_LOG = logging.getLogger(__name__)
_ARCH = re.compile(r"sm_\d+[af]?")


_loaded: dict[tuple[str, str], Callable[..., Any]] = {}
_ahead: dict[str, set[str]] = {}
_ahead_folders: set[Path] = set()
_counts: Counter[str] = Counter()
_lock = threading.RLock()

# A child must not start with the lock held by a thread it does not have, nor with a DSL that was
# forked in the middle of a compile.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def get(kernel: Kernel, arch: str) -> Callable[..., Any]:
    """The compiled function of ``kernel`` for ``arch`` (``"sm_90a"``).

    It takes torch tensors by position and checks dtypes, sizes and devices before it launches.

    Raises:
        CacheError: the cache folder cannot be trusted or used; the message names it and why.
        AotError: the folder CUTE_KERNELS_AOT_DIR does not fit this host, or holds the kernel for
            another architecture only.
    """
    function = _loaded.get((kernel.identity, arch))
    return function if function is not None else _miss(kernel, arch)


def key(kernel: Kernel, arch: str) -> str:
    """SHA-256 over the kernel, the architecture and `toolchain.facts`."""
    facts = [kernel.identity, arch, toolchain.facts()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def build(kernel: Kernel) -> Any:
    """Compile a kernel: the result of ``kernel.build``; one compile at a time in this process."""
    with _lock:
        _counts["built"] += 1
        return kernel.build()


def fill(kernel: Kernel, arch: str) -> None:
    """Compiles ``kernel`` into the cache folder, unless it is there or another process is at it."""
    store, stem = _place(kernel, arch)
    with store.locked(stem, wait=False) as free:
        if free and _verified(store, stem, tell=False) is None:
            _write(store, stem, kernel, arch, build(kernel))


def lacking(kernels: Iterable[Kernel], arch: str) -> list[Kernel]:
    """Select the kernels that `get` would have to compile now, for the folder to keep."""
    with _lock:
        _load_named_folder()
    if not settings.cache_enabled():
        return []
    in_process = _ahead.keys() | {
        identity for identity, loaded_arch in _loaded if loaded_arch == arch
    }
    candidates = [kernel for kernel in kernels if kernel.identity not in in_process]
    return [k for k in candidates if _verified(*_place(k, arch), tell=False) is None]


def counts() -> dict[str, int]:
    """Numbers of functions that this process has ``built``, got from ``disk`` and ``ahead``."""
    return {source: _counts[source] for source in ("built", "disk", "ahead")}


def loaded() -> list[str]:
    """The identity of every kernel that this process has got, in the order in which it first did.

    Without those that were registered ahead.
    """
    return [identity for identity, _ in _loaded if identity not in _ahead]


def clear() -> None:
    """Forgets every function and count of this process; the disk keeps its own."""
    with _lock:
        for table in (_loaded, _ahead, _ahead_folders, _counts):
            table.clear()
        _store.cache_clear()


def register_ahead(kernels: dict[tuple[str, str], Callable[..., Any]], folder: Path) -> None:
    """Makes functions compiled ahead of time, by (identity, arch), what `get` returns."""
    log.say("kernels loaded that were compiled ahead of time: %d, from %s", len(kernels), folder)
    with _lock:
        _loaded.update(kernels)
        _counts["ahead"] += len(kernels)
        for identity, arch in kernels:
            _ahead.setdefault(identity, set()).add(arch)
        _ahead_folders.add(folder)


def _miss(kernel: Kernel, arch: str) -> Callable[..., Any]:
    if not _ARCH.fullmatch(arch):
        raise ArgumentValueError(expected("arch", "a name such as 'sm_90a'", repr(arch)))
    slot = (kernel.identity, arch)
    with _lock:
        _load_named_folder()
        if slot not in _loaded:
            if arches := _ahead.get(kernel.identity):
                archs = ", ".join(sorted(arches))
                raise AotError(f"arch: {kernel.identity} was compiled for {archs}, not for {arch}")
            _loaded[slot] = _find(kernel, arch)
        return _loaded[slot]


def _load_named_folder() -> None:
    folder = settings.aot_dir()
    if folder is not None and folder.absolute() not in _ahead_folders:
        register_ahead(ahead.read(folder), folder.absolute())


def _find(kernel: Kernel, arch: str) -> Callable[..., Any]:
    begin = time.perf_counter()
    if settings.cache_enabled():
        function, source = _stored(kernel, arch)
    else:
        source = "compiled, not stored"
        function = load.resident(build(kernel), symbol_of(kernel, arch))
    log.say("%s for %s: %s, %.2f s", kernel, arch, source, time.perf_counter() - begin)
    return function


def _place(kernel: Kernel, arch: str) -> tuple[Store, str]:
    """The cache folder, and the stem of the kernel's files there."""
    return _store(settings.cache_dir()), f"{kernel.name}-{key(kernel, arch)[:40]}"


def _stored(kernel: Kernel, arch: str) -> tuple[Callable[..., Any], str]:
    """The function from the cache folder, compiled into it if it is not there, and which it was."""
    store, stem = _place(kernel, arch)
    entry = _verified(store, stem, tell=False)
    if entry is None:
        with store.locked(stem):
            entry = _verified(store, stem, tell=True)  # another process may have been faster
            if entry is None:
                return _build_into(store, stem, kernel, arch)
    function = load.function(entry.path, entry.symbol)
    _counts["disk"] += 1
    return function, f"loaded from {entry.path}"


def _verified(store: Store, stem: str, tell: bool) -> Entry | None:
    try:
        return store.read(stem)
    except BadEntry as why:
        if tell:
            _LOG.warning("kernel cache %s: %s; compiling again", store.root, why)
        return None


def _build_into(
    store: Store, stem: str, kernel: Kernel, arch: str
) -> tuple[Callable[..., Any], str]:
    compiled = build(kernel)
    entry = _write(store, stem, kernel, arch, compiled)
    if entry is None:
        return load.resident(compiled, symbol_of(kernel, arch)), "compiled, not stored"
    return load.function(entry.path, entry.symbol), f"compiled into {entry.path}"


def _write(store: Store, stem: str, kernel: Kernel, arch: str, compiled: Any) -> Entry | None:
    """Stores a compile result; None if its source may be another one than the key says."""
    if toolchain.source_digest() != toolchain.SOURCE_AT_IMPORT:
        _LOG.warning("the package's source changed since import: %s is not stored", kernel.identity)
        return None
    about = {"kernel": kernel.identity, "arch": arch, "facts": toolchain.facts()}
    with store.scratch(stem) as folder:
        binary = load.build_binary(compiled, symbol_of(kernel, arch), folder)
        return store.write(stem, binary, symbol_of(kernel, arch), about)


@functools.cache
def _store(root: Path) -> Store:
    return Store(root)
