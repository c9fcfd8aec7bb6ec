"""The order in which output tiles are handed out: grouped columns, for the L2 cache.

Plain arithmetic that runs on Python integers and, traced, on a GPU: the tests prove on the host
what the kernel computes.
"""


def tile_at(index, tiles_m, tiles_n, group, minimum=min):
    """Tile ``index`` of a [tiles_m, tiles_n] grid, as (m, n).

    ``group`` rows of tiles are walked column by column, so CTAs that run together share both the
    rows' A tiles and a few columns' B tiles.  ``minimum`` is ``cutlass.min`` on a GPU.
    """
    per_group = group * tiles_n
    first = index // per_group * group
    rows = minimum(tiles_m - first, group)
    inside = index % per_group
    return first + inside % rows, inside // rows
