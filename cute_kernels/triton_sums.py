"""Sums in a written order, for the Triton kernels of every system.

A half onto a half is `tl.sum` over an axis of two, which has one result whoever adds it: no bit
depends on how the compiler hands a tile to threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Halvings of an axis that `halves` knows: up to 65536.
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
def rows_of(block, ROWS: tl.constexpr):
    """Indices of a block of rows, in 64 bits."""
    return tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
