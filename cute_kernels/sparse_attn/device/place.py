"""Which rows of which head a CTA of the forward has, and which head of K and V they read."""

import cutlass.cute as cute


def tile_of(q_len, heads, rows):
    """(tile, head, batch) of this CTA: a head's tiles of ``rows`` from the last, the longest if
    causal, to the first; heads that share K and V follow each other."""
    index, _, _ = cute.arch.block_idx()
    tiles = cute.ceil_div(q_len, rows)
    of_head = index // tiles
    return tiles - 1 - index % tiles, of_head % heads, of_head // heads


def kv_head_of(head, heads, kv_heads):
    """The head of K and V that a query head sees: consecutive query heads share one."""
    return head // (heads // kv_heads)
