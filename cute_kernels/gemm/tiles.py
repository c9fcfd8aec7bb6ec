"""Tile heuristics of the SM90 kernels.  They may read M; they cannot change bits.

WGMMA's bits are the same at every width, tile and with operands swapped (docs/numerics.md), and the
leaves of a tree are the same ones wherever they are added.  So this file, and no other of gemm, may
read the number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ..schedulers.tiles.leaves import LEAVES
from .config import UNORDERED, Config


class Dense(NamedTuple):
    """A tile of kernel_sm90, by its width; its rows are those of `Config`."""

    tile_n: int


class Skinny(NamedTuple):
    """A tile of kernel_skinny_sm90: the fields of `SkinnyConfig` that no bit depends on."""

    tile_m: int
    tile_n: int
    tile_k: int
    ctas_per_sm: int
    split: int = 1
    pair: int = 1


#: What an SM takes for a tile per element of K, in ns, where all SMs are at work; by its width.
#: Both tables: perf/results/tiles.jsonl, an H200, 2026-11-22.
DENSE_COST: Mapping[int, float] = {256: 10.61, 192: 8.11, 128: 5.54, 64: 3.12}
#: A tree keeps two accumulators, and a wider tile has no registers for them.
_WIDEST_TREE = 192
#: The same for (tile_n, tile_m, pair) of a skinny tile: where half of the SMs are at work, and all.
SKINNY_COST: Mapping[tuple[int, int, int], tuple[float, float]] = {
    (64, 8, 1): (1.85, 1.94),
    (64, 16, 1): (1.96, 2.07),
    (64, 32, 1): (2.0, 2.37),
    (64, 64, 1): (2.3, 2.97),
    (64, 64, 2): (1.89, 1.94),
    (64, 80, 2): (2.16, 2.21),
    (64, 128, 2): (2.68, 2.64),
    (64, 192, 2): (3.43, 3.99),
    (128, 112, 1): (4.56, 5.69),
    (128, 128, 1): (4.58, 5.9),
    (128, 160, 1): (5.63, 6.72),
    (192, 128, 2): (6.78, 8.09),
    (192, 176, 1): (9.5, 11.02),
    (192, 192, 1): (10.12, 11.87),
}
#: Beside a tile's own time, in ns: a launch; the end of a leaf; the meeting of a cluster's CTAs.
START, LEAF, MERGE = 5800.0, 100.0, 800.0
#: Skinny tiles of a second wave start anew; a second tile of few tokens reads the weight again; a
#: wide tile of which part is outside waits for zeros.
ANEW, AGAIN, ZEROS = 1.05, 1.15, 0.5
#: Bytes that an SM's share of the memory gives in a ns.
STREAM = 32.5
#: The most tokens of a tile that may share an SM, and be split; of one with blocks of 256 of K.
NARROW, LONG = 64, 16
#: The most tokens of a tile that adds leaves in registers, by its weight rows.
_TREE_TOKENS = {64: 192, 128: 128, 192: 0}
_SPLITS = (2, LEAVES)


# Cached, as every launch asks; bounded, as a server meets ever new numbers of rows.
@functools.lru_cache(maxsize=4096)
def choose(rows: int, columns: int, k: int, order: str, units: int) -> Dense | Skinny:
    """The tile of least predicted time for [rows, k] x [columns, k] on so many SMs."""
    candidates = (*dense_tiles(order), *_fitting(rows, columns, order, units))
    return min(candidates, key=_time(rows, columns, k, order, units))


@functools.lru_cache(maxsize=4096)
def dense(rows: int, columns: int, k: int, order: str, units: int) -> Dense:
    """The tile of kernel_sm90 of least predicted time, for calls that take no other kernel."""
    return min(dense_tiles(order), key=_time(rows, columns, k, order, units))


@functools.lru_cache(maxsize=4096)
def skinny(rows: int, columns: int, k: int, order: str, units: int) -> Skinny:
    """The tile of kernel_skinny_sm90 of least predicted time."""
    return min(_fitting(rows, columns, order, units), key=_time(rows, columns, k, order, units))


def dense_tiles(order: str) -> tuple[Dense, ...]:
    """Every tile of kernel_sm90 for an order."""
    widest = _WIDEST_TREE if order == "tree" else max(DENSE_COST)
    return tuple(Dense(width) for width in DENSE_COST if width <= widest)


def skinny_tiles(order: str) -> Iterator[Skinny]:
    """Every tile of kernel_skinny_sm90 for an order; of `UNORDERED`, those that it changes."""
    if order == UNORDERED:
        yield from (tile for tile in skinny_tiles("tree") if tile.split > 1)
        return
    for tile_n, tile_m, pair in SKINNY_COST:
        if order == "tree" and tile_m > _TREE_TOKENS[tile_n]:
            continue
        if pair > 1 or tile_m > NARROW:
            yield Skinny(tile_m, tile_n, 128 if tile_m <= NARROW else 64, 1, pair=pair)
            continue
        yield Skinny(tile_m, tile_n, 256 if tile_m <= LONG else 128, 1)
        yield Skinny(tile_m, tile_n, 128, 2)
        if order == "tree":
            for split in _SPLITS:
                yield Skinny(tile_m, tile_n, 128, 1, split)


def _fitting(rows: int, columns: int, order: str, sms: int) -> Iterator[Skinny]:
    """Narrow tiles share an SM where they have to, and are split where SMs would idle.

    Pairs are for more tokens than a tile has.
    """
    for tile in skinny_tiles(order):
        if tile.pair > 1 and rows <= tile.tile_m:
            continue
        ctas = _ctas(tile, rows, columns)
        # Clusters of 8 do not come to fill the last quarter of the SMs.
        capacity = sms if tile.split < LEAVES else sms * 3 // 4
        wide = tile.pair > 1 or tile.tile_m > NARROW
        if wide or tile.ctas_per_sm == 1 + (ctas > capacity):
            yield tile


def _time(rows: int, columns: int, k: int, order: str, sms: int) -> Callable:
    """A function from a tile to (its predicted time, tokens it computes in vain, idle SMs)."""
    leaves = LEAVES if order == "tree" else 0

    def time(tile: Dense | Skinny) -> tuple[float, int, int]:
        ctas = _ctas(tile, rows, columns)
        waves = -(-ctas // sms)
        if isinstance(tile, Dense):
            height, merge, vain = Config.tile_m * Config.cluster_m, 0.0, 0.0
            work = waves * (k * DENSE_COST[tile.tile_n] + leaves * LEAF)
        else:
            height, merge = tile.tile_m, MERGE * (tile.split > 1)
            half, full = SKINNY_COST[tile.tile_n, tile.tile_m, tile.pair]
            crowd = min(1.0, max(0.0, 2 * ctas / sms - 1))
            cost = half + (full - half) * crowd
            work = waves * (k * cost + leaves * LEAF) / tile.split
            work *= ANEW if waves > tile.ctas_per_sm else 1
            work *= AGAIN if tile.pair == 1 and height < min(rows, NARROW) else 1
            vain = max(0, height - rows) / height if height > NARROW else 0.0
        weight = 2 * columns * k / sms / STREAM
        time = (START + max(work, weight) + merge) * (1 + ZEROS * vain)
        return time, -rows % height, max(0, sms - ctas)

    return time


def _ctas(tile: Dense | Skinny, rows: int, columns: int) -> int:
    """CTA count of the tiles of a product."""
    if isinstance(tile, Skinny):
        down = -(-rows // (tile.tile_m * tile.pair)) * tile.pair
        return down * -(-columns // tile.tile_n) * tile.split
    across = -(-columns // (tile.tile_n * Config.cluster_n)) * Config.cluster_n
    return -(-rows // (Config.tile_m * Config.cluster_m)) * Config.cluster_m * across
