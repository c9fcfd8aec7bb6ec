"""Packs that are read where they lie: blocks and what they pair with, tiles of two sequences.

Rows are counted as if every sequence began at a multiple of 128.  A table int32 [blocks, 4], made
by ``kernel_pack_sm90``, says of each block of 128 rows

    shift   how many rows nearer to the buffer's begin it lies there
    end     the row behind the last one of its sequence
    first   the first block of its sequence
    last    the last one

Tokens behind the last sequence have blocks of their own whose first is behind their last: they pair
with nothing.  So have blocks that are not in use, whose end is 0: they have no row.  Behind all of
them one row more has in ``first`` how many are in use; it reads as a block that is not.

A pack's mask is a band, lo <= 0 <= hi, of positions in a sequence, so its lists are formulas.  With
A = (127 - lo) // 128 and B = (hi + 127) // 128

    key blocks of query block m     n from max(first, m - A) to min(last, m + B)
    query blocks of key block n     m from max(first, n - B) to min(last, n + A)
    the rank of dQ's part (m, n)    min(last, m + B) - n: columns right to left

and a block is partial unless lo <= 128 (n - m) - 127 and 128 (n - m) + 127 <= hi.

TMA brings whole tiles; rows from ``end`` on are another sequence's then, and 0 times its NaN would
be NaN.  A tile that has such rows comes through a barrier of its own.  The warp that asked for it
overwrites them by zeros, and only then says that it has come.  Stored are rows before ``end`` only.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...compile import fake
from ...dsl import copy
from . import walk
from .chunks import CHUNK, chunk
from .spans import Run

#: The numbers of a block.
FIELDS = 4
BLOCK = walk.BLOCK
WARP = 32


@cute.jit
def place_of(table: cute.Tensor, block):
    """(shift, end) of a block; of the last one for those beyond it."""
    at = cutlass.min(block, table.shape[0] - 1)
    place = copy.vector(table, (at, 0), 2).load()
    return place[0], place[1]


@cute.jit
def sequence_of(table: cute.Tensor, block):
    """(first, last) of a block, likewise."""
    at = cutlass.min(block, table.shape[0] - 1)
    ends = copy.vector(table, (at, 2), 2).load()
    return ends[0], ends[1]


@cute.jit
def pairs(table: cute.Tensor, block):
    """Whether a block pairs with any: it is of a sequence."""
    first, last = sequence_of(table, block)
    return first <= last


@cute.jit
def blocks_of(table: cute.Tensor):
    """How many blocks are in use."""
    return table[table.shape[0] - 1, 2]


def reach(lo, hi):
    """(A, B): how many blocks before and behind its own a query sees."""
    return (BLOCK - 1 - lo) // BLOCK, (hi + BLOCK - 1) // BLOCK


def cuts(lo, hi, distance):
    """Whether a band may hide a pair of a block; distance: its first key's less its first query's.

    Where it hides none, looking at each changes no bit.
    """
    return (distance - (BLOCK - 1) < lo) | (distance + (BLOCK - 1) > hi)


@cute.jit
def listing(table: cute.Tensor, m, lo, hi):
    """(how many, the key blocks, no mask tiles) of query block ``m``; none beyond the table."""
    first, last = sequence_of(table, m)
    before, behind = reach(lo, hi)
    begin = cutlass.max(first, m - before)
    count = cutlass.max(cutlass.min(last, m + behind) + 1 - begin, 0)
    return count if m < table.shape[0] else cutlass.Int32(0), Run(begin), None


def between(lo, hi, end, row):
    """([first, first], [last, last]) of the keys that a thread's rows see; the second is 8 on."""
    rows = row, row + 8
    return [at + lo for at in rows], [cutlass.min(at + hi, end - 1) for at in rows]


