"""Sequences packed one behind another, laid out so that one launch has each one's own bytes.

A row's bits depend on which block of 128 a key falls into, and an order of sums on which block of
rows a query does.  So each sequence begins at a multiple of 128, as it does alone; rows of zeros
fill the gaps.  Blocks pair rows of one sequence only: not even NaN of a neighbour gets across.

    offsets  -> Layout (where tokens go)      -> a mask of blocks on the diagonal -> LoweredMask
                each sequence's own schedule  -> side by side                     -> Order

What follows from the same offsets is kept, for the next layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..schedulers.masks.diagonal import Lists, diagonal, lists_of
from ..schedulers.masks.mask import BlockMask
from ..schedulers.masks.rules import Band, Grid, indices
from ..schedulers.masks.spans import Spans
from ..schedulers.order.safety import admit
from ..schedulers.order.schedule import Schedule
from ..schedulers.order.side_by_side import side_by_side
from . import checks, masks, prepare
from .masks import BLOCK, LoweredMask, Order

#: (left, right): how many tokens before and behind itself a query sees; None: all.
Window = tuple[int | None, int | None]


class Copies(NamedTuple):
    """Of a buffer's tokens to the rows of a layout and back, on the device; all int64.

    origin  [length] the place in the buffer of each row's token, 0 for a gap
    gaps    the rows of none
    rows    [B T] the row of each of the buffer's tokens, 0 for one of no sequence
    """

    origin: Tensor
    gaps: Tensor
    rows: Tensor


class Layout(NamedTuple):
    """Where the tokens of sequences go, which a buffer [B, T] holds.

    begins   int64 [N] first row of each sequence; lengths  int64 [N], none of them 0
    places   int64 [N] where each begins in the buffer, whose tokens are ``tokens``
    length   rows in all: the last sequence has no gap behind it
    device   that of what follows
    holes    int64: the buffer's tokens of no sequence; None if there are none
    table    int32 [blocks, 2], for kernels that read the buffer (``device/packed``); None where
             each token is the row that it would be copied to, and each row a token's
    """

    begins: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    tokens: int
    length: int
    device: str
    holes: Tensor | None
    table: Tensor | None

    def spread(self, t: Tensor, fill: float = 0.0) -> Tensor:
        """[B, T, ..] -> [1, length, ..], with gaps of ``fill``."""
        t = t.flatten(0, 1)
        if self.table is None:
            return t[None]
        # By an index, which torch copies as whole rows, near a copy's bandwidth; `index_select` and
        # `index_copy_` go element by element (pytorch #151612).
        origin, gaps, _ = _copies(self)
        return t[origin].index_fill_(0, gaps, fill)[None]

    def gathered(self, t: Tensor, sizes: tuple[int, int], fill: float = 0.0) -> Tensor:
        """The inverse, to [B, T, ..]; ``fill`` where the buffer has tokens of no sequence."""
        t = t[0]
        if self.table is not None:
            t = self.filled(t[_copies(self).rows], 0, fill)
        return t.unflatten(0, sizes)

    def filled(self, t: Tensor, dim: int, fill: float = 0.0) -> Tensor:
        """``t`` in place, with ``fill`` for tokens of no sequence along ``dim``."""
        return t if self.holes is None else t.index_fill_(dim, self.holes, fill)


def layout(offsets: Tensor, device: str) -> Layout:
    """Of sequences from offsets[i] to offsets[i + 1], int64 on the CPU from 0 to all tokens."""
    key = "layout", tuple(offsets.tolist()), device
    where = offsets.numpy()
    return prepare.cache.get(
        key, lambda: _layout(where[:-1], np.diff(where), int(where[-1]), device)
    )


def layout_of_places(places: tuple[tuple[int, int], ...], sizes: int, device: str) -> Layout:
    """Of sequences from places[i][0] to places[i][1] of a buffer of ``sizes`` tokens, B times T."""
    key = "layout", places, sizes, device
    first, end = np.array(places, np.int64).reshape(-1, 2).T
    return prepare.cache.get(key, lambda: _layout(first, end - first, sizes, device))


def _layout(places: np.ndarray, lengths: np.ndarray, tokens: int, device: str) -> Layout:
    places, lengths = places[lengths > 0].copy(), lengths[lengths > 0]
    blocks = -(-lengths // BLOCK[0])
    begins = np.concatenate(([0], (blocks * BLOCK[0]).cumsum()[:-1]))
    length, free = int(begins[-1] + lengths[-1]), tokens - int(lengths.sum())
    table = holes = None
    if free or length != tokens or (begins != places).any():
        of_sequence = np.stack((begins - places, begins + lengths), 1).astype(np.int32)
        table = torch.from_numpy(np.repeat(of_sequence, blocks, 0)).to(device)
    if free:
        inside = np.zeros(tokens, bool)
        inside[_in_a_row(places, lengths)] = True
        holes = torch.from_numpy(np.flatnonzero(~inside)).to(device)
    return Layout(begins, lengths, places, tokens, length, device, holes, table)


def _copies(of: Layout) -> Copies:
    arrays = (t.tobytes() for t in (of.begins, of.lengths, of.places))
    key = "copies", *arrays, of.tokens, of.device
    return prepare.cache.get(key, lambda: _made_copies(of))


def _made_copies(of: Layout) -> Copies:
    row, source = (_in_a_row(begins, of.lengths) for begins in (of.begins, of.places))
    origin, gaps = _placed_at(row, source, of.length)
    rows, _ = _placed_at(source, row, of.tokens)
    return Copies(*(torch.from_numpy(t).to(of.device) for t in (origin, gaps, rows)))


def _in_a_row(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """begins[0], begins[0] + 1, .. of so many; then those of the next."""
    starts = np.concatenate(([0], lengths.cumsum()[:-1]))
    return np.arange(lengths.sum()) + np.repeat(begins - starts, lengths)


def _placed_at(at: np.ndarray, value: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """[size] with each value at its place and 0 elsewhere; the places elsewhere."""
    made = np.full(size, -1, np.int64)
    made[at] = value
    free = np.flatnonzero(made < 0)
    made[free] = 0
    return made, free


def lowered(of: Layout, window: Window, device: str) -> LoweredMask:
    """The mask of a layout; its lists on ``device``, what schedules are made of on the CPU."""
    key = "pack", of.begins.tobytes(), of.lengths.tobytes(), window, device
    return prepare.cache.get(key, lambda: _moved(_on_host(of, window), device))


@torch.inference_mode(False)
def _moved(mask: LoweredMask, device: str) -> LoweredMask:
    parts = {name: getattr(mask, name).to(device) for name in masks.TENSORS}
    return dataclasses.replace(mask, **parts)


def _on_host(of: Layout, window: Window) -> LoweredMask:
    key = "pack", of.begins.tobytes(), of.lengths.tobytes(), window, "host"
    return prepare.cache.get(key, lambda: masks.lower(_mask(of, *window)))


def _mask(of: Layout, left: int | None, right: int | None) -> BlockMask:
    if right == 0:
        # In front of a gap nobody sees it: what a window leaves of the blocks is all there is.
        band = Band(None if left is None else -left, 0)
        parts = [(int(begin) // BLOCK[0], _blocks(band, size)) for begin, size in _sizes(of)]
        return diagonal(parts, of.length, BLOCK, band)
    # A row of a gap sees nothing, and none sees the gap behind its sequence.
    first, end = np.zeros((2, 1, of.length), np.int32)
    for begin, length in zip(of.begins, of.lengths, strict=True):
        row = np.arange(begin, begin + length)
        stop = begin + length
        first[0, row] = begin if left is None else np.maximum(begin, row - left)
        end[0, row] = stop if right is None else np.minimum(stop, row + right + 1)
    rule = Spans(torch.from_numpy(first), torch.from_numpy(end))
    return BlockMask.from_rule(rule, of.length, of.length, block_size=BLOCK, device="cpu")


def _sizes(of: Layout) -> Iterator[tuple[int, int]]:
    """(begin, rows) of each sequence with the gap behind it; the last has none."""
    return zip(of.begins, np.diff(of.begins, append=of.length).tolist(), strict=True)


def _blocks(band: Band, rows: int) -> Lists:
    """Of a band of so many rows and keys; sequences of as many blocks share them."""

    def make() -> Lists:
        mask = BlockMask.from_rule(band, rows, rows, block_size=BLOCK, device="cpu")
        return lists_of(mask)

    return prepare.cache.get(("blocks of a band", band.lo, band.hi, rows), make)


def order(of: Layout, window: Window, heads: tuple[int, int], head_dim: int, device: str) -> Order:
    """The order of a pack's backward: that of ``schedule="auto"`` for each sequence alone.

    heads: query heads and KV heads.
    """
    facts = of.begins.tobytes(), of.lengths.tobytes(), window, heads, head_dim, device
    return prepare.cache.get(
        ("order of a pack", *facts), lambda: _order(of, window, heads, head_dim, device)
    )


@torch.inference_mode(False)
def _order(of: Layout, window: Window, heads: tuple[int, int], head_dim: int, device: str) -> Order:
    whole = _on_host(of, window)
    sizes = heads[1], head_dim, heads[0] // heads[1], torch.device(device).type
    # The longest first: short ones fill what they leave.
    parts = [
        (int(of.begins[at]) // BLOCK[0], _alone(int(of.lengths[at]), window, sizes))
        for at in np.argsort(-of.lengths, kind="stable")
    ]
    made = side_by_side(parts, whole.mask)
    admit(made, whole.mask)
    return Order(*(t.to(device) for t in masks.order_of(whole, made)))


def _alone(length: int, window: Window, sizes: tuple[int, int, int, str]) -> Schedule:
    """The schedule of a sequence alone; lengths with the same blocks share one.

    sizes: those of ``prepare.admitted``.
    """
    left, right = window
    # As `BlockMask.sliding_window`: a side that reaches past the end is no bound.
    band = Band(
        None if left is None or left >= length - 1 else -left,
        None if right is None or right >= length - 1 else right,
    )

    def make() -> Schedule:
        mask = BlockMask.from_rule(band, length, length, block_size=BLOCK, device="cpu")
        return prepare.admitted(prepare.lower(mask), checks.AUTO, *sizes)

    return prepare.cache.get(("alone", *_blocks_of(band, length), sizes), make)


def _blocks_of(band: Band, length: int) -> tuple:
    """A name for the blocks of a sequence: equal names, equal blocks, empty, partial or full."""
    if band.lo is None and band.hi in (0, None):
        # On the diagonal of a causal one the last alone can be full: if it has one row.
        return -(-length // BLOCK[0]), length % BLOCK[0] == 1, band.hi
    grid = Grid(length, length, BLOCK)
    row = indices(grid.num_q_blocks, torch.device("cpu"))
    blocks = band.classify(grid, torch.zeros_like(row), torch.zeros_like(row), row).numpy()
    return blocks.shape, blocks.tobytes()
