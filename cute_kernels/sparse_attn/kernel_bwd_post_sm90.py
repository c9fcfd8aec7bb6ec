"""Kernel after the backward: dQ = round(dq scale), from accumulator order to [B, Sq, Hq, D].

Layouts      dq fp32 [B, Hq, Mt, tile_m * D], a tile as in ``dq_layout``; dQ [B, Sq, Hq, D], rows of
             D contiguous.  A varlen batch lies as ``device/varlen`` says, Mt counts the rows there.
             semaphore int32 [B, Hq, Mt], with ``visited``: tiles where it is 0 hold nothing, and
             their dQ is 0.
Order        nothing is added: one product, one rounding.
Roles        one CTA per (tile of tile_m query rows, head, batch); a thread loads the accumulators
             of the thread of the same number, all before the first is used.  Four lanes have two
             columns each of the same rows: they exchange them, so that each stores 8 columns.
Limits       SM90a; bf16 and fp16; D a multiple of 16.
Measured     on an H200: docs/status.md, docs/notes/attention_sm90.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.cute.runtime import make_fake_tensor

from ..compile import fake
from ..dsl import copy
from .config import PostConfig
from .device import tile_scheduler, varlen
from .device.backward_tiles import dq_layout
from .device.block_union import BLOCK

WARPGROUP = 128
THREADS = 2 * WARPGROUP
#: Lanes that share a row of the accumulator, two columns each; and the columns that a lane stores.
QUAD, VECTOR = 4, 8


@dataclass(frozen=True)
class ThreadCoord:
    """Position of a quad's rows: batch, head, the first row and column, and the lane in the quad.

    The second row is 8 below the first.
    """

    batch: cutlass.Int32
    head: cutlass.Int32
    row: cutlass.Int32
    column: cutlass.Int32
    lane: cutlass.Int32


class BackwardPostSm90:
    """One dtype, head dimension and tile height; ``__call__`` is what is compiled."""

    def __init__(self, config: PostConfig):
        assert config.tile_m in (64, 128) and config.head_dim % 16 == 0
        self.dtype, self.head_dim = fake.DTYPES[config.dtype], config.head_dim
        self.tile_m, self.packed = config.tile_m, config.packed
        self.visited, self.pdl = config.visited, config.pdl

    @cute.jit
    def __call__(
        self,
        mAcc: cute.Tensor,
        mdQ: cute.Tensor,
        mSemaphore: cute.Tensor | None,
        mTable: cute.Tensor | None,
        scale: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        batches, heads, tiles, _ = mAcc.shape
        self.kernel(mAcc, mdQ, mSemaphore, mTable, scale).launch(
            grid=tile_scheduler.row_grid(batches, heads, tiles),
            block=(THREADS, 1, 1),
            use_pdl=self.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mAcc: cute.Tensor,
        mdQ: cute.Tensor,
        mSemaphore: cute.Tensor | None,
        mTable: cute.Tensor | None,
        scale: cutlass.Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        tile, head, batch = tile_scheduler.row_coord(mAcc.shape[1], mAcc.shape[2])
        if cutlass.const_expr(self.pdl):
            # The kernel that adds dQ may still run: its results are read after this only.
            cute.arch.griddepcontrol_wait()
        holds = cutlass.Boolean(True)
        if cutlass.const_expr(self.visited):
            holds = mSemaphore[batch, head, tile] != 0
        warpgroup, thread = tidx // WARPGROUP, tidx % WARPGROUP
        # By hand, from the accumulator's layout (``softmax``): dq has no coordinates of dQ.
        # Warpgroups are stacked along the rows of 128, and side by side along D for 64 rows.
        row = tile * self.tile_m + thread // 32 * 16 + thread % 32 // 4
        column = cutlass.Int32(0)
        if cutlass.const_expr(self.tile_m == WARPGROUP):
            row += warpgroup * 64
        else:
            column = warpgroup * (self.head_dim // 2)
        fours = self.tile_m * self.head_dim // (4 * THREADS)
        gAcc = cute.make_tensor(mAcc[batch, head, tile, None].iterator, dq_layout(fours))
        tAgA = gAcc[None, thread, None, warpgroup]
        coord = ThreadCoord(batch, head, row, column, thread % QUAD)
        if cutlass.const_expr(self.packed):
            rows = varlen.row_range(mTable, tile * self.tile_m // BLOCK)
            if tile * self.tile_m < rows.end:
                self.round(tAgA, mdQ, coord, rows, holds, scale)
        else:
            self.round(tAgA, mdQ, coord, varlen.RowRange(0, mdQ.shape[1]), holds, scale)

    @cute.jit
    def round(
        self,
        tAgA: cute.Tensor,
        mdQ: cute.Tensor,
        coord: ThreadCoord,
        rows: varlen.RowRange,
        holds: cutlass.Boolean,
        scale: cutlass.Float32,
    ):
        """Store a quad's accumulators of a tile, rounded, in rows before ``rows.end``.

        holds: whether the tile holds anything; zeros if not.
        """
        fours = self.tile_m * self.head_dim // (4 * THREADS)
        rAcc = cute.make_rmem_tensor(tAgA.shape, cutlass.Float32)
        rAcc.fill(0.0)
        if holds:
            cute.autovec_copy(tAgA, rAcc)
        # dQ = round(dq scale)
        rounded = cute.make_rmem_tensor(tAgA.shape, self.dtype)
        rounded.store((rAcc.load() * scale).to(self.dtype))
        # Two adjacent columns each, of the first row and of the second.
        rPairs = cute.recast_tensor(rounded, cutlass.Int32)
        whole = fours - fours % QUAD
        for four in cutlass.range_constexpr(0, whole, QUAD):
            for half in cutlass.range_constexpr(2):
                # Of one row 32 columns, 64 bytes.
                pairs = [rPairs[half, four + i] for i in range(QUAD)]
                self.store(pairs, mdQ, coord, rows, half, four + coord.lane)
        if cutlass.const_expr(whole < fours):
            # Of both rows 16 columns.
            pairs = [rPairs[half, whole + i] for half in range(2) for i in range(2)]
            self.store(pairs, mdQ, coord, rows, coord.lane // 2, whole + coord.lane % 2)

    @cute.jit
    def store(
        self,
        pairs: list[cutlass.Int32],
        mdQ: cute.Tensor,
        coord: ThreadCoord,
        rows: varlen.RowRange,
        half: cutlass.Int32,
        four: cutlass.Int32,
    ):
        """Store vector ``lane`` of the quad's four, of which each lane holds a pair: 16 bytes.

        half, four: row and group of columns of this lane's vector.
        """
        vector = cute.make_rmem_tensor(QUAD, cutlass.Int32)
        for i, pair in enumerate(transpose(pairs, coord.lane)):
            vector[i] = pair
        row = coord.row + half * 8
        index = coord.batch, row - rows.shift, coord.head, coord.column + four * VECTOR
        target = copy.vector(mdQ, index, VECTOR)
        if row < rows.end:
            cute.autovec_copy(cute.recast_tensor(vector, self.dtype), target)


@cute.jit
def transpose(values: list[cutlass.Int32], lane: cutlass.Int32) -> list[cutlass.Int32]:
    """Value ``lane`` of each lane of a quad, in the order of the lanes."""
    odd, high = lane % 2 == 1, lane >= 2
    # Of the first two values and of the last two: the one of this lane's parity, of two lanes.
    twos = []
    for first in cutlass.range_constexpr(0, QUAD, 2):
        even_value, odd_value = values[first], values[first + 1]
        sent = even_value if odd else odd_value
        received = cute.arch.shuffle_sync_bfly(sent, offset=1)
        twos += [received if odd else even_value, odd_value if odd else received]
    low, upper = twos[:2], twos[2:]
    received = []
    for i in cutlass.range_constexpr(2):
        sent = low[i] if high else upper[i]
        received.append(cute.arch.shuffle_sync_bfly(sent, offset=2))
    firsts = [received[i] if high else low[i] for i in range(2)]
    return firsts + [upper[i] if high else received[i] for i in range(2)]


def build(config: PostConfig, compile: Callable = cute.compile):
    """Compile one variant against fake tensors; no GPU needed."""
    batch, q_len, heads, tiles = (fake.size() for _ in range(4))
    wide = tuple(cute.sym_int64(divisibility=4) for _ in range(3))
    even = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
    shape = (batch, heads, tiles, config.tile_m * config.head_dim)
    return compile(
        BackwardPostSm90(config),
        make_fake_tensor(cutlass.Float32, shape, (*wide, 1), assumed_align=16),
        make_fake_tensor(
            fake.DTYPES[config.dtype],
            (batch, q_len, heads, config.head_dim),
            (*even, 1),
            assumed_align=16,
        ),
        fake.compact(cutlass.Int32, (batch, heads, tiles)) if config.visited else None,
        varlen.fake_table() if config.packed else None,
        cutlass.Float32(1.0),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
