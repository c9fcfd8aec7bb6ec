"""Tiles of grouped products on SM90.  They may read T; they cannot change bits."""

from __future__ import annotations

import functools
from typing import NamedTuple

from .config import GroupedConfig, GroupedDwConfig

#: CTAs of a cluster of kernel_grouped_sm90, which have neighbouring columns, and of dW's kernel,
#: which have neighbouring rows.
PAIR, DW_PAIR = GroupedConfig.cluster_n, GroupedDwConfig.cluster_m
#: Time of a tile of 128 rows by so many columns, per element of K, in ns: of gemm's tile, or of the
#: bytes that it reads out of the L2 where a pair shares A (docs/notes/moe_sm90.md).  Not measured.
COST = {256: 10.6, 192: 8.4, 128: 6.3, 64: 4.2}
#: The same of dW, whose pair shares B as gemm's does: gemm's.
DW_COST = {256: 10.6, 192: 8.1, 128: 5.5, 64: 3.1}
#: The same of the order ``tree``.  256 and 128 as measured on an H200: no cluster shares tiles, so
#: that reading them from the L2 is the floor; 192 and 64 by their bytes.
TREE_COST = {256: 11.5, 192: 9.6, 128: 7.7, 64: 5.8}
#: The widest tile that adds a bias without spilling registers.
WIDEST_BIAS = 192
#: The widest tile of the order ``tree`` that spills no register, by epilogue: a sum of leaves lies
#: beside the accumulator of one.
WIDEST_TREE = {"plain": 192, "bias": 128, "leaves": 256}
ROWS = 128


class Few(NamedTuple):
    """A tile of kernel_grouped_few_sm90: fields of `GroupedFewConfig` that no bit depends on."""

    tile_m: int
    tile_n: int
    tile_k: int


#: Tiles for few rows, narrow ones first.  A wide one has two warpgroups, so that multiplying keeps
#: up with memory; its blocks of K are shorter, so that the ring has as many stages.
FEW = (Few(8, 64, 128), Few(16, 64, 128), Few(32, 128, 64), Few(64, 128, 64))
#: Most rows of an expert, on average, that kernel_grouped_few_sm90 takes: at 4 to 32 of them it was
#: 1.09 to 1.14 times as fast as kernel_grouped_sm90 on an H200; beyond: not run.
MOST_FEW = 32
#: A tile has room for so many times the average, as loads are uneven: an expert with more rows
#: than a tile reads its weight again.
UNEVEN = 4


def widths(bias: bool) -> tuple[int, ...]:
    """Every width of tiles."""
    return tuple(width for width in COST if not bias or width <= WIDEST_BIAS)


@functools.lru_cache(maxsize=4096)
def few(rows: int, experts: int) -> Few | None:
    """Tile for few rows an expert; None where kernel_grouped_sm90 takes them."""
    if rows > MOST_FEW * experts:
        return None
    wanted = min(rows, UNEVEN * rows / experts)
    return next((tile for tile in FEW if tile.tile_m >= wanted), FEW[-1])


@functools.lru_cache(maxsize=4096)
def width(rows: int, experts: int, columns: int, units: int, bias: bool) -> int:
    """Columns of a tile of least predicted time, if rows are spread over all experts."""
    high, clusters = _rows_of_tiles(rows, experts), max(1, units // PAIR)

    def time(tile_n: int) -> tuple[float, int]:
        return _waves(high, columns, PAIR * tile_n, clusters) * COST[tile_n], tile_n

    return min(widths(bias), key=time)


def tree_widths(epilogue: str) -> tuple[int, ...]:
    """Every width of tiles of the order ``tree``."""
    return tuple(width for width in TREE_COST if width <= WIDEST_TREE[epilogue])


@functools.lru_cache(maxsize=4096)
def tree_width(rows: int, experts: int, columns: int, units: int, epilogue: str) -> int:
    """Columns of a tile of the order ``tree``, as in `width`."""
    high = _rows_of_tiles(rows, experts)

    def time(tile_n: int) -> tuple[float, int]:
        return _waves(high, columns, tile_n, units) * TREE_COST[tile_n], tile_n

    return min(tree_widths(epilogue), key=time)


@functools.lru_cache(maxsize=4096)
def dw_width(rows: int, experts: int, columns: int, units: int) -> int:
    """Columns of a tile of [rows, columns] gradients of each expert, by the rule of `width`."""
    high = experts * -(-rows // (DW_PAIR * ROWS))
    clusters = max(1, units // DW_PAIR)

    def time(tile_n: int) -> tuple[float, int]:
        return _waves(high, columns, tile_n, clusters) * DW_COST[tile_n], tile_n

    return min(DW_COST, key=time)


def _rows_of_tiles(rows: int, experts: int) -> int:
    """Predicted rows of tiles: half a tile of each expert is empty on average."""
    return -(-rows // ROWS) + (min(rows, experts) + 1) // 2


def _waves(high: int, columns: int, wide: int, units: int) -> int:
    """Times that so many units compute ``high`` rows of tiles of ``wide`` columns."""
    return -(-high * -(-columns // wide) // units)
