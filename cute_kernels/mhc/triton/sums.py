"""Tiles that are summed together, for the Triton kernels of mhc."""

from __future__ import annotations

import triton
import triton.language as tl

#: Halvings of a count of tiles that `stack` knows: up to 4096.
_LEVELS = tl.constexpr(12)


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
