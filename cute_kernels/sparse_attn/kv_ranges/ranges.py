"""A batch of sequences that a key buffer holds anywhere, cut into runs at their own positions.

A row's bits depend on its keys' positions: on which block of 128 a key falls into.  Behind left
padding, in a pack of documents, or in a cache that dropped its oldest keys, a key's column in the
buffer is not its position.  So each sequence is attended alone, cut out of the buffer; where its
first key is not at a multiple of 128, zero rows that nobody sees stand in front.

    columns seen  -> kv_ranges  -> runs (``runs_of``)  -> one attention per run

``kv_ranges`` are int32 [B, 1, T, 4], one row per query; on the CPU, or on a GPU,
where one launch attends all rows of a batch:

    begin      the column of the first key of its sequence that the buffer holds
    position   that key's position in the sequence: 0 unless a cache dropped keys before it
    first, end the columns that the query sees, first <= column < end; none if they are equal
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import ArgumentValueError, expected
from ...runtime.caching import ByteCache
from ...schedulers.masks.mask import BlockMask
from ...schedulers.masks.rules import Band, Rule
from ...schedulers.masks.spans import Spans
from .. import lowering
from ..masks import BLOCK, LoweredMask


class Run(NamedTuple):
    """One attention: ``queries`` of the ``batch`` rows over their ``keys``, behind ``shift`` zeros.

    ``lowered`` is a mask in the coordinates of what ``cut_queries`` and ``cut_keys`` return.
    ``queries`` is int64 [n] on the CPU where rows of other positions lie between them.
    """

    batch: slice
    queries: slice | Tensor
    keys: slice
    shift: int
    lowered: LoweredMask

    def is_whole(self, t: Tensor) -> bool:
        """Whether the queries are all of ``t`` [B, T, H, D], in order."""
        all_rows = slice(0, t.shape[0]), slice(0, t.shape[1])
        return isinstance(self.queries, slice) and (self.batch, self.queries) == all_rows

    def is_all(self, q: Tensor, k: Tensor) -> bool:
        """Whether the queries are all of ``q`` and the keys all of ``k``, as they lie."""
        return self.is_whole(q) and not self.shift and self.keys == slice(0, k.shape[1])

    def cut_queries(self, t: Tensor) -> Tensor:
        """The run's part of a tensor [B, T, H, D]."""
        return t[self.batch, self.queries]

    def cut_keys(self, t: Tensor) -> Tensor:
        """The run's part of a tensor [B, S, H, D], each key in the block of its position."""
        part = t[self.batch, self.keys]
        return F.pad(part, (0, 0, 0, 0, self.shift, 0)) if self.shift else part


def ends_of(dense: Tensor) -> Tensor:
    """(first, end) of the True columns of rows: [.., S] -> int32 [.., 2]; gaps count as seen."""
    count = dense.sum(dim=-1, dtype=torch.int32)
    marks = dense.to(torch.uint8)
    first = marks.argmax(dim=-1).to(torch.int32)
    end = dense.shape[-1] - marks.flip(-1).argmax(dim=-1).to(torch.int32)
    return torch.stack((first, torch.where(count > 0, end, first)), dim=-1)


