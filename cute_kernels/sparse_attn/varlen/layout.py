"""Layout of a varlen batch, in which one launch gives each sequence the bytes it has alone.

A row's bits depend on which block of 128 a key falls into, and an order of sums on which block of
rows a query does.  So rows are counted as if each sequence began at a multiple of 128, as it does
alone, and blocks pair rows of one sequence only: not even NaN of a neighbour gets across.

SM90 kernels read sequences in place, from their bounds, and all else follows on the device.  Triton
gets copies, with rows of zeros in the gaps, and lists from the host, which are kept for the next
layer:

    bounds -> Layout (where tokens go)  -> a mask of blocks on the diagonal -> LoweredMask
              each sequence's schedule  -> side by side                     -> Order
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...schedulers.masks.diagonal import Lists, diagonal, lists_of
from ...schedulers.masks.mask import BlockMask
from ...schedulers.masks.rules import Band, Grid, indices
from ...schedulers.masks.spans import Spans
from ...schedulers.order.safety import admit
from ...schedulers.order.schedule import Schedule
from ...schedulers.order.side_by_side import side_by_side
from .. import lowering, masks
from ..masks import BLOCK, LoweredMask, Order, Window


def from_offsets(offsets: Tensor) -> Tensor:
    """Bounds [N, 2] of sequences from offsets[i] to offsets[i + 1], a view; bounds as they are."""
    if offsets.dim() == 2:
        return offsets
    step = offsets.stride(0)
    return offsets.as_strided((len(offsets) - 1, 2), (step, step))


class Layout(NamedTuple):
    """Rows of the tokens of all sequences of a buffer [1, T].

    begins   int64 [N] first row of each sequence; lengths  int64 [N], none of them 0
    length   rows in all: the last sequence has no gap behind it
    device   that of the indices, all int64, which are empty where nothing is copied:
    origin   [length] the token of each row, 0 for a gap
    gaps     the rows of no token
    rows     [T] the row of each token, 0 for one of no sequence
    unused_tokens  the tokens of no sequence
    needs_copy     False where each token is the row that it would be copied to, and each row a
                   token's
    """

    begins: np.ndarray
    lengths: np.ndarray
    length: int
    device: str
    origin: Tensor
    gaps: Tensor
    rows: Tensor
    unused_tokens: Tensor
    needs_copy: bool

    def pad(self, t: Tensor, fill: float = 0.0) -> Tensor:
        """[1, T, ..] -> [1, length, ..], with gaps of ``fill``."""
        # By an index, which torch copies as whole rows, near a copy's bandwidth; `index_select` and
        # `index_copy_` go element by element (pytorch #151612).
        return t[0][self.origin].index_fill_(0, self.gaps, fill)[None] if self.needs_copy else t

    def unpad(self, t: Tensor, fill: float = 0.0) -> Tensor:
        """The inverse, to [1, T, ..]; ``fill`` where the buffer has tokens of no sequence."""
        if not self.needs_copy:
            return t
        return t[0][self.rows].index_fill_(0, self.unused_tokens, fill)[None]


def layout(bounds: Tensor, tokens: int, device: str) -> Layout:
    """Layout of the sequences of a buffer of so many tokens; ``bounds`` [N, 2] on the CPU."""
    table = bounds.numpy().astype(np.int64)
    key = "layout", table.tobytes(), tokens, device
    return lowering.cache.get(key, lambda: _layout(*table.T, tokens, device))


def _layout(places: np.ndarray, ends: np.ndarray, tokens: int, device: str) -> Layout:
    used = ends > places
    places, lengths = places[used].copy(), (ends - places)[used]
    blocks = -(-lengths // BLOCK[0])
    begins = np.concatenate(([0], (blocks * BLOCK[0]).cumsum()[:-1]))
    length = int(begins[-1] + lengths[-1])
    needs_copy = bool(lengths.sum() != tokens or length != tokens or (begins != places).any())
    indices = (np.zeros(0, np.int64),) * 4
    if needs_copy:
        row, token = (_ranges(first, lengths) for first in (begins, places))
        (origin, gaps), (rows, unused) = (
            _placed_at(row, token, length),
            _placed_at(token, row, tokens),
        )
        indices = origin, gaps, rows, unused
    indices = (torch.from_numpy(each).to(device) for each in indices)
    return Layout(begins, lengths, length, device, *indices, needs_copy)


def _ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenated ranges: ``lengths[i]`` numbers from ``begins[i]`` on, for each i."""
    starts = np.concatenate(([0], lengths.cumsum()[:-1]))
    return np.arange(lengths.sum()) + np.repeat(begins - starts, lengths)


