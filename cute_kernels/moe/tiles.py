"""Width of the tiles of grouped products on SM90.  It may read T; it cannot change bits."""

from __future__ import annotations

import functools

#: Time of a tile of 128 rows by so many columns, per element of K, in ns: what gemm's kernel takes
#: on an H200 (docs/gemm.md).  Of this kernel: not run.
COST = {256: 10.6, 192: 8.1, 128: 5.5, 64: 3.1}
#: The widest tile that adds a bias without spilling registers.
WIDEST_BIAS = 192
ROWS = 128


def widths(bias: bool) -> tuple[int, ...]:
    """Every width of tiles."""
    return tuple(width for width in COST if not bias or width <= WIDEST_BIAS)


@functools.lru_cache(maxsize=4096)
def width(rows: int, experts: int, columns: int, units: int, bias: bool) -> int:
    """Columns of a tile of least predicted time, if rows are spread over all experts."""
    # Half a tile of each expert is empty on average.
    high = -(-rows // ROWS) + (min(rows, experts) + 1) // 2
    return _least(high, columns, units, widths(bias))


@functools.lru_cache(maxsize=4096)
def dw_width(rows: int, experts: int, columns: int, units: int) -> int:
    """Columns of a tile of [rows, columns] gradients of each expert, likewise."""
    return _least(experts * -(-rows // ROWS), columns, units, tuple(COST))


def _least(high: int, columns: int, units: int, choices: tuple[int, ...]) -> int:
    """The width of least predicted time for so many rows of tiles."""

    def time(tile_n: int) -> tuple[float, int]:
        waves = -(-high * -(-columns // tile_n) // units)
        return waves * COST[tile_n], tile_n

    return min(choices, key=time)
