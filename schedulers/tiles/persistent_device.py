"""Static persistent tile scheduler: cluster c takes tiles c, c + clusters, c + 2 clusters, ...

No tile waits for another, so any grid size, dispatch order or residency gives the same bits.
"""

import cutlass
from cutlass import cute

from .raster import tile_at


def tile_counts(
    m: cutlass.Int32, n: cutlass.Int32, tile: tuple[int, int], cluster: tuple[int, int]
) -> cute.Shape:
    """Number of clusters of tiles that cover [m, n], along m and along n."""
    step_m, step_n = tile[0] * cluster[0], tile[1] * cluster[1]
    return cute.ceil_div(m, step_m), cute.ceil_div(n, step_n)


def grid(
    counts: cute.Shape, cluster: tuple[int, int], max_clusters: cutlass.Int32
) -> tuple[int, int, cutlass.Int32]:
    """Launch grid: one cluster per x-y plane, at most ``max_clusters`` of them along z."""
    clusters = cutlass.min(counts[0] * counts[1], max_clusters)
    return (cluster[0], cluster[1], clusters)


def first_and_step() -> tuple[cutlass.Int32, cutlass.Int32]:
    """First tile index of the calling cluster, and the step to its next one."""
    _, _, cluster_index = cute.arch.block_idx()
    _, _, clusters = cute.arch.grid_dim()
    return cluster_index, clusters


def coordinates(
    index: cutlass.Int32,
    counts: cute.Shape,
    group: int,
    rank: cute.Coord,
    cluster: tuple[int, int],
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """Tile (m, n) of CTA ``rank`` = (m, n) of the cluster at tile ``index``."""
    m, n = tile_at(index, counts[0], counts[1], group, cutlass.min)
    return m * cluster[0] + rank[0], n * cluster[1] + rank[1]