def _placed_at(index: np.ndarray, value: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """([size] with each value at its index and 0 elsewhere, the indices elsewhere)."""
    out = np.full(size, -1, np.int64)
    out[index] = value
    free = np.flatnonzero(out < 0)
    out[free] = 0
    return out, free


def lowered(rows: Layout, window: Window, device: str) -> LoweredMask:
    """The mask of a layout; its lists on ``device``, what schedules are made of on the CPU."""
    key = "varlen", rows.begins.tobytes(), rows.lengths.tobytes(), window, device
    return lowering.cache.get(key, lambda: _moved(_on_host(rows, window), device))


@torch.inference_mode(False)
def _moved(mask: LoweredMask, device: str) -> LoweredMask:
    tensors = {name: getattr(mask, name).to(device) for name in masks.TENSORS}
    return dataclasses.replace(mask, **tensors)


def _on_host(row_layout: Layout, window: Window) -> LoweredMask:
    key = "varlen", row_layout.begins.tobytes(), row_layout.lengths.tobytes(), window, "host"
    return lowering.cache.get(key, lambda: masks.lower(_mask(row_layout, *window)))


def _mask(row_layout: Layout, left: int | None, right: int | None) -> BlockMask:
    if right == 0:
        # No row in front of a gap sees it: what a window leaves of the blocks is all there is.
        band = Band(None if left is None else -left, 0)
        sequence_lists = [
            (int(begin) // BLOCK[0], _blocks(band, size)) for begin, size in _sizes(row_layout)
        ]
        return diagonal(sequence_lists, row_layout.length, BLOCK, band)
    # A row of a gap sees nothing, and none sees the gap behind its sequence.
    first, end = np.zeros((2, 1, row_layout.length), np.int32)
    for begin, length in zip(row_layout.begins, row_layout.lengths, strict=True):
        row = np.arange(begin, begin + length)
        stop = begin + length
        first[0, row] = begin if left is None else np.maximum(begin, row - left)
        end[0, row] = stop if right is None else np.minimum(stop, row + right + 1)
    rule = Spans(torch.from_numpy(first), torch.from_numpy(end))
    return BlockMask.from_rule(
        rule, row_layout.length, row_layout.length, block_size=BLOCK, device="cpu"
    )


def _sizes(row_layout: Layout) -> Iterator[tuple[int, int]]:
    """(begin, rows) of each sequence with the gap behind it; the last has none."""
    return zip(
        row_layout.begins,
        np.diff(row_layout.begins, append=row_layout.length).tolist(),
        strict=True,
    )


def _blocks(band: Band, rows: int) -> Lists:
    """Block lists of a band of so many rows and keys; sequences of as many blocks share them."""

    def make() -> Lists:
        mask = BlockMask.from_rule(band, rows, rows, block_size=BLOCK, device="cpu")
        return lists_of(mask)

    return lowering.cache.get(("blocks of a band", band.lo, band.hi, rows), make)


def order(
    rows: Layout, window: Window, heads: tuple[int, int], head_dim: int, device: str
) -> Order:
    """The order of a varlen batch's backward: "spt" for each sequence alone.

    heads: query heads and KV heads.
    """
    facts = rows.begins.tobytes(), rows.lengths.tobytes(), window, heads, head_dim, device
    return lowering.cache.get(
        ("varlen order", *facts), lambda: _order(rows, window, heads, head_dim, device)
    )


@torch.inference_mode(False)
def _order(
    row_layout: Layout, window: Window, heads: tuple[int, int], head_dim: int, device: str
) -> Order:
    lowered_mask = _on_host(row_layout, window)
    sizes = heads[1], head_dim, heads[0] // heads[1], torch.device(device).type
    # The longest first: short ones fill what they leave.
    schedules = [
        (
            int(row_layout.begins[sequence]) // BLOCK[0],
            _alone(int(row_layout.lengths[sequence]), window, sizes),
        )
        for sequence in np.argsort(-row_layout.lengths, kind="stable")
    ]
    schedule = side_by_side(schedules, lowered_mask.mask)
    admit(schedule, lowered_mask.mask)
    return Order(*(t.to(device) for t in masks.order_of(lowered_mask, schedule)))


def _alone(length: int, window: Window, sizes: tuple[int, int, int, str]) -> Schedule:
    """The schedule of a sequence alone; lengths with the same blocks share one.

    sizes: those of ``lowering.admitted``.
    """
    left, right = window
    # As `BlockMask.sliding_window`: a side that reaches past the end is no bound.
    band = Band(
        None if left is None or left >= length - 1 else -left,
        None if right is None or right >= length - 1 else right,
    )

    def make() -> Schedule:
        mask = BlockMask.from_rule(band, length, length, block_size=BLOCK, device="cpu")
        return lowering.admitted(lowering.lower(mask), lowering.OF_SEQUENCES, *sizes)

    return lowering.cache.get(("alone", *_blocks_of(band, length), sizes), make)


def _blocks_of(band: Band, length: int) -> tuple:
    """A name for the blocks of a sequence: equal names, equal blocks, empty, partial or full."""
    if band.lo is None and band.hi in (0, None):
        # On the diagonal of a causal one the last alone can be full: if it has one row.
        return -(-length // BLOCK[0]), length % BLOCK[0] == 1, band.hi
    grid = Grid(length, length, BLOCK)
    row = indices(grid.num_q_blocks, torch.device("cpu"))
    blocks = band.classify(grid, torch.zeros_like(row), torch.zeros_like(row), row).numpy()
    return blocks.shape, blocks.tobytes()
