"""The tile order that the GEMM walks: a bijection for every grid, grouped for the cache."""

from __future__ import annotations

import itertools

import pytest

from cute_kernels.schedulers.tiles.raster import tile_at

GRIDS = list(itertools.product(range(1, 12), range(1, 12), (1, 2, 3, 8)))


def walk(tiles_m: int, tiles_n: int, group: int) -> list[tuple[int, int]]:
    return [tile_at(i, tiles_m, tiles_n, group) for i in range(tiles_m * tiles_n)]


def is_complete(order: list[tuple[int, int]], tiles_m: int, tiles_n: int) -> bool:
    return sorted(order) == list(itertools.product(range(tiles_m), range(tiles_n)))


def test_every_tile_once():
    for m, n, group in GRIDS:
        assert is_complete(walk(m, n, group), m, n), (m, n, group)


def test_neighbours_in_time_share_tiles():
    """Any 2 x group consecutive tiles touch at most group rows and a few columns."""
    for m, n, group in GRIDS:
        order = walk(m, n, group)
        for first in range(0, len(order) - 2 * group, group):
            window = order[first : first + 2 * group]
            assert len({tile[0] for tile in window}) <= 2 * group
            # Inside one group of rows: two whole columns and two cut ones at the most.
            if len({tile[0] // group for tile in window}) == 1 and m >= group:
                rows = min(group, m - window[0][0] // group * group)
                assert len({tile[1] for tile in window}) <= -(-2 * group // rows) + 1


@pytest.mark.parametrize("wrong", [lambda a, b: b, lambda a, b: max(a, b)])
def test_a_wrong_last_group_is_noticed(wrong):
    """Mutants of the last, shorter group repeat or skip tiles."""
    broken = [
        grid
        for grid in GRIDS
        if not is_complete(
            [tile_at(i, grid[0], grid[1], grid[2], wrong) for i in range(grid[0] * grid[1])],
            grid[0],
            grid[1],
        )
    ]
    assert broken
