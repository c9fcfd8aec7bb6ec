"""Walk of a backward schedule on the device: the list of a ticket, and the visits of each entry.

Loading, multiplying and adding all walk the same list with the functions here, so they cannot
disagree.  The query heads of a group come one after another, each with the whole list: CTAs of one
KV head then read the same Q and dO at about the same time.  An entry (a query block of 128 rows) is
one visit per tile of ``tile_m`` rows that begins inside Sq (of a varlen batch: inside its
sequence), ascending.

Every query head has its own turns.  What waits for what is as in the schedule, once per head; that
is safe for schedules that need no residency, and for no others if there is a group: a ticket that
has come to its second head keeps its CTA from the tickets that the first head of others waits for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.pipeline import PipelineState

from ...compile import fake
from ...dsl import copy
from ...schedulers.tiles import ticket_device
from . import varlen
from .block_union import BLOCK
from .mask import WORDS

#: Entries that a warp reads at once.
WINDOW = 32
#: The columns of a ticket.
FIELDS = 4
#: What the loops carry for a role: the states of its rings, accumulators and counters.
Carried = tuple[PipelineState | cute.Tensor | cutlass.Int32, ...]


@dataclass(frozen=True)
class Sizes:
    """Problem sizes: ``group`` query heads per KV head, ``q_tiles`` tiles of rows per head."""

    kv_len: cutlass.Int32
    kv_heads: cutlass.Int32
    group: cutlass.Int32
    q_tiles: cutlass.Int32


@dataclass(frozen=True)
class Lists:
    """Stored tickets, entries and ranks (``ScheduleTensors``), for heads b * Hkv + h.

    ``entry`` and ``rank`` of a schedule without visits need one element, which is not read.
    ``VarlenLists`` has the same functions.
    """

    ticket: cute.Tensor
    entry: cute.Tensor
    rank: cute.Tensor

    def total(self):
        """Return the number of tickets."""
        return self.ticket.shape[0]

    @cute.jit
    def column(self, ticket: cutlass.Int32):
        """Load (head, KV block, first entry, end of the entries) of a ticket at once."""
        record = copy.vector(self.ticket, (ticket, 0), FIELDS).load()
        return tuple(record[i] for i in range(FIELDS))

    def ends(self, sizes: Sizes, block: cutlass.Int32, tile_m: int):
        """Return (end of the row tiles, end of the keys) that a column has to do with."""
        return sizes.q_tiles, sizes.kv_len

    def entry_at(self, index: cutlass.Int32, block: cutlass.Int32):
        """Return the entry at an index of the list of a ticket with this KV block."""
        return self.entry[index]

    def rank_base(self, block: cutlass.Int32) -> None:
        """Return what `rank_at` needs of a column: nothing, ranks are stored."""
        return None

    def rank_at(self, index: cutlass.Int32, base: None):
        """Return the rank of the visit at an index."""
        return self.rank[index]

    @cute.jit
    def ahead(self, window: cutlass.Int32, index: cutlass.Int32, begin: cutlass.Int32):
        """Return the window that `entry_ahead` reads at an index, given that of the index before.

        A window is ``WINDOW`` entries, one in each lane of the warp, each with a bit that says
        whether its rank is 0: a consumer that loaded each entry when it comes to it would wait for
        global memory, about 500 cycles, between two products.
        """
        if (index - begin) & (WINDOW - 1) == 0:
            lane_index = cutlass.min(index + cute.arch.lane_idx(), self.entry.shape[0] - 1)
            window = 2 * self.entry[lane_index] + cutlass.Int32(self.rank[lane_index] == 0)
        return window

    @cute.jit
    def entry_ahead(
        self,
        window: cutlass.Int32,
        index: cutlass.Int32,
        begin: cutlass.Int32,
        block: cutlass.Int32,
    ):
        """Return the entry at an index of a list that starts at ``begin``, in every lane."""
        return cute.arch.shuffle_sync(window, (index - begin) & (WINDOW - 1)) >> 1

    @cute.jit
    def is_first(
        self, window: cutlass.Int32, index: cutlass.Int32, begin: cutlass.Int32, base: None
    ):
        """Return whether the visit at an index has rank 0, in every lane."""
        return cute.arch.shuffle_sync(window, (index - begin) & (WINDOW - 1)) & 1 == 1


@dataclass(frozen=True)
class RankBase:
    """A column's block, and the last block of its sequence: what its ranks follow from."""

    block: cutlass.Int32
    last: cutlass.Int32


