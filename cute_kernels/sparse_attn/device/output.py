"""Epilogue of a forward: O = acc / sum, rounded once, and LSE = ln(sum) + ln 2 c max.

A consumer's O goes through a stage of V, or half of one, that the producer has left it.  A warp of
warpgroup 0 for each consumer stores it and releases the stage, so that the consumer goes on with
its next tile.
"""

import math
from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.pipeline import PipelineTmaAsync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ...dsl import smem, softmax, tma
from . import packed
from .forward_loads import matrix_of
from .forward_tiles import BLOCK, ROWS, ForwardTiles

#: Warps of a consumer.
WARPS = 4


@dataclass(frozen=True)
class OutputInfo:
    """Position of a consumer's 64 rows of O.

    rows: their number in their matrix (row / 64), or -1 after the last tile; head; batch; stage:
    the stage of V that holds them.
    """

    rows: cutlass.Int32
    head: cutlass.Int32
    batch: cutlass.Int32
    stage: cutlass.Int32


@dataclass(frozen=True)
class Handover:
    """Handover of O from a consumer to the warp that stores it.

    full, empty: mbarriers by consumer; sInfo: int32 [4, consumers], an `OutputInfo` each.
    """

    full: cute.Pointer
    empty: cute.Pointer
    sInfo: cute.Tensor

    def init(self, consumers: int):
        """Initialise the mbarriers; by one thread, before the CTA's barrier."""
        for consumer in range(consumers):
            cute.arch.mbarrier_init(self.full + consumer, WARPS)
            cute.arch.mbarrier_init(self.empty + consumer, 1)

    @cute.jit
    def await_empty(self, consumer: cutlass.Int32, phase: cutlass.Int32):
        """Wait, as a consumer, until O of the tile before is stored."""
        cute.arch.mbarrier_wait(self.empty + consumer, phase ^ 1)

    @cute.jit
    def publish(self, consumer: cutlass.Int32, lane: cutlass.Int32, info: OutputInfo):
        """Tell the storing warp, as a consumer, that O is written."""
        if lane == 0:
            values = info.rows, info.head, info.batch, info.stage
            for n in cutlass.range_constexpr(4):
                self.sInfo[n, consumer] = values[n]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane % 32 == 0:
            cute.arch.mbarrier_arrive(self.full + consumer)


@dataclass(frozen=True)
class SoftmaxState:
    """State of an online softmax: O unscaled, running maximum and sum of a thread's rows."""

    acc_o: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor


@dataclass(frozen=True)
class LseRows:
    """LSE of one head: gLse [Sq], stored for rows before ``end`` at index row - shift."""

    gLse: cute.Tensor
    shift: cutlass.Int32
    end: cutlass.Int32


@dataclass(frozen=True)
class VarlenOutput:
    """O [B, T, H, Dv] of a varlen batch, and its table."""

    mO: cute.Tensor
    mTable: cute.Tensor


