"""Varlen batches read in place: blocks and their partners, tiles of two sequences.

Rows are counted as if every sequence began at a multiple of 128.  A table int32 [blocks, 4], made
by ``kernel_varlen_tables_sm90``, has for each block of 128 rows

    shift   row in this count less row in the buffer
    end     the row after the last one of its sequence
    first   the first block of its sequence
    last    the last one

Tokens after the last sequence have blocks of their own whose first is greater than their last: they
pair with nothing.  So have unused blocks, whose end is 0: they have no row.  One more row after
them has in ``first`` the number of blocks in use; it reads as an unused block.

The mask is a band, lo <= 0 <= hi, of positions in a sequence, so its lists are formulas.  With
A = (127 - lo) // 128 and B = (hi + 127) // 128

    key blocks of query block m     n from max(first, m - A) to min(last, m + B)
    query blocks of key block n     m from max(first, n - B) to min(last, n + A)
    the rank of dQ's part (m, n)    min(last, m + B) - n: columns right to left

and a block is partial unless lo <= 128 (n - m) - 127 and 128 (n - m) + 127 <= hi.

TMA loads whole tiles; rows from ``end`` on are another sequence's then, and 0 times its NaN would
be NaN.  A tile that has such rows comes through an mbarrier of its own (the tail barrier).  The
warp that issued the load overwrites them by zeros, and only then arrives at the tile's full
barrier.  Only rows before ``end`` are stored.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...compile import fake
from ...dsl import copy
from ...dsl.smem import CHUNK, chunk
from .block_union import BLOCK, BlockList, BlockRange
from .kv_ranges import RowBounds

#: The columns of the table.
FIELDS = 4
WARP = 32


@dataclass(frozen=True)
class RowRange:
    """Rows of a block: ``shift`` as in the table; ``end``: the row after its sequence's last."""

    shift: cutlass.Int32
    end: cutlass.Int32


@dataclass(frozen=True)
class TileShape:
    """A tile in shared memory: its rows, its `piece_bytes`, the bytes of a row."""

    rows: int
    piece: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of the tile."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class TailBarrier:
    """The mbarrier of tiles that a sequence ends in, and its phase, int32 [1] in registers."""

    barrier: cute.Pointer
    phase: cute.Tensor


@dataclass(frozen=True)
class RowCoord:
    """Where a tile's row 0 goes in [B, T, H, D]: (batch, row, head)."""

    batch: cutlass.Int32
    row: cutlass.Int32
    head: cutlass.Int32


@cute.jit
def row_range(table: cute.Tensor, block: cutlass.Int32):
    """Return the `RowRange` of a block; blocks beyond the table read its last row."""
    index = cutlass.min(block, table.shape[0] - 1)
    record = copy.vector(table, (index, 0), 2).load()
    return RowRange(record[0], record[1])


@cute.jit
def sequence_of(table: cute.Tensor, block: cutlass.Int32):
    """Return (first, last) block of a block's sequence; beyond the table as `row_range`."""
    index = cutlass.min(block, table.shape[0] - 1)
    ends = copy.vector(table, (index, 2), 2).load()
    return ends[0], ends[1]


@cute.jit
def is_in_sequence(table: cute.Tensor, block: cutlass.Int32):
    """Return whether a block pairs with any: whether it belongs to a sequence."""
    first, last = sequence_of(table, block)
    return first <= last


@cute.jit
def used_blocks(table: cute.Tensor):
    """Return the number of blocks in use."""
    return table[table.shape[0] - 1, 2]


def reach(lo: cutlass.Int32, hi: cutlass.Int32):
    """Return (A, B): how many blocks before and after its own a query sees."""
    return (BLOCK - 1 - lo) // BLOCK, (hi + BLOCK - 1) // BLOCK


def cuts(lo: cutlass.Int32, hi: cutlass.Int32, distance: cutlass.Int32):
    """Return whether a band may hide a pair of a block at ``distance``, first key less first query.

    Where it hides none, masking each element changes no bit.
    """
    return (distance - (BLOCK - 1) < lo) | (distance + (BLOCK - 1) > hi)