@dataclass(frozen=True)
class VarlenLists:
    """`Lists` of a varlen batch: a column's indices are the query blocks themselves.

    ``ticket``'s last row has the number of tickets in use.
    """

    ticket: cute.Tensor
    table: cute.Tensor
    lo: cutlass.Int32
    hi: cutlass.Int32

    def total(self):
        """Return the number of tickets."""
        return self.ticket[self.ticket.shape[0] - 1, 0]

    @cute.jit
    def column(self, ticket: cutlass.Int32):
        """Return (head, KV block, first query block, end of them) of a ticket: one aligned load."""
        record = copy.vector(self.ticket, (ticket, 0), FIELDS).load()
        return tuple(record[i] for i in range(FIELDS))

    @cute.jit
    def ends(self, sizes: Sizes, block: cutlass.Int32, tile_m: cutlass.Constexpr):
        """Return (end of the row tiles, end of the keys) that a column has to do with."""
        end = varlen.row_range(self.table, block).end
        return (end + tile_m - 1) // tile_m, end

    def entry_at(self, index: cutlass.Int32, block: cutlass.Int32):
        """Return 2 * query block + is_partial."""
        return 2 * index + cutlass.Int32(varlen.cuts(self.lo, self.hi, (block - index) * BLOCK))

    @cute.jit
    def rank_base(self, block: cutlass.Int32):
        """Return what `rank_at` needs of a column."""
        _, last = varlen.sequence_of(self.table, block)
        return RankBase(block, last)

    def rank_at(self, index: cutlass.Int32, base: RankBase):
        """Return the rank of a visit: min(last, m + B) - n."""
        return cutlass.min(base.last, index + varlen.reach(self.lo, self.hi)[1]) - base.block

    def ahead(self, window: cutlass.Int32, index: cutlass.Int32, begin: cutlass.Int32):
        """Return the window unchanged: entries are not read from memory."""
        return window

    def entry_ahead(
        self,
        window: cutlass.Int32,
        index: cutlass.Int32,
        begin: cutlass.Int32,
        block: cutlass.Int32,
    ):
        """Return the entry at an index."""
        return self.entry_at(index, block)

    def is_first(
        self,
        window: cutlass.Int32,
        index: cutlass.Int32,
        begin: cutlass.Int32,
        base: RankBase,
    ):
        """Return whether the visit at an index has rank 0."""
        return self.rank_at(index, base) == 0


@dataclass(frozen=True)
class Work:
    """Tickets of a CTA: where they come from, the lists that they name, the problem sizes.

    tile_m: query rows of a tile; parts: tickets that the kernel makes of one of the schedule.
    """

    tickets: ticket_device.TicketRing
    lists: Lists | VarlenLists
    sizes: Sizes
    tile_m: int
    parts: int

    def total(self):
        """Return the number of tickets."""
        return self.lists.total() * self.parts

    def ends(self, column: "Column"):
        """Return `Lists.ends` of a ticket: (end of the row tiles, end of the keys)."""
        return self.lists.ends(self.sizes, column.block, self.tile_m)


@dataclass(frozen=True)
class Column:
    """A ticket: its KV head and block, and its entries."""

    ticket: cutlass.Int32
    parts: int
    head: cutlass.Int32
    block: cutlass.Int32
    begin: cutlass.Int32
    end: cutlass.Int32

    @property
    def part(self):
        """Part of the block that the ticket has."""
        return self.ticket % self.parts


