"""The tile order that the GEMM walks: a bijection for every grid, grouped for the cache."""

from __future__ import annotations

import itertools

import pytest

from cute_kernels.schedulers.tiles.raster import tile_at

GRIDS = list(itertools.product(range(1, 12), range(1, 12), (1, 2, 3, 8)))


def walk(grid: tuple[int, int, int], *mutant) -> list[tuple[int, int]]:
    return [tile_at(i, *grid, *mutant) for i in range(grid[0] * grid[1])]


@pytest.mark.parametrize("wrong", [None, lambda a, b: b, lambda a, b: max(a, b)])
def test_every_tile_once_and_neighbours_in_time_share_tiles(wrong):
    """Mutants of the last, shorter group repeat or skip tiles.  Any 2 x group consecutive tiles
    touch at most twice group rows, and inside a group two whole columns and two cut ones."""
    incomplete = 0
    for grid in GRIDS:
        m, n, group = grid
        order = walk(grid, *filter(None, [wrong]))
        incomplete += sorted(order) != list(itertools.product(range(m), range(n)))
        for first in range(0, (len(order) - 2 * group) * (wrong is None), group):
            window = order[first : first + 2 * group]
            assert len({tile[0] for tile in window}) <= 2 * group
            if len({tile[0] // group for tile in window}) == 1 and m >= group:
                rows = min(group, m - window[0][0] // group * group)
                assert len({tile[1] for tile in window}) <= -(-2 * group // rows) + 1
    assert (incomplete > 0) == (wrong is not None)