@cute.jit
def block_list(table: cute.Tensor, m: cutlass.Int32, lo: cutlass.Int32, hi: cutlass.Int32):
    """Return the `BlockList` of query block ``m``; empty beyond the table."""
    # n from max(first, m - A) to min(last, m + B)
    first, last = sequence_of(table, m)
    before, after = reach(lo, hi)
    begin = cutlass.max(first, m - before)
    count = cutlass.max(cutlass.min(last, m + after) + 1 - begin, 0)
    return BlockList(count if m < table.shape[0] else cutlass.Int32(0), BlockRange(begin), None)


def row_bounds(lo: cutlass.Int32, hi: cutlass.Int32, end: cutlass.Int32, row: cutlass.Int32):
    """Return the `RowBounds` of a thread whose first row is ``row``; the second is 8 below."""
    below = row + 8
    first = row + lo, below + lo
    return RowBounds(first, (cutlass.min(row + hi, end - 1), cutlass.min(below + hi, end - 1)))


@cute.jit
def init(barrier: cute.Pointer, thread: cutlass.Int32):
    """Initialise the tail barrier, by the CTA's threads, before its barriers are published."""
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)


@cute.jit
def expect(barrier: cute.Pointer, size: cutlass.Constexpr):
    """Announce, by a warp, a tile of ``size`` bytes that comes through the barrier."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


@cute.jit
def clean(
    tail: TailBarrier,
    tile: cute.Pointer,
    shape: cutlass.Constexpr,
    first: cutlass.Int32,
    full: cute.Pointer,
):
    """Await a tile, zero its rows from ``first`` on, and pass it to its readers; by a warp.

    shape: its `TileShape`; full: the mbarrier that its readers wait for.
    """
    cute.arch.mbarrier_wait(tail.barrier, tail.phase[0])
    tail.phase[0] = tail.phase[0] ^ 1
    zeros = cute.make_rmem_tensor(CHUNK // 4, cutlass.Int32)
    zeros.fill(0)
    chunks = shape.piece // CHUNK
    lane = cute.arch.lane_idx()
    start = cutlass.max(first, cutlass.Int32(0)) + lane // chunks
    for row in cutlass.range(start, shape.rows, WARP // chunks, unroll=1):
        for piece in cutlass.range_constexpr(shape.row_bytes // shape.piece):
            number = piece * chunks + lane % chunks
            cute.autovec_copy(zeros, chunk(tile, shape.rows, shape.piece, row, number))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(full)


@cute.jit
def store_rows(
    tile: cute.Pointer,
    shape: cutlass.Constexpr,
    target: cute.Tensor,
    coord: RowCoord,
    end: cutlass.Int32,
    thread: cutlass.Int32,
    threads: cutlass.Constexpr,
):
    """Store the rows before ``end`` of a tile, by ``threads`` threads, 16 bytes at a time.

    shape: its `TileShape`; target: [B, T, H, D]; coord: where the tile's row 0 goes.
    """
    # By hand: TMA would store whole tiles, over the rows of the next sequence.
    chunks = shape.row_bytes // CHUNK
    elements = CHUNK * 8 // target.element_type.width
    values = cute.make_rmem_tensor(CHUNK // 4, cutlass.Int32)
    for number in cutlass.range(thread, end * chunks, threads, unroll=1):
        row, piece = number // chunks, number % chunks
        cute.autovec_copy(chunk(tile, shape.rows, shape.piece, row, piece), values)
        index = coord.batch, coord.row + row, coord.head, piece * elements
        gRow = copy.vector(target, index, elements)
        cute.autovec_copy(values, cute.recast_tensor(gRow, cutlass.Int32))


def fake_table():
    """Return the fake table, or tickets, that kernels are compiled against."""
    return fake.compact(cutlass.Int32, (fake.size(), FIELDS), fake.TMA_ALIGN)