def of_sequences(
    seen: Tensor | None,
    padding: Tensor | None,
    q_offset: int | Tensor,
    kv_offset: int,
    sizes: tuple[int, int, int],
    device: torch.device,
) -> Tensor:
    """Ranges of sequences that are not packed, on ``device``, where nothing waits.

    A CUDA graph may hold it, and inductor fuses it.  Arguments: those of `kv_ranges`.
    """
    batch, rows, columns = sizes
    padding = None if padding is None else padding.to(device, torch.bool)
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.to(device, non_blocking=True)
    positions = torch.arange(rows, device=device) + (q_offset - kv_offset)
    begin = torch.zeros((batch, 1), dtype=torch.int64, device=device)
    position, last, real = begin + kv_offset, begin + columns, None
    if padding is not None:
        count = padding.sum(dim=1, keepdim=True)
        left = padding.to(torch.uint8).argmax(dim=1, keepdim=True)
        begin, position = (left - kv_offset).clamp(min=0), (kv_offset - left).clamp(min=0)
        last = left + count - kv_offset
        row_columns = positions + kv_offset
        # Columns beyond the mask are those of a static cache that are not filled yet.
        width = padding.shape[1]
        real = padding[:, row_columns.clamp(0, width - 1)] & (row_columns < width)
    if seen is None:
        first, end = begin, torch.minimum(positions + 1, last).clamp(max=columns)
    else:
        first, end = seen[:, 0].long().unbind(-1)
    if real is not None:
        end = torch.where(real, end, first)
    fields = torch.broadcast_tensors(
        begin, position, first, torch.maximum(first, end), positions[None]
    )
    return torch.stack(fields[:4], dim=-1)[:, None].to(torch.int32)


def seen_of(dense: Tensor) -> Tensor:
    """(first, end) of the True columns of each row: [B, 1, T, S] -> int32 [B, 1, T, 2].

    Waits for the device of ``dense`` to look for gaps.
    """
    if not dense.shape[-1]:
        return torch.zeros((*dense.shape[:-1], 2), dtype=torch.int32, device=dense.device)
    seen = ends_of(dense)
    gaps = (seen[..., 1] - seen[..., 0] != dense.sum(dim=-1)).cpu().nonzero()
    if len(gaps):
        sequence, _, row = gaps[0].tolist()
        want = "queries that see one run of keys each (a 4-D bool mask takes any others)"
        got = f"gaps between the keys of query {row} of sequence {sequence}"
        raise ArgumentValueError(expected("attention_mask", want, got))
    return seen


def kv_ranges(
    seen: Tensor | None,
    padding: Tensor | None,
    q_offset: int,
    kv_offset: int,
    sizes: tuple[int, int, int],
    packed: bool,
) -> Tensor:
    """Ranges of T queries whose column in the buffer is q_offset - kv_offset onwards.

    seen: What ``seen_of`` returns; None is causal.
    padding: bool [B, L], the real columns before ``kv_offset`` was cut off; None: all.
    sizes: (B, T, S).  packed: Whether columns that share no query and key are sequences apart.
    """
    if padding is not None:
        _refuse_gaps(padding)
    cpu = torch.device("cpu")
    table = of_sequences(seen, padding, q_offset, kv_offset, sizes, cpu)
    if packed and seen is not None and padding is None and sizes[1] == sizes[2]:
        begins = [
            _starts(first, end) for first, end in np.moveaxis(table[:, 0, :, 2:].numpy(), 2, 1)
        ]
        table[:, 0, :, 0] = torch.from_numpy(np.stack(begins))
    return table


def varlen_offsets(cu_seqlens: Tensor, rows: int) -> Tensor:
    """Checked offsets of a varlen batch, from 0 to ``rows``: int64 [N + 1] on the CPU.

    Waits for the device of ``cu_seqlens``.
    """
    offsets = cu_seqlens.to("cpu", torch.int64, copy=True)
    if offsets[0] or offsets[-1] != rows or (offsets.diff() < 0).any():
        want = f"numbers from 0 to {rows}, the tokens of q, none below the one before"
        raise ArgumentValueError(expected("cu_seqlens", want, offsets.tolist()))
    return offsets


def of_varlen(offsets: Tensor, left: int | None, right: int | None) -> Tensor:
    """Ranges [1, 1, T, 4] of the sequences of a varlen batch; offsets: `varlen_offsets`.

    left, right: how many neighbours a query sees on either side; None: all of its sequence.
    """
    offsets = offsets.numpy()
    row, sizes = np.arange(offsets[-1]), np.diff(offsets)
    start, stop = (np.repeat(t, sizes) for t in (offsets[:-1], offsets[1:]))
    first = start if left is None else np.maximum(start, row - left)
    end = stop if right is None else np.minimum(stop, row + right + 1)
    table = np.stack((start, np.zeros_like(start), first, end), axis=-1)
    return torch.from_numpy(table[None, None].astype(np.int32))


