"""A schedule on the device: the list of a ticket, and the visits of each entry on it.

Loading, multiplying and adding all walk the same list with the functions here, so they cannot
disagree.  The query heads of a group come one after another, each with the whole list: CTAs of one
KV head then read the same Q and dO at about the same time.  An entry (a query block of 128 rows) is
one visit per tile of ``tile_m`` rows that begins inside Sq (of a pack: inside its sequence),
ascending.

Every query head has its own turns.  What waits for what is as in the schedule, once per head; that
is safe for schedules that need no residency, and for no others if there is a group: a ticket that
has come to its second head keeps its CTA from the tickets that the first head of others waits for.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import copy

BLOCK = 128
#: Entries that a warp reads at once.
WINDOW = 32
#: The numbers of a ticket.
FIELDS = 4


@dataclass(frozen=True)
class Lists:
    """Three tensors of schedulers/order/schedule.py's ``ScheduleTensors``, for heads b * Hkv + h.

    ``entry`` and ``rank`` of a schedule without visits need one element, which is not read.
    ``packed.Columns`` has the same functions.
    """

    ticket: cute.Tensor
    entry: cute.Tensor
    rank: cute.Tensor

    def total(self):
        """How many tickets there are."""
        return self.ticket.shape[0]

    @cute.jit
    def column(self, ticket):
        """(head, KV block, first entry, end of the entries) of a ticket, by one aligned load."""
        record = copy.vector(self.ticket, (ticket, 0), FIELDS).load()
        return tuple(record[i] for i in range(FIELDS))

    def ends(self, sizes, block, tile_m: int):
        """(the tile of rows, the key) behind the last one that a column has to do with."""
        return sizes.q_tiles, sizes.kv_len

    def entry_at(self, at, block):
        """The entry at a place of the list of a ticket with this KV block."""
        return self.entry[at]

    def who(self, block):
        """What `rank_at` needs of a column."""
        return None

    def rank_at(self, at, who):
        """The rank of the visit at a place."""
        return self.rank[at]

    @cute.jit
    def ahead(self, window, at, begin):
        """What `entry_ahead` reads at a place, behind the same for the place before it.

        ``WINDOW`` entries at a time, one in each lane of the warp: a consumer that loaded each
        entry when it comes to it would wait for global memory, about 500 cycles, between two
        products.
        """
        if (at - begin) & (WINDOW - 1) == 0:
            index = cutlass.min(at + cute.arch.lane_idx(), self.entry.shape[0] - 1)
            window = self.entry[index]
        return window

    @cute.jit
    def entry_ahead(self, window, at, begin, block):
        """The entry at a place of a list that starts at ``begin``, in every lane."""
        return cute.arch.shuffle_sync(window, (at - begin) & (WINDOW - 1))


@dataclass(frozen=True)
class Sizes:
    """Of one launch: ``group`` query heads per KV head, ``q_tiles`` tiles of rows per head."""

    kv_len: cutlass.Int32
    kv_heads: cutlass.Int32
    group: cutlass.Int32
    q_tiles: cutlass.Int32


@cute.jit
def visits(end, q_block, tile_m: cutlass.Constexpr):
    """(visits of an entry by one query head, the tile of its first); no tile from ``end`` on."""
    per_block = BLOCK // tile_m
    first = q_block * per_block
    return cutlass.min(end - first, cutlass.Int32(per_block)), first


@cute.jit
def row_of(sizes: Sizes, head, member, tile):
    """The tile's number among all of the launch, 64 bits wide: where its statistics, dQ and
    semaphore are."""
    return (cutlass.Int64(head) * sizes.group + member) * sizes.q_tiles + tile