class Output:
    """Epilogue of one configuration of the kernel."""

    def __init__(self, tiles: ForwardTiles):
        self.tiles = tiles

    @cute.jit
    def normalise(
        self,
        state: SoftmaxState,
        rows: LseRows,
        row: cutlass.Int32,
        lane: cutlass.Int32,
        c: cutlass.Float32,
    ):
        """O = acc / sum; LSE = ln(sum) + ln 2 c max.

        row: this thread's first row, the second is 8 below.
        """
        row_max, row_sum = state.row_max, state.row_sum
        for half in cutlass.range_constexpr(softmax.ROWS):
            empty = row_sum[half] == 0.0
            divide(state.acc_o, half, empty, cute.arch.rcp_approx(row_sum[half]))
            lse = log_sum(row_max[half], row_sum[half], c)
            if lane % 4 == 0 and row + 8 * half < rows.end:
                rows.gLse[row + 8 * half - rows.shift] = lse

    def pointer(self, pV: cute.Pointer, consumer: cutlass.Int32, stage: cutlass.Int32):
        """Return where a consumer's O is in the stages of V."""
        number = consumer % self.tiles.o_per_stage + stage * self.tiles.o_per_stage
        return (pV + number * ROWS * self.tiles.value_dim).align(smem.ALIGN)

    def view(self, pointer: cute.Pointer) -> cute.Tensor:
        """Return the O staging buffer, swizzled."""
        layout = self.tiles.o_layout()
        swizzled = cute.recast_ptr(pointer, layout.inner, dtype=self.tiles.dtype)
        return cute.make_tensor(swizzled, layout.outer)

    def keep(self, acc_o: cute.Tensor, pointer: cute.Pointer, lane: cutlass.Int32):
        """Write O, rounded, to its staging buffer; by a consumer."""
        rO = cute.make_rmem_tensor(acc_o.layout, self.tiles.dtype)
        rO.store(acc_o.load().to(self.tiles.dtype))
        row_major, fp32 = LayoutEnum.ROW_MAJOR, cutlass.Float32
        atom = hopper_helpers.get_smem_store_op(row_major, self.tiles.dtype, fp32)
        copy = cute.make_tiled_copy_C(atom, self.tiles.pv_mma()).get_slice(lane)
        tOsO = copy.partition_D(self.view(pointer))
        cute.copy(copy, copy.retile(rO), tOsO[None, None, None, 0])

    @cute.jit
    def store(
        self,
        o: tma.Source,
        varlen: VarlenOutput | None,
        pV: cute.Pointer,
        handover: Handover,
        v_ring: PipelineTmaAsync,
        consumer: cutlass.Int32,
    ):
        """Store a consumer's O until there are no tiles; by its warp."""
        lane, phase = cute.arch.lane_idx(), cutlass.Int32(0)
        sInfo = handover.sInfo[None, consumer]
        cute.arch.mbarrier_wait(handover.full + consumer, phase)
        while cute.arch.make_warp_uniform(sInfo[0]) >= 0:
            number, head, batch, stage = (cute.arch.make_warp_uniform(sInfo[n]) for n in range(4))
            row = number * ROWS
            pO, matrix = self.pointer(pV, consumer, stage), matrix_of(o, head, batch)
            if cutlass.const_expr(self.tiles.packed):
                rows = packed.place_of(varlen.mTable, row // BLOCK)
                inside = rows.end - row
                if inside >= ROWS:
                    self.copy_out(matrix, self.view(pO), row - rows.shift)
                elif inside > 0:
                    coord = packed.RowCoord(0, row - rows.shift, head)
                    shape = self.tiles.o_shape
                    packed.store_rows(pO, shape, varlen.mO, coord, inside, lane, packed.WARP)
            else:
                self.copy_out(matrix, self.view(pO), row)
            cute.arch.sync_warp()
            # One arrival for each warp of the consumer.
            if lane < WARPS:
                cute.arch.mbarrier_arrive(v_ring.sync_object_empty.get_barrier(stage))
            if lane == 0:
                cute.arch.mbarrier_arrive(handover.empty + consumer)
            phase = phase ^ 1
            cute.arch.mbarrier_wait(handover.full + consumer, phase)

    @cute.jit
    def copy_out(self, o: tma.Source, sO: cute.Tensor, row: cutlass.Int32):
        """Store rows from ``row`` of the matrix on, by a warp; rows outside are clipped."""
        moved = cute.domain_offset((row, 0), o.tensor)
        gO = cute.local_tile(moved, (ROWS, self.tiles.value_dim), (None, 0))
        tOsO, tOgO = tma.partition(o.atom, 0, cute.make_layout(1), sO, gO)
        cute.copy(o.atom, tOsO[None, 0], tOgO[None, 0])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def log_sum(row_max: cutlass.Float32, row_sum: cutlass.Float32, c: cutlass.Float32):
    """Return LSE = ln(sum) + ln 2 c max of a row; -inf without keys."""
    log2 = cute.math.fma(row_max, c, cute.math.log2(row_sum, fastmath=True))
    return -cutlass.Float32.inf if row_sum == 0.0 else log2 * cutlass.Float32(math.log(2.0))


@cute.jit
def divide(
    acc_o: cute.Tensor,
    half: cutlass.Constexpr,
    empty: cutlass.Boolean,
    inverse: cutlass.Float32,
):
    """Multiply a row of O by 1 / sum; +0 for a row without keys.

    And +0 for -0, which would show whether other rows made the tile add a block of zeros.
    """
    for i in cutlass.range_constexpr(cute.size(acc_o) // 4):
        for side in cutlass.range_constexpr(2):
            index = 4 * i + 2 * half + side
            value = cute.math.fma(acc_o[index], inverse, cutlass.Float32(0.0))
            acc_o[index] = cutlass.Float32(0.0) if empty else value
