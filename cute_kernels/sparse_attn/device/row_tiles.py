"""Launch grid with one CTA for each tile of query rows; on x, as CUDA ends y and z at 65,535."""

import cutlass
from cutlass import cute


def grid(batches: cutlass.Int32, heads: cutlass.Int32, tiles: cutlass.Int32):
    """Return the grid of a launch."""
    return batches * heads * tiles, 1, 1


def coord(heads: cutlass.Int32, tiles: cutlass.Int32):
    """Return (tile, head, batch) of this CTA; the tiles of a head follow each other."""
    index, _, _ = cute.arch.block_idx()
    of_head = index // tiles
    return index % tiles, of_head % heads, of_head // heads
