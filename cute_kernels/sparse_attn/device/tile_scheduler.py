"""Tile scheduler: which rows of which head a tile has, which tile comes next.

A CTA starts with the tile of its own number, then takes tiles from a counter until none is left.
Nothing is awaited, and no bit depends on which CTA takes which tile.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute


@dataclass(frozen=True)
class TileInfo:
    """Tile info in shared memory, int32 [5], broadcast to the consumers with Q.

    The tile, or -1 after the last one; its head; its batch; the number of blocks on its lists; the
    ring position of its first step (``block_union.ring_code``).
    """

    sInfo: cute.Tensor

    @cute.jit
    def publish(
        self,
        tile: cutlass.Int32,
        head: cutlass.Int32,
        batch: cutlass.Int32,
        count: cutlass.Int32,
        first_step: cutlass.Int32,
    ):
        """Write the info of a tile; by a warp."""
        self.write((tile, head, batch, count, first_step))

    @cute.jit
    def publish_end(self):
        """Write that there is no tile left; by a warp."""
        self.write((cutlass.Int32(-1),))

    @cute.jit
    def write(self, values: tuple[cutlass.Int32, ...]):
        """Write the first values."""
        if cute.arch.lane_idx() == 0:
            for n in cutlass.range_constexpr(len(values)):
                self.sInfo[n] = values[n]
        cute.arch.sync_warp()

    def read(self, n: int):
        """Return value ``n``, uniform over the warp."""
        return cute.arch.make_warp_uniform(self.sInfo[n])

    def more(self):
        """Return whether there is a tile."""
        return self.read(0) >= 0

    def coord(self):
        """Return (tile, head, batch)."""
        return self.read(0), self.read(1), self.read(2)

    def count(self):
        """Return the number of blocks on the tile's lists."""
        return self.read(3)

    def first_step(self):
        """Return the ring position of the tile's first step, or of what comes instead."""
        return self.read(4)


def tile_coord(index: cutlass.Int32, q_len: cutlass.Int32, rows: int, heads: cutlass.Int32):
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
def next_tile(counter: cute.Tensor, total: cutlass.Int32):
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


def row_grid(batches: cutlass.Int32, heads: cutlass.Int32, tiles: cutlass.Int32):
    """Grid of a launch with one CTA for each tile of query rows; on x: y and z end at 65,535."""
    return batches * heads * tiles, 1, 1


def row_coord(heads: cutlass.Int32, tiles: cutlass.Int32):
    """Return (tile, head, batch) of this CTA; the tiles of a head follow each other."""
    index, _, _ = cute.arch.block_idx()
    of_head = index // tiles
    return index % tiles, of_head % heads, of_head // heads
