"""Epilogue of a forward: O = acc / sum, rounded once, and LSE = ln(sum) + ln 2 c max.

A consumer's O goes through a stage of V, or half of one, that the producer has left it.  A warp of
warpgroup 0 for each consumer stores it and releases the stage, so that the consumer goes on with
its next tile.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.pipeline import PipelineTmaAsync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ...dsl import smem, tma
from . import varlen
from .block_union import BLOCK
from .forward_tiles import ROWS, ForwardTiles

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


class Output:
    """Epilogue of one configuration of the kernel."""

    def __init__(self, tiles: ForwardTiles):
        self.tiles = tiles

    def pointer(self, pV: cute.Pointer, consumer: cutlass.Int32, stage: cutlass.Int32):
        """Return where a consumer's O is in the stages of V."""
        number = consumer % self.tiles.o_per_stage + stage * self.tiles.o_per_stage
        return (pV + number * ROWS * self.tiles.value_dim).align(smem.ALIGN)

    def view(self, pointer: cute.Pointer) -> cute.Tensor:
        """Return the O staging buffer, swizzled."""
        layout = self.tiles.o_layout()
        swizzled = cute.recast_ptr(pointer, layout.inner, dtype=self.tiles.dtype)
        return cute.make_tensor(swizzled, layout.outer)

    def keep(self, tOrO: cute.Tensor, pointer: cute.Pointer, lane: cutlass.Int32):
        """Write O, rounded, to its staging buffer; by a consumer."""
        rO = cute.make_rmem_tensor(tOrO.layout, self.tiles.dtype)
        rO.store(tOrO.load().to(self.tiles.dtype))
        row_major, fp32 = LayoutEnum.ROW_MAJOR, cutlass.Float32
        atom = hopper_helpers.get_smem_store_op(row_major, self.tiles.dtype, fp32)
        copy = cute.make_tiled_copy_C(atom, self.tiles.pv_mma()).get_slice(lane)
        tOsO = copy.partition_D(self.view(pointer))
        cute.copy(copy, copy.retile(rO), tOsO[None, None, None, 0])

    @cute.jit
    def store(
        self,
        o: tma.Source,
        mO: cute.Tensor | None,
        mTable: cute.Tensor | None,
        pV: cute.Pointer,
        handover: Handover,
        v_ring: PipelineTmaAsync,
        consumer: cutlass.Int32,
    ):
        """Store a consumer's O until there are no tiles; by its warp.  mO, mTable: if varlen."""
        lane, phase = cute.arch.lane_idx(), cutlass.Int32(0)
        sInfo = handover.sInfo[None, consumer]
        cute.arch.mbarrier_wait(handover.full + consumer, phase)
        while cute.arch.make_warp_uniform(sInfo[0]) >= 0:
            number, head, batch, stage = (cute.arch.make_warp_uniform(sInfo[n]) for n in range(4))
            row = number * ROWS
            pO, matrix = self.pointer(pV, consumer, stage), o.matrix(head, batch)
            if cutlass.const_expr(self.tiles.packed):
                rows = varlen.row_range(mTable, row // BLOCK)
                inside = rows.end - row
                if inside >= ROWS:
                    self.copy_out(matrix, self.view(pO), row - rows.shift)
                elif inside > 0:
                    coord = varlen.RowCoord(0, row - rows.shift, head)
                    shape = self.tiles.o_shape
                    varlen.store_rows(pO, shape, mO, coord, inside, lane, varlen.WARP)
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
