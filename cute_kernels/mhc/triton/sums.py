"""Sums in a written order, for the Triton kernels of mhc."""

from __future__ import annotations

import triton
import triton.language as tl

#: Halvings of an axis that `halves` knows: up to 4096.
_LEVELS = tl.constexpr(12)


@triton.jit
def halves(v, OUTER: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr):
    """[OUTER, SIZE, INNER], in that order, -> [OUTER, INNER]: each half of SIZE onto half."""
    for level in tl.static_range(_LEVELS):
        if (SIZE >> level) > 1:
            v = tl.sum(tl.reshape(v, [OUTER, 2, SIZE >> (level + 1), INNER]), axis=1)
    return tl.reshape(v, [OUTER, INNER])


@triton.jit
def over_columns(v, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, SIZE] -> [ROWS]."""
    return tl.reshape(halves(v, ROWS, SIZE, 1), [ROWS])


@triton.jit
def stack(tiles, COUNT: tl.constexpr):
    """COUNT tiles [ROWS, COLUMNS] as [ROWS, COLUMNS, 2, 2, ...], the last axes counting them."""
    for level in tl.static_range(_LEVELS):
        if (COUNT >> level) > 1:
            made = ()
            for k in tl.static_range(COUNT >> (level + 1)):
                made = made + (tl.join(tiles[k], tiles[k + (COUNT >> (level + 1))]),)
            tiles = made
    return tiles[0]


@triton.jit
def zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """COUNT tiles of zeros."""
    made = ()
    for _ in tl.static_range(COUNT):
        made = made + (tl.zeros([ROWS, COLUMNS], tl.float32),)
    return made


@triton.jit
def rows_of(block, ROWS: tl.constexpr):
    """Indices of a block of rows, in 64 bits."""
    return tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