@dataclass(frozen=True)
class Visit:
    """A tile of query rows that a ticket's keys meet.

    member: query head in its group; index: of the entry; number: of the tile, of ``count`` in the
    entry; tile: that in its head; entry: 2 * query block + is_partial; rank, window: if asked for.
    """

    member: cutlass.Int32
    index: cutlass.Int32
    number: cutlass.Int32
    count: cutlass.Int32
    tile: cutlass.Int32
    entry: cutlass.Int32
    rank: cutlass.Int32 | None
    window: cutlass.Int32


@cute.jit
def for_each_ticket(work: Work, body: Callable, state: Carried, alone: cutlass.Constexpr = False):
    """Call ``state = body(column, *state)`` for each ticket of a CTA; traced into the loop.

    By all lanes of a warp, or by one thread ``alone`` that stands for a warp.
    """
    lists, tickets = work.lists, work.tickets
    receive = tickets.receive_alone if alone else tickets.receive
    received = ticket_device.ticket_state()
    total = work.total()
    ticket = receive(received)
    received.advance()
    while ticket < total:
        head, block, begin, end = lists.column(ticket // work.parts)
        state = body(Column(ticket, work.parts, head, block, begin, end), *state)
        ticket = receive(received)
        received.advance()


@cute.jit
def for_each_visit(
    work: Work,
    column: Column,
    end_tile: cutlass.Int32,
    body: Callable,
    state: Carried,
    base: RankBase | None = None,
    ranked: cutlass.Constexpr = False,
    ahead: cutlass.Constexpr = False,
):
    """Call ``state = body(visit, *state)`` for each visit of a ticket; returns the last state.

    The body is traced into the loops.  end_tile: of the ticket's (`Work.ends`); ranked: whether it
    reads ranks, which follow from ``base``; ahead: whether a warp reads entries ahead, see
    `Lists.ahead`.
    """
    lists, begin, block = work.lists, column.begin, column.block
    window = cutlass.Int32(0)
    for member in cutlass.range(work.sizes.group, unroll=1):
        for index in cutlass.range(begin, column.end, unroll=1):
            if cutlass.const_expr(ahead):
                window = lists.ahead(window, index, begin)
                entry = lists.entry_ahead(window, index, begin, block)
            else:
                entry = lists.entry_at(index, block)
            q_block, rank = entry >> 1, None
            if cutlass.const_expr(ranked):
                rank = lists.rank_at(index, base)
                if cutlass.const_expr(work.parts > 1):
                    rank = rank * work.parts + column.part
            count, first = visits(end_tile, q_block, work.tile_m)
            for number in cutlass.range(count, unroll=1):
                tile = first + number
                visit = Visit(member, index, number, count, tile, entry, rank, window)
                state = body(visit, *state)
    return state


@cute.jit
def visits(end: cutlass.Int32, q_block: cutlass.Int32, tile_m: cutlass.Constexpr):
    """Return (visits of an entry by one query head, its first tile); no tile from ``end`` on."""
    per_block = BLOCK // tile_m
    first = q_block * per_block
    return cutlass.min(end - first, cutlass.Int32(per_block)), first


@cute.jit
def row_of(sizes: Sizes, head: cutlass.Int32, visit: Visit):
    """Return the tile's number in the launch (64 bits): its statistics, dQ and semaphore."""
    return (cutlass.Int64(head) * sizes.group + visit.member) * sizes.q_tiles + visit.tile


def fake_lists(form: str) -> tuple[cute.Tensor, ...]:
    """Return fakes of entries, ranks, the mask tile of each entry, and the mask tiles' words."""
    entries, tiles = fake.size(), fake.size()
    listed = entries if form == "bits" else fake.size()
    words = fake.compact(cutlass.Int32, (tiles, BLOCK, WORDS), fake.TMA_ALIGN)
    return *(fake.compact(cutlass.Int32, (size,)) for size in (entries, entries, listed)), words