def cut(kv_ranges: Tensor, offsets: Tensor) -> Tensor:
    """Ranges [1, 1, T, 4] of one sequence, cut where `varlen_offsets` says that others begin."""
    table, offsets = kv_ranges[0, 0].cpu().numpy(), offsets.numpy()
    start, stop = (np.repeat(t, np.diff(offsets)) for t in (offsets[:-1], offsets[1:]))
    begin, position, first, end = table.T
    if position.any() or (begin > start).any():
        want = "neither a cache nor padding in front: column 0 is the first token"
        got = f"column {begin.max()} at position {position.max()} as the first key"
        raise ArgumentValueError(expected("cu_seqlens", want, got))
    first = np.maximum(first, start)
    cut = np.stack((start, position, first, np.maximum(first, np.minimum(end, stop))), axis=-1)
    return torch.from_numpy(cut[None, None].astype(np.int32))


def anchored(seen: Tensor) -> Tensor:
    """Ranges [B, 1, T, 4] of queries whose positions are counted from the first key they see.

    seen: int32 [B, 1, T, 2], what ``seen_of`` returns.  A row's bits then depend on the keys that
    it sees and on nothing in front of them: neither padding, nor another document, nor keys
    that a sliding window's cache has dropped.
    """
    first, end = seen.unbind(-1)
    nonempty = end > first
    no_key = torch.iinfo(torch.int32).max
    begin = torch.where(nonempty, first, no_key).amin(-1, keepdim=True)
    begin = torch.where(begin == no_key, 0, begin).expand_as(first)
    position = torch.where(nonempty, (begin - first) % BLOCK[1], 0)
    return torch.stack((begin, position, first, end), -1).to(torch.int32)


def _refuse_gaps(padding: Tensor) -> None:
    """Refuse bool ``padding`` [B, L] whose real tokens do not lie next to each other."""
    padding = padding.bool()
    first, end = ends_of(padding).unbind(-1)
    gaps = (end - first != padding.sum(dim=1)).nonzero()
    if len(gaps):
        want = "the real tokens of a sequence next to each other (a 4-D bool mask takes any others)"
        got = f"a gap in sequence {int(gaps[0])}"
        raise ArgumentValueError(expected("attention_mask", want, got))