@dataclass(frozen=True)
class Columns:
    """`walk.Lists` of a pack: a column's places are the query blocks themselves.

    ``ticket``'s last row says how many of those before it are in use.
    """

    ticket: cute.Tensor
    table: cute.Tensor
    lo: cutlass.Int32
    hi: cutlass.Int32

    def total(self):
        """How many tickets there are."""
        return self.ticket[self.ticket.shape[0] - 1, 0]

    @cute.jit
    def column(self, ticket):
        """(head, KV block, first query block, end of them) of a ticket, by one aligned load."""
        record = copy.vector(self.ticket, (ticket, 0), walk.FIELDS).load()
        return tuple(record[i] for i in range(walk.FIELDS))

    @cute.jit
    def ends(self, sizes, block, tile_m: cutlass.Constexpr):
        """(the tile of rows, the key) behind the last one that a column has to do with."""
        _, end = place_of(self.table, block)
        return (end + tile_m - 1) // tile_m, end

    def entry_at(self, at, block):
        """2 * query block + is_partial."""
        return 2 * at + cutlass.Int32(cuts(self.lo, self.hi, (block - at) * BLOCK))

    @cute.jit
    def who(self, block):
        """What `rank_at` needs of a column: (its block, the last of its sequence)."""
        _, last = sequence_of(self.table, block)
        return block, last

    def rank_at(self, at, who):
        """The rank of a visit."""
        block, last = who
        return cutlass.min(last, at + reach(self.lo, self.hi)[1]) - block

    def ahead(self, window, at, begin):
        """Nothing is read ahead."""
        return window

    def entry_ahead(self, window, at, begin, block):
        """The entry at a place."""
        return self.entry_at(at, block)


@cute.jit
def init(barrier: cute.Pointer, thread):
    """By the CTA's threads, before its barriers are published."""
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)


@cute.jit
def expect(barrier: cute.Pointer, size: cutlass.Constexpr):
    """By a warp: a tile of so many bytes will come through the barrier."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


@cute.jit
def clean(
    barrier: cute.Pointer,
    phases: cute.Tensor,
    tile: cute.Pointer,
    sizes: cutlass.Constexpr,
    first,
    full: cute.Pointer,
):
    """By a warp: awaits the tile, zeros its rows from ``first`` on, and passes it to its readers.

    phases  int32 [1], the barrier's; sizes  (rows of the tile, its `piece_bytes`, bytes a row)
    """
    rows, width, row_size = sizes
    cute.arch.mbarrier_wait(barrier, phases[0])
    phases[0] = phases[0] ^ 1
    zeros = cute.make_rmem_tensor(CHUNK // 4, cutlass.Int32)
    zeros.fill(0)
    chunks = width // CHUNK
    lane = cute.arch.lane_idx()
    start = cutlass.max(first, cutlass.Int32(0)) + lane // chunks
    for row in cutlass.range(start, rows, WARP // chunks, unroll=1):
        for piece in cutlass.range_constexpr(row_size // width):
            number = piece * chunks + lane % chunks
            cute.autovec_copy(zeros, chunk(tile, rows, width, row, number))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(full)


@cute.jit
def store_rows(
    tile: cute.Pointer,
    sizes: cutlass.Constexpr,
    target: cute.Tensor,
    at: tuple,
    rows: tuple,
    thread,
    threads: cutlass.Constexpr,
):
    """Rows ``rows[0]`` to ``rows[1] - 1`` of a tile, by ``threads`` threads, 16 bytes at a time.

    sizes: as in `clean`; target: [B, T, H, D]; at: (batch, where the tile's row 0 goes, head).
    """
    height, width, row_size = sizes
    batch, row_0, head = at
    chunks = row_size // CHUNK
    elements = CHUNK * 8 // target.element_type.width
    values = cute.make_rmem_tensor(CHUNK // 4, cutlass.Int32)
    for number in cutlass.range(rows[0] * chunks + thread, rows[1] * chunks, threads, unroll=1):
        row, piece = number // chunks, number % chunks
        cute.autovec_copy(chunk(tile, height, width, row, piece), values)
        place = copy.vector(target, (batch, row_0 + row, head, piece * elements), elements)
        cute.autovec_copy(values, cute.recast_tensor(place, cutlass.Int32))


def fake_table():
    """What kernels are compiled against; tickets too."""
    return fake.compact(cutlass.Int32, (fake.size(), FIELDS), fake.TMA_ALIGN)
