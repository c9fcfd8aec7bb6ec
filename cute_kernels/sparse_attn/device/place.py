"""Tile scheduler of the forward: which rows of which head a tile has, which tile comes next.

A CTA starts with the tile of its own number, then takes tiles from a counter until none is left.
Nothing is awaited, and no bit depends on who takes which tile.
"""

import cutlass
from cutlass import cute


def tile_of(index: cutlass.Int32, q_len: cutlass.Int32, heads: cutlass.Int32, rows: int):
    """Return (tile, head, batch) of launch index ``index``.

    A head's tiles of ``rows`` come from the last to the first, the longest first if causal; heads
    that share K and V follow each other.
    """
    tiles = cute.ceil_div(q_len, rows)
    of_head = index // tiles
    return tiles - 1 - index % tiles, of_head % heads, of_head // heads


def kv_head_of(head: cutlass.Int32, heads: cutlass.Int32, kv_heads: cutlass.Int32):
    """Return the KV head of a query head: consecutive query heads share one."""
    return head // (heads // kv_heads)


@cute.jit
def take(counter: cute.Tensor, total: cutlass.Int32):
    """Take the next tile (by a warp); ``total`` or more means that none is left.

    counter: int32 [1], zero before the launch; not read where there is a CTA for each tile.
    """
    ctas, _, _ = cute.arch.grid_dim()
    following = cutlass.Int32(total)
    if ctas < total:
        ticket = cutlass.Int32(0)
        if cute.arch.lane_idx() == 0:
            one = cutlass.Int32(1)
            ticket = cute.arch.atomic_add(counter.iterator, one, sem="relaxed", scope="gpu")
        following = ctas + cute.arch.shuffle_sync(ticket, 0)
    return following