def _starts(first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Start of the sequence of each column; no query sees across it."""
    size = len(first)
    empty = first >= end
    previous_end = np.maximum.accumulate(np.where(empty, 0, end))
    next_first = np.minimum.accumulate(np.where(empty, size, first)[::-1])[::-1]
    column = np.arange(size)
    starts = (np.concatenate(([0], previous_end[:-1])) <= column) & (next_first >= column)
    return np.maximum.accumulate(np.where(starts, column, 0))


class Content(NamedTuple):
    """Content of ``kv_ranges``: [B, T, 4], its bytes, and its shape and hash, which name it.

    version: of the tensor; backward: the number of the backward pass that read it, -1 for none.
    """

    table: np.ndarray
    raw: bytes
    name: tuple[tuple[int, ...], bytes]
    version: int
    backward: int


_contents = WeakIdKeyDictionary()


def content_of(kv_ranges: Tensor) -> Content:
    """Read ``kv_ranges``, once for all layers of a backward pass; waits for its device.

    Elsewhere it is read in every call: NumPy, ``.data`` and replays of CUDA graphs write without a
    new version.
    """
    content, backward = _contents.get(kv_ranges), torch._C._current_graph_task_id()
    version = -1 if kv_ranges.is_inference() else kv_ranges._version
    is_current = content is not None and (content.version, content.backward) == (version, backward)
    if is_current and -1 not in (version, backward):
        return content
    table = kv_ranges[:, 0].cpu().numpy()
    raw = table.tobytes()
    if content is not None and content.raw == raw:
        content = content._replace(version=version, backward=backward)
    else:
        # Not a view of the tensor, which would keep its own key alive.
        table = np.frombuffer(raw, table.dtype).reshape(table.shape)
        # Caches have many names and count no bytes of them.
        name = table.shape, hashlib.sha256(raw).digest()
        content = Content(table, raw, name, version, backward)
    _contents[kv_ranges] = content
    return content


def runs_of(kv_ranges: Tensor, device: str) -> tuple[Run, ...]:
    """The runs of ``kv_ranges``, their masks on ``device``; kept by content, for the next layer."""
    table, _, name, *_ = content_of(kv_ranges)
    return lowering.cache.get(("runs", name, device), lambda: _runs(table, device))


def _runs(table: np.ndarray, device: str) -> tuple[Run, ...]:
    batch = len(table)
    if batch > 1 and (table == table[:1]).all():
        cuts = [(slice(0, batch), cut) for cut in _cuts(table[0])]
    else:
        cuts = [(slice(b, b + 1), cut) for b in range(batch) for cut in _cuts(table[b])]
    return tuple(_run(rows, cut, device) for rows, cut in cuts)


def _cuts(rows: np.ndarray) -> Iterator[tuple[slice | Tensor, np.ndarray]]:
    """The queries of each sequence of one batch row, from the first to the last that sees a key.

    Queries with one beginning and one position are a sequence.  Where sequences take turns, as
    those of `anchored` do, the rows of each are listed.
    """
    seeing = (rows[:, 3] > rows[:, 2]).nonzero()[0]
    continues = (rows[seeing[1:], :2] == rows[seeing[:-1], :2]).all(axis=1)
    pieces = [piece for piece in np.split(seeing, (~continues).nonzero()[0] + 1) if len(piece)]
    groups: dict[tuple[int, ...], list[np.ndarray]] = {}
    for piece in pieces:
        groups.setdefault(tuple(rows[piece[0], :2].tolist()), []).append(piece)
    for group in groups.values():
        if len(group) == 1:
            queries = slice(int(group[0][0]), int(group[0][-1]) + 1)
            yield queries, rows[queries]
        else:
            listed = np.concatenate(group)
            yield torch.from_numpy(listed), rows[listed]


def _run(batch: slice, cut: tuple[slice | Tensor, np.ndarray], device: str) -> Run:
    queries, rows = cut
    seeing = rows[:, 3] > rows[:, 2]
    begin, position = (int(x) for x in rows[seeing][0, :2])
    shift = position % BLOCK[1]
    skipped = (int(rows[seeing, 2].min()) - begin + shift) // BLOCK[1] * BLOCK[1]
    if skipped:
        # Whole blocks that none of these queries sees are no part of any row's bits.
        begin, shift = begin + skipped - shift, 0
    first, end = (np.where(seeing, rows[:, i] - begin + shift, 0) for i in (2, 3))
    keys = slice(begin, begin + int(end.max()) - shift)
    mask = BlockMask.from_rule(
        _rule(first, end, device), len(rows), int(end.max()), block_size=BLOCK, device=device
    )
    return Run(batch, queries, keys, shift, lowering.lower(mask))


def _rule(first: np.ndarray, end: np.ndarray, device: str) -> Rule:
    """A band if the ranges are one, which kernels evaluate without stored bits."""
    band = _band(first, end)
    if band is not None:
        return band
    tensors = (torch.from_numpy(t.astype(np.int32))[None].to(device) for t in (first, end))
    return Spans(*tensors)


def _band(first: np.ndarray, end: np.ndarray) -> Band | None:
    row, least, most = np.arange(len(first)), int(first.min()), int(end.max())
    lo, hi = int((first - row).min()), int((end - 1 - row).max())
    clipped = np.maximum(row + lo, least), np.minimum(row + hi + 1, most)
    if (first == clipped[0]).all() and (end == clipped[1]).all() and (lo >= least or not least):
        return Band(None if lo <= 1 - len(row) else lo, None if hi >= most - 1 else hi)
    return None


def share_keys(runs: tuple[Run, ...]) -> bool:
    """Whether a key is one of several runs, so that its gradient is a sum over them."""
    ends: dict[int, int] = {}
    for run in sorted(runs, key=lambda run: run.keys.start):
        for row in range(run.batch.start, run.batch.stop):
            if run.keys.start < ends.get(row, 0):
                return True
            ends[row] = run.keys.stop
    return False


class Documents(NamedTuple):
    """Whole sequences of a buffer [B, T] with one window: (left, right), None for no bound.

    ``bounds``: where each begins and ends, among B * T tokens.
    """

    bounds: tuple[tuple[int, int], ...]
    window: tuple[int | None, int | None]

    def on(self, device: torch.device) -> Tensor:
        """``bounds`` as int32 [N, 2] on a device, kept there."""

        def make() -> Tensor:
            return torch.tensor(self.bounds, dtype=torch.int32, device="cpu").to(device)

        return lowering.cache.get(("bounds", self.bounds, str(device)), make)

    def fill_unused_(self, t: Tensor, dim: int, fill: float = 0.0) -> Tensor:
        """Write ``fill`` to the tokens of no sequence along ``dim``, and return ``t``."""
        tokens = t.shape[dim]
        if sum(end - begin for begin, end in self.bounds) == tokens:
            return t

        def make() -> Tensor:
            is_unused = np.ones(tokens, bool)
            for begin, end in self.bounds:
                is_unused[begin:end] = False
            return torch.from_numpy(np.flatnonzero(is_unused)).to(t.device)

        key = "unused tokens", self.bounds, tokens, str(t.device)
        return t.index_fill_(dim, lowering.cache.get(key, make), fill)


#: Not among the masks: no plan holds Documents, and plans go whenever a mask does.
_documents = ByteCache("documents of attention ranges", 16 << 20)


def documents_of(kv_ranges: Tensor) -> Documents | None:
    """Whole sequences with one window, if there are several; None for a batch that lies alike."""
    table, _, name, *_ = content_of(kv_ranges)
    # With the table, whose bytes the cache counts: those of Documents are none.
    return _documents.get(name, lambda: (_documents_of(table), table))[0]


def _documents_of(table: np.ndarray) -> Documents | None:
    if len(table) > 1 and (table == table[:1]).all():
        return None
    cuts = [(b, *cut) for b in range(len(table)) for cut in _cuts(table[b])]
    if len(cuts) < 2:
        return None
    bounds, bands = [], []
    for b, queries, rows in cuts:
        if isinstance(queries, Tensor):
            return None
        begin, position, first, end = rows.T
        covers_sequence = (begin == queries.start).all() and end.max() == queries.stop
        band = _band(first - begin, end - begin)
        if position.any() or not covers_sequence or band is None:
            return None
        bounds.append((b * table.shape[1] + queries.start, b * table.shape[1] + queries.stop))
        bands.append(band)
    most = [end - begin - 1 for begin, end in bounds]
    left = _side([None if band.lo is None else -band.lo for band in bands], most)
    right = _side([band.hi for band in bands], most)
    return None if NO_SIDE in (left, right) else Documents(tuple(bounds), (left, right))


#: Of sequences that have no side of a window in common.
NO_SIDE = -1


def _side(sides: list[int | None], most: list[int]) -> int | None:
    """One side of a window that all sequences share.

    most: how far from itself a token of each can see; None of ``sides`` is no bound.
    """
    bounds = {side for side in sides if side is not None}
    if not bounds:
        return None
    side = max(bounds)
    free = [reach for bound, reach in zip(sides, most, strict=True) if bound is None]
    return side if len(bounds) == 1 and side >= max(free, default=0) else NO_SIDE
