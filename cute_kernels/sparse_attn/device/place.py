"""Which rows of which head a tile of the forward has, and which tile a CTA takes next.

A CTA begins with the tile of its own number and goes on with those that no CTA has begun with, in
the order in which they are asked for.  Nothing is awaited, and no bit follows it.
"""

import cutlass
from cutlass import cute


def tile_of(index, q_len, heads, rows):
    """(tile, head, batch) of the ``index``-th: a head's tiles of ``rows`` from the last to the
    first, the longest first if causal; heads that share K and V follow each other."""
    tiles = cute.ceil_div(q_len, rows)
    of_head = index // tiles
    return tiles - 1 - index % tiles, of_head % heads, of_head // heads


def kv_head_of(head, heads, kv_heads):
    """The head of K and V that a query head sees: consecutive query heads share one."""
    return head // (heads // kv_heads)


@cute.jit
def take(counter: cute.Tensor, total):
    """By a warp: the next tile's number, ``total`` or more for none.

    counter: int32 [1], zero before the launch; not read where there is a CTA for each tile.
    """
    ctas, _, _ = cute.arch.grid_dim()
    following = cutlass.Int32(total)
    if ctas < total:
        taken = cutlass.Int32(0)
        if cute.arch.lane_idx() == 0:
            one = cutlass.Int32(1)
            taken = cute.arch.atomic_add(counter.iterator, one, sem="relaxed", scope="gpu")
        following = ctas + cute.arch.shuffle_sync(taken, 0)
    return following
