"""Sums in a written order, for the Triton kernels of every system.

Two at a time: `tl.sum` over an axis of two has one result whoever adds it, so no bit depends on how
the compiler hands a tile to threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Halvings of an axis that are known: up to 65536.
_LEVELS = tl.constexpr(16)


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
def lane_sum(v, LANES: tl.constexpr):
    """[LANES] -> a number: each half of the lanes onto half."""
    return tl.max(over_columns(tl.reshape(v, [1, LANES]), 1, LANES), axis=0)  # of one element


@triton.jit
def pairs(v, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, SIZE] -> [ROWS]: neighbours, then neighbours of those sums, and so on.

    Neighbours lie in one thread, then in one warp: little is left to exchange between warps.
    """
    for level in tl.static_range(_LEVELS):
        if (SIZE >> level) > 1:
            v = tl.sum(tl.reshape(v, [ROWS, SIZE >> (level + 1), 2]), axis=2)
    return tl.reshape(v, [ROWS])


@triton.jit
def rows_of(block, ROWS: tl.constexpr):
    """Indices of a block of rows, in 64 bits."""
    return tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
