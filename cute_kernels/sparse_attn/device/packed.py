"""Packs that are read where they lie: tiles in which a sequence ends.

Rows are counted as in ``packs.Layout``: every sequence begins at a multiple of 128.  A table int32
[blocks, 2] says where a block of 128 rows is:

    shift   how many rows nearer to the buffer's begin it lies there
    end     the row behind the last one of its sequence

TMA brings whole tiles; rows from ``end`` on are another sequence's then, and 0 times its NaN would
be NaN.  A tile that has such rows comes through a barrier of its own.  The warp that asked for it
overwrites them by zeros, and only then says that it has come.  Stored are rows before ``end`` only.
"""

import cutlass
from cutlass import cute

from ...compile import fake
from ...dsl import copy
from .chunks import CHUNK, chunk

#: The numbers of a block.
FIELDS = 2
WARP = 32


@cute.jit
def place_of(table: cute.Tensor, block):
    """(shift, end) of a block; of the last one for those beyond it."""
    at = cutlass.min(block, table.shape[0] - 1)
    place = copy.vector(table, (at, 0), FIELDS).load()
    return place[0], place[1]


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
    """What kernels are compiled against."""
    return fake.compact(cutlass.Int32, (fake.size(), FIELDS), fake.TMA_ALIGN)
