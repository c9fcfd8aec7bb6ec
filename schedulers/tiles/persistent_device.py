"""The static persistent tile source: cluster c takes tiles c, c + clusters, c + 2 clusters, ...

No tile waits for another, so any grid size, dispatch order or residency gives the same bits.
"""

import cutlass
from cutlass import cute

from .raster import tile_at


def tile_counts(m, n, tile: tuple[int, int], cluster: tuple[int, int]):
    """How many clusters of tiles cover [m, n], along m and along n."""
    step_m, step_n = tile[0] * cluster[0], tile[1] * cluster[1]
    return cute.ceil_div(m, step_m), cute.ceil_div(n, step_n)


def grid(counts, cluster: tuple[int, int], max_clusters):
    """The launch grid: one cluster per x-y plane, at most ``max_clusters`` of them along z."""
    clusters = cutlass.min(counts[0] * counts[1], max_clusters)
    return (cluster[0], cluster[1], clusters)


def first_and_step():
    """The calling cluster's first tile index and the distance to its next one."""
    _, _, cluster_index = cute.arch.block_idx()
    _, _, clusters = cute.arch.grid_dim()
    return cluster_index, clusters


def coordinates(index, counts, group: int, rank, cluster: tuple[int, int]):
    """(m, n) of the tile that CTA ``rank`` = (m, n) of the cluster computes at tile ``index``."""
    m, n = tile_at(index, counts[0], counts[1], group, cutlass.min)
    return m * cluster[0] + rank[0], n * cluster[1] + rank[1]
