"""Layout of a varlen batch, in which one launch gives each sequence the bytes it has alone.

A row's bits depend on which block of 128 a key falls into, and an order of sums on which block of
rows a query does.  So rows are counted as if each sequence began at a multiple of 128, as it does
alone, and blocks pair rows of one sequence only: not even NaN of a neighbour gets across.

SM90 kernels read sequences where they lie (``Where``), and all else follows on the device.  Others
are given copies, with rows of zeros in the gaps, and lists from the host, which are kept for the
next layer:

    Where  -> Layout (where tokens go)   -> a mask of blocks on the diagonal -> LoweredMask
              each sequence's schedule   -> side by side                     -> Order
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


class Where(NamedTuple):
    """Bounds of the sequences among the tokens of a buffer [B, T].

    bounds  [N, 2], int32 or int64: where each begins and ends, one behind another
    places  the same as numbers that the host knows; there may be tokens of no sequence then
    """

    bounds: Tensor
    places: tuple[tuple[int, int], ...] | None = None

    def on(self, device: torch.device) -> Tensor:
        """``bounds`` for kernels of a device, which moves others itself; of places kept there."""
        if self.places is None:
            return self.bounds
        key = "bounds", self.places, str(device)
        return lowering.cache.get(key, lambda: self.bounds.to(device))

    def filled(self, t: Tensor, dim: int, fill: float = 0.0) -> Tensor:
        """``t`` in place, with ``fill`` for the tokens of no sequence along ``dim``."""
        tokens = t.shape[dim]
        if self.places is None or sum(end - begin for begin, end in self.places) == tokens:
            return t
        key = "holes", self.places, tokens, str(t.device)
        first, end = self.bounds.numpy().astype(np.int64).T
        holes = lowering.cache.get(key, lambda: _holes(first, end, tokens).to(t.device))
        return t.index_fill_(dim, holes, fill)


def between(offsets: Tensor) -> Where:
    """Bounds of sequences from offsets[i] to offsets[i + 1]."""
    step = offsets.stride(0)
    return Where(offsets.as_strided((len(offsets) - 1, 2), (step, step)))


def at_places(places: tuple[tuple[int, int], ...]) -> Where:
    """Bounds of sequences from places[i][0] to places[i][1]."""
    return Where(torch.tensor(places, dtype=torch.int32, device="cpu").view(-1, 2), places)


def _holes(first: np.ndarray, end: np.ndarray, tokens: int) -> Tensor:
    """The tokens of no sequence: int64."""
    inside = np.zeros(tokens, bool)
    inside[_in_a_row(first, end - first)] = True
    return torch.from_numpy(np.flatnonzero(~inside))


class Copies(NamedTuple):
    """Indices from a buffer's tokens to the rows of a layout and back, on the device; all int64.

    origin  [length] the place in the buffer of each row's token, 0 for a gap
    gaps    the rows of none
    rows    [B T] the row of each of the buffer's tokens, 0 for one of no sequence
    """

    origin: Tensor
    gaps: Tensor
    rows: Tensor


class Layout(NamedTuple):
    """Rows of the tokens of all sequences of a buffer [B, T].

    begins   int64 [N] first row of each sequence; lengths  int64 [N], none of them 0
    places   int64 [N] where each begins in the buffer, whose tokens are ``tokens``
    length   rows in all: the last sequence has no gap behind it
    device   that of what follows
    holes    int64: the buffer's tokens of no sequence; None if there are none
    moved    False where each token is the row that it would be copied to, and each row a token's
    """

    begins: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    tokens: int
    length: int
    device: str
    holes: Tensor | None
    moved: bool

    def spread(self, t: Tensor, fill: float = 0.0) -> Tensor:
        """[B, T, ..] -> [1, length, ..], with gaps of ``fill``."""
        t = t.flatten(0, 1)
        if not self.moved:
            return t[None]
        # By an index, which torch copies as whole rows, near a copy's bandwidth; `index_select` and
        # `index_copy_` go element by element (pytorch #151612).
        origin, gaps, _ = _copies(self)
        return t[origin].index_fill_(0, gaps, fill)[None]

    def gathered(self, t: Tensor, sizes: tuple[int, int], fill: float = 0.0) -> Tensor:
        """The inverse, to [B, T, ..]; ``fill`` where the buffer has tokens of no sequence."""
        t = t[0]
        if self.moved:
            t = t[_copies(self).rows]
            t = t if self.holes is None else t.index_fill_(0, self.holes, fill)
        return t.unflatten(0, sizes)


def layout(of: Where, tokens: int, device: str) -> Layout:
    """Layout of the sequences of a buffer of so many tokens; ``bounds`` on the CPU."""
    bounds = of.bounds.numpy().astype(np.int64)
    key = "layout", bounds.tobytes(), tokens, device
    return lowering.cache.get(key, lambda: _layout(*bounds.T, tokens, device))


def _layout(places: np.ndarray, ends: np.ndarray, tokens: int, device: str) -> Layout:
    used = ends > places
    places, lengths = places[used].copy(), (ends - places)[used]
    blocks = -(-lengths // BLOCK[0])
    begins = np.concatenate(([0], (blocks * BLOCK[0]).cumsum()[:-1]))
    length, free = int(begins[-1] + lengths[-1]), tokens - int(lengths.sum())
    moved = bool(free or length != tokens or (begins != places).any())
    holes = _holes(places, places + lengths, tokens).to(device) if free else None
    return Layout(begins, lengths, places, tokens, length, device, holes, moved)


def _copies(row_layout: Layout) -> Copies:
    arrays = (t.tobytes() for t in (row_layout.begins, row_layout.lengths, row_layout.places))
    key = "copies", *arrays, row_layout.tokens, row_layout.device
    return lowering.cache.get(key, lambda: _made_copies(row_layout))


def _made_copies(row_layout: Layout) -> Copies:
    row, source = (
        _in_a_row(begins, row_layout.lengths) for begins in (row_layout.begins, row_layout.places)
    )
    origin, gaps = _placed_at(row, source, row_layout.length)
    rows, _ = _placed_at(source, row, row_layout.tokens)
    return Copies(*(torch.from_numpy(t).to(row_layout.device) for t in (origin, gaps, rows)))


def _in_a_row(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
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


def lowered(of: Layout, window: Window, device: str) -> LoweredMask:
    """The mask of a layout; its lists on ``device``, what schedules are made of on the CPU."""
    key = "pack", of.begins.tobytes(), of.lengths.tobytes(), window, device
    return lowering.cache.get(key, lambda: _moved(_on_host(of, window), device))


@torch.inference_mode(False)
def _moved(mask: LoweredMask, device: str) -> LoweredMask:
    tensors = {name: getattr(mask, name).to(device) for name in masks.TENSORS}
    return dataclasses.replace(mask, **tensors)


def _on_host(row_layout: Layout, window: Window) -> LoweredMask:
    key = "pack", row_layout.begins.tobytes(), row_layout.lengths.tobytes(), window, "host"
    return lowering.cache.get(key, lambda: masks.lower(_mask(row_layout, *window)))


def _mask(row_layout: Layout, left: int | None, right: int | None) -> BlockMask:
    if right == 0:
        # In front of a gap nobody sees it: what a window leaves of the blocks is all there is.
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


def order(of: Layout, window: Window, heads: tuple[int, int], head_dim: int, device: str) -> Order:
    """The order of a pack's backward: "spt" for each sequence alone.

    heads: query heads and KV heads.
    """
    facts = of.begins.tobytes(), of.lengths.tobytes(), window, heads, head_dim, device
    return lowering.cache.get(
        ("order of a pack", *facts), lambda: _order(of, window, heads, head_dim, device)
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
