"""A schedule on the device: the list of a ticket, and the visits of each entry on it.

Loading, multiplying and adding all walk the same list with the functions here, so they cannot
disagree.  An entry (a query block of 128 rows) is one visit per query head of the group and per
tile of ``tile_m`` rows that begins inside Sq: heads ascending, then tiles ascending.  All visits of
an entry come before the next entry, so what waits for what is as in the schedule, whatever the
group.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

BLOCK = 128


@dataclass(frozen=True)
class Lists:
    """The tensors of schedulers/schedule.py's ``ScheduleTensors``, for heads b * Hkv + h.

    ``entry`` and ``rank`` of a schedule without visits need one element, which is not read.
    """

    order: cute.Tensor
    list_of_head: cute.Tensor
    offset: cute.Tensor
    entry: cute.Tensor
    rank: cute.Tensor

    @cute.jit
    def column(self, ticket):
        """(head, KV block, first entry, end of the entries) of a ticket."""
        head, block = self.order[ticket, 0], self.order[ticket, 1]
        blocks = self.order.shape[0] // self.list_of_head.shape[0]
        place = cutlass.Int64(self.list_of_head[head]) * blocks + block
        return head, block, self.offset[place], self.offset[place + 1]


@dataclass(frozen=True)
class Sizes:
    """Of one launch: ``group`` query heads per KV head, ``q_tiles`` tiles of rows per head."""

    kv_len: cutlass.Int32
    kv_heads: cutlass.Int32
    group: cutlass.Int32
    q_tiles: cutlass.Int32


@cute.jit
def visits(sizes: Sizes, q_block, tile_m: cutlass.Constexpr):
    """(visits of an entry, shift): ``which`` turns a number below the first into a visit."""
    per_block = BLOCK // tile_m
    tiles = cutlass.min(sizes.q_tiles - q_block * per_block, cutlass.Int32(per_block))
    return tiles * sizes.group, tiles - 1


@cute.jit
def which(visit, shift, q_block, tile_m: cutlass.Constexpr):
    """(query head inside the group, tile of rows, first row of the tile in its block)."""
    per_block = BLOCK // tile_m
    if cutlass.const_expr(per_block == 1):
        return visit, q_block, cutlass.Int32(0)
    # One tile or two: shift is 0 or 1, and the mask of its last bit too.
    inside = visit & shift
    return visit >> shift, q_block * per_block + inside, inside * tile_m


@cute.jit
def row_of(sizes: Sizes, head, member, tile):
    """The tile's number among all of the launch, 64 bits wide: where its statistics, dQ and
    semaphore are."""
    return (cutlass.Int64(head) * sizes.group + member) * sizes.q_tiles + tile
