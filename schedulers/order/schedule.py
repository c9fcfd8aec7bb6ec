"""``Schedule``: the order of work of a deterministic attention backward, as data.

Three decisions: the order in which (head, key block) tickets are taken, the order in which each
ticket visits its query blocks, and the rank of each visit among all writers of that query block's
dQ.  The ranks are the bits of dQ, the visits those of dK and dV; ``hash`` covers all three.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch

from cute_kernels.errors import ScheduleError, expected

from .. import handles
from .ranks import integer

FORMAT = "cute_kernels.Schedule 1"
ARRAYS = {
    "order": (np.int32, 2),
    "list_of_head": (np.int32, 1),
    "offset": (np.int32, 1),
    "q_block": (np.int32, 1),
    "partial": (np.bool_, 1),
    "rank": (np.int32, 1),
}
_SIZES = ("num_q_blocks", "num_kv_blocks", "heads")
_WORDS = ("block_size", "heads_in_flight", "name")
#: A kernel loads 16 bytes at a time, in int32.
_PIECE = 4
#: torch keeps the pinned memory that it has had, by powers of two.
_MOST_PINNED = 4 << 20


class ScheduleTensors(NamedTuple):
    """Tensors that kernels read: parts of one allocation, at multiples of 16 bytes; int32.

    ticket        [T, 4]      (head, key block, its first entry, the end of its entries)
    list_of_head  [heads]     which set of lists a head uses
    offset        [S*Nb + 1]  where list ``list_of_head[head] * Nb + n`` begins in the next two
    entry         [E]         2 * q_block + is_partial, in visiting order
    rank          [E]         the dQ semaphore's value at which this visit may write
    place         [E]         each entry's place in a table [G, Mb, Nb] of G masks; None unless
                              asked for
    """

    ticket: torch.Tensor
    list_of_head: torch.Tensor
    offset: torch.Tensor
    entry: torch.Tensor
    rank: torch.Tensor
    place: torch.Tensor | None


def _is_pinned(size: int, device: torch.device) -> bool:
    """Whether ``size`` int32 go to the device from pinned memory, which the host need not wait for.

    A copy of pageable memory beyond 64 KB may wait for all that is queued on its stream.  A graph
    that is captured reads its source in each replay: that is pageable memory, which is kept.
    """
    if device.type != "cuda" or 4 * size > _MOST_PINNED:
        return False
    return not torch.cuda.is_current_stream_capturing()


def _pinned(size: int) -> torch.Tensor:
    """Return pinned memory for int32.  torch has it again when copies out of it have ended."""
    return torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=True)


def _flat_index(pairs: np.ndarray, columns: int, byteorder: str = sys.byteorder) -> np.ndarray:
    """Return i * columns + j of pairs (i, j) of int32, each read as one int64: int64 [T]."""
    if byteorder == "big":  # i * 2**32 + j
        return (pairs >> 32) * columns + (pairs & (2**32 - 1))
    index = pairs * ((columns << 32) + 1)  # i + j * 2**32; 64 bits wrap
    index >>= 32
    return index


def frozen(array: np.ndarray) -> np.ndarray:
    """Return the array in C order over immutable bytes: not even ``setflags`` makes it writable."""
    if type(array) is np.ndarray and isinstance(array.base, bytes) and array.flags.c_contiguous:
        return array
    return np.ndarray(array.shape, array.dtype, buffer=array.tobytes())


@dataclass(frozen=True, eq=False)
class Schedule:
    """Launch order, visiting order and dQ write order of one backward pass.

    With M query blocks, N key blocks, ``heads`` (batch, head) pairs (index b * H + h) and S sets
    of lists that heads share:

    order         int32 [T, 2]     (head, key block) by ticket; every pair once
    list_of_head  int32 [heads]    in [0, S)
    offset        int32 [S*N + 1]  list s * N + n holds entries offset[..] to offset[.. + 1]
    q_block       int32 [E]        query blocks in visiting order, partial and full together
    partial       bool [E]
    rank          int32 [E]        place among the writers of (head, query block), from 0

    block_size, heads_in_flight and name describe and are not hashed.  Shapes and dtypes are looked
    at here; whether a schedule makes sense and cannot deadlock is ``check``'s to say.  The arrays
    are copied into memory that NumPy refuses to write to, so that a hash stays true.
    """

    num_q_blocks: int
    num_kv_blocks: int
    heads: int
    order: np.ndarray
    list_of_head: np.ndarray
    offset: np.ndarray
    q_block: np.ndarray
    partial: np.ndarray
    rank: np.ndarray
    block_size: tuple[int, int] | None = None
    heads_in_flight: int = 0
    name: str = "given"
    #: Names this object in compiled graphs.
    handle: str = field(init=False, repr=False)

    def __post_init__(self):
        for name in _SIZES:
            integer(name, getattr(self, name), least=1 if name == "heads" else 0)
        for name, (dtype, rank) in ARRAYS.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != rank:
                actual = f"{type(array).__name__} {getattr(array, 'dtype', '')}"
                want = f"a {np.dtype(dtype).name} array of {rank} dimensions"
                raise ScheduleError(expected(name, want, actual))
            object.__setattr__(self, name, frozen(array))
        self._shapes()
        object.__setattr__(self, "handle", handles.register(self))

    def __reduce__(self):
        """Rebuild the schedule: the unpickled one is checked, and immutable."""
        return type(self), tuple(getattr(self, part.name) for part in fields(self) if part.init)

    def __copy__(self) -> Schedule:
        return self

    def __deepcopy__(self, memo: dict) -> Schedule:
        return self

    def _shapes(self) -> None:
        if self.order.shape[1:] != (2,):
            raise ScheduleError(expected("order", "shape [tickets, 2]", list(self.order.shape)))
        entries = len(self.q_block)
        for name in ("partial", "rank"):
            if getattr(self, name).shape != (entries,):
                shape = list(getattr(self, name).shape)
                raise ScheduleError(expected(name, f"shape [{entries}] like q_block", shape))
        first, last = (self.offset[0], self.offset[-1]) if len(self.offset) else (-1, -1)
        whole_lists = (len(self.offset) - 1) % max(1, self.num_kv_blocks) == 0
        if not whole_lists or first != 0 or last != entries or (np.diff(self.offset) < 0).any():
            want = f"[S * {self.num_kv_blocks} + 1] values rising from 0 to {entries}"
            raise ScheduleError(expected("offset", want, f"{len(self.offset)} values"))
        if self.list_of_head.shape != (self.heads,):
            raise ScheduleError(
                expected("list_of_head", f"shape [{self.heads}]", list(self.list_of_head.shape))
            )
        if self.list_of_head.min() < 0 or self.list_of_head.max() >= self.num_lists:
            want = f"values in [0, {self.num_lists})"
            raise ScheduleError(expected("list_of_head", want, self.list_of_head.tolist()))

    @property
    def num_lists(self) -> int:
        """Number S of sets of lists."""
        columns = self.num_kv_blocks
        return (len(self.offset) - 1) // columns if columns else int(self.list_of_head.max()) + 1

    @property
    def num_tickets(self) -> int:
        return len(self.order)

    @cached_property
    def list_of_ticket(self) -> np.ndarray:
        """List that each ticket walks, int64 [T]."""
        head, column = self.order.T
        column = column.astype(np.int64)
        if self.num_lists == 1:
            return frozen(column)
        return frozen((self.list_of_head * np.int64(self.num_kv_blocks)).take(head) + column)

    def launches(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (ticket of each column [heads, N], cases [C, 1 + N], case of each head), int64.

        A case: a set of lists, and the columns in launch order of the heads that use it so.
        """
        ticket = np.empty((self.heads, self.num_kv_blocks), np.int64)
        ticket[self.order[:, 0], self.order[:, 1]] = np.arange(self.num_tickets)
        each = np.concatenate((self.list_of_head[:, None], np.argsort(ticket, axis=1)), axis=1)
        names: dict[bytes, int] = {}
        case_of_head = np.array([names.setdefault(case.tobytes(), len(names)) for case in each])
        return ticket, each[np.unique(case_of_head, return_index=True)[1]], case_of_head

    def padded(self, lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (entries of lists [.., L], 0 past each end; where there are some)."""
        start, stop = self.offset[lists], self.offset[lists + 1]
        entry = start[..., None] + np.arange(int((stop - start).max(initial=0)))
        valid = entry < stop[..., None]
        return np.where(valid, entry, 0), valid

    def tickets(self) -> Iterator[tuple[int, int, list[tuple[int, bool, int]]]]:
        """Yield ``(head, kv_block, [(q_block, is_partial, rank), ...])`` in launch order."""
        entries = list(
            zip(self.q_block.tolist(), self.partial.tolist(), self.rank.tolist(), strict=True)
        )
        offset = self.offset.tolist()
        lists = self.list_of_ticket.tolist()
        for (head, column), list_index in zip(self.order.tolist(), lists, strict=True):
            yield head, column, entries[offset[list_index] : offset[list_index + 1]]

    def tensors(
        self, device: torch.device | str, mask_of_list: tuple[int, ...] | None = None
    ) -> ScheduleTensors:
        """Return the kernel's tensors on a device, by one copy ordered on its current stream.

        ``mask_of_list``: the mask of each of the S sets of lists; with ``place``.  Build them once
        and keep them.
        """
        target, sizes = torch.device(device), self._sizes(mask_of_list is not None)
        host = self._host_words(target, mask_of_list, sizes)
        moved = host.to(target, non_blocking=True, copy=True)
        parts = moved.split_with_sizes(sizes)[::2]
        return ScheduleTensors(
            parts[0].view(-1, 4), *parts[1:5], parts[5] if mask_of_list is not None else None
        )

    def _host_words(
        self, device: torch.device, mask_of_list: tuple[int, ...] | None, sizes: list[int]
    ) -> torch.Tensor:
        """Return all of ``tensors`` on the host: what a copy to ``device`` reads.

        Pinned words are written where they are copied from and not kept.
        """
        total = sum(sizes)
        pinned, words = _is_pinned(total, device), self._words.get(mask_of_list)
        if words is None:
            host = _pinned(total) if pinned else None
            words = np.empty(total, np.int32) if host is None else host.numpy()
            self._pack(words, mask_of_list, sizes)
            if host is not None:
                return host
            self._words[mask_of_list] = words
        host = torch.from_numpy(words)
        return _pinned(total).copy_(host) if pinned else host

    @cached_property
    def _words(self) -> dict[tuple[int, ...] | None, np.ndarray]:
        """All of ``tensors`` in pageable memory, by ``mask_of_list``."""
        return {}

    def _pack(
        self, words: np.ndarray, mask_of_list: tuple[int, ...] | None, sizes: list[int]
    ) -> None:
        """Write all of ``tensors`` to ``words``, which may hold anything before."""
        stops = itertools.accumulate(sizes)
        parts = [words[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]
        ticket, list_of_head, offset, entry, rank, *place = parts[::2]
        for gap in parts[1::2]:
            if gap.size:
                gap[:] = 0
        # Pairs of int32 are moved as one int64; those of neighbours in ``offset`` overlap.
        pairs, lists = ticket.view(np.int64).reshape(-1, 2), len(self.offset) - 1
        pairs[:, 0] = both = self.order.view(np.int64)[:, 0]
        spans = np.ndarray(lists, np.int64, self.offset, strides=self.offset.strides)
        if self.num_kv_blocks:
            of_head = spans.reshape(-1, self.num_kv_blocks).take(self.list_of_head, 0)
            pairs[:, 1] = of_head.take(_flat_index(both, self.num_kv_blocks))
        list_of_head[:] = self.list_of_head
        offset[:] = self.offset
        np.add(self.q_block, self.q_block, out=entry)
        entry += self.partial
        rank[:] = self.rank
        if place:
            rows, columns = self.num_q_blocks, self.num_kv_blocks
            masks = np.array(mask_of_list, np.int32)[:, None] * (rows * columns)
            first = (masks + np.arange(columns, dtype=np.int32)).reshape(-1)
            np.multiply(self.q_block, columns, out=place[0])
            place[0] += first.repeat(self.offset[1:] - self.offset[:-1])

    def _sizes(self, with_place: bool) -> list[int]:
        """Return the int32 of each of ``tensors`` in its allocation, and of the gap behind it."""
        entries = len(self.q_block)
        sizes = [4 * self.num_tickets, self.heads, len(self.offset), entries, entries]
        if with_place:
            sizes.append(entries)
        return [part for size in sizes for part in (size, -size % _PIECE)]

    @cached_property
    def hash(self) -> str:
        """Digest of 64 hex digits, equal for equal order, visits and ranks, so for equal bits."""
        digest = hashlib.sha256(FORMAT.encode())
        digest.update(repr([getattr(self, name) for name in _SIZES]).encode())
        for name in ARRAYS:
            array = getattr(self, name)
            digest.update(f"{name} {array.shape}".encode())
            digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        return digest.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a compressed ``.npz`` file, exactly at ``path``."""
        words = {name: getattr(self, name) for name in _SIZES + _WORDS}
        words |= {"format": FORMAT, "hash": self.hash}
        with open(path, "wb") as file:
            arrays = {name: getattr(self, name) for name in ARRAYS}
            np.savez_compressed(file, words=np.array(json.dumps(words)), **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Load the schedule of ``save``; ScheduleError if the file is none, or was changed."""
        try:
            with np.load(path, allow_pickle=False) as file:
                words = json.loads(str(file["words"])) | {name: file[name] for name in ARRAYS}
        except (ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error) as error:
            raise ScheduleError(expected("path", "a schedule's .npz file", str(error))) from None
        return cls._restore(words, str(path))

    @classmethod
    def _restore(cls, words: dict, source: str) -> Schedule:
        missing = {"format", "hash", *(f.name for f in fields(cls) if f.init)} - set(words)
        if missing or words["format"] != FORMAT:
            fault = f"no {sorted(missing)}" if missing else repr(words["format"])
            raise ScheduleError(expected(source, f"a schedule in format {FORMAT!r}", fault))
        values = {name: words[name] for name in _SIZES + _WORDS}
        if values["block_size"] is not None:
            values["block_size"] = tuple(values["block_size"])
        for name, (dtype, rank) in ARRAYS.items():
            try:
                array = np.asarray(words[name], dtype=dtype)
            except (ValueError, TypeError, OverflowError) as error:
                want = f"{np.dtype(dtype).name} values"
                raise ScheduleError(expected(name, want, str(error))) from None
            values[name] = array.reshape(0, 2) if rank == 2 and array.size == 0 else array
        schedule = cls(**values)
        if schedule.hash != words["hash"]:
            raise ScheduleError(expected(source, f"hash {words['hash']}", schedule.hash))
        return schedule
