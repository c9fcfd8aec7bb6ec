"""What a forward leaves: O = acc / sum, rounded once, and LSE = ln(sum) + ln 2 c max.

A consumer's O goes out through a stage of V, or half of one, that the loading warp has left it.  A
warp of warpgroup 0 for each consumer stores it and gives the stage back, so that the consumer goes
on with its next tile.
"""

import math
from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ...dsl import smem, softmax, tma
from . import packed
from .forward_loads import matrix_of
from .forward_tiles import BLOCK, ROWS, ForwardTiles

#: Of a consumer.
WARPS = 4


@dataclass(frozen=True)
class Handover:
    """From a consumer to its warp: mbarriers by consumer; int32 [4, consumers]: the number of its
    64 rows in their matrix, or -1 behind the last; the head, the batch, the stage of V."""

    full: cute.Pointer
    empty: cute.Pointer
    told: cute.Tensor

    def init(self, consumers: int):
        """By one thread, before the CTA's barrier."""
        for consumer in range(consumers):
            cute.arch.mbarrier_init(self.full + consumer, WARPS)
            cute.arch.mbarrier_init(self.empty + consumer, 1)

    @cute.jit
    def await_room(self, consumer, phase):
        """By a consumer, before it tells."""
        cute.arch.mbarrier_wait(self.empty + consumer, phase ^ 1)

    @cute.jit
    def tell(self, consumer, lane, at, head, batch, stage):
        """By a consumer: what of it is written."""
        if lane == 0:
            numbers = at, head, batch, stage
            for n in cutlass.range_constexpr(4):
                self.told[n, consumer] = numbers[n]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane % 32 == 0:
            cute.arch.mbarrier_arrive(self.full + consumer)


class Output:
    """Of one configuration of the kernel."""

    def __init__(self, tiles: ForwardTiles):
        self.tiles = tiles

    @cute.jit
    def normalise(self, state, rows, row, lane, end, c, shift):
        """O = acc / sum; LSE = ln(sum) + ln 2 c max of rows before ``end``, in their places.

        row: this thread's first, its second is 8 below; shift: how far in front of it its place is.
        """
        acc_o, row_max, row_sum = state
        for half in cutlass.range_constexpr(softmax.ROWS):
            empty = row_sum[half] == 0.0
            divide(acc_o, half, empty, cute.arch.rcp_approx(row_sum[half]))
            log2 = cute.math.fma(row_max[half], c, cute.math.log2(row_sum[half], fastmath=True))
            lse = -cutlass.Float32.inf if empty else log2 * cutlass.Float32(math.log(2.0))
            if lane % 4 == 0 and row + 8 * half < end:
                rows[row + 8 * half - shift] = lse

    def place(self, memory, consumer, stage):
        """Where a consumer's O is in the stages of V."""
        number = consumer % self.tiles.o_per_stage + stage * self.tiles.o_per_stage
        return (memory + number * ROWS * self.tiles.value_dim).align(smem.ALIGN)

    def view(self, place):
        """It, in its layout."""
        layout = self.tiles.o_layout()
        pointer = cute.recast_ptr(place, layout.inner, dtype=self.tiles.dtype)
        return cute.make_tensor(pointer, layout.outer)

    def keep(self, acc_o, place, lane):
        """By a consumer: O, rounded, at its place."""
        rO = cute.make_rmem_tensor(acc_o.layout, self.tiles.dtype)
        rO.store(acc_o.load().to(self.tiles.dtype))
        row_major, fp32 = LayoutEnum.ROW_MAJOR, cutlass.Float32
        atom = hopper_helpers.get_smem_store_op(row_major, self.tiles.dtype, fp32)
        copy = cute.make_tiled_copy_C(atom, self.tiles.pv_mma()).get_slice(lane)
        part = copy.partition_D(self.view(place))
        cute.copy(copy, copy.retile(rO), part[None, None, None, 0])

    @cute.jit
    def store(self, o, pack, memory, handover, v_ring, consumer):
        """By a consumer's warp, until there are no tiles.

        pack: (O [B, T, H, Dv], table) of a pack, or None.
        """
        lane, phase = cute.arch.lane_idx(), cutlass.Int32(0)
        told = handover.told[None, consumer]
        cute.arch.mbarrier_wait(handover.full + consumer, phase)
        while cute.arch.make_warp_uniform(told[0]) >= 0:
            at, head, batch, stage = (cute.arch.make_warp_uniform(told[n]) for n in range(4))
            row = at * ROWS
            own, matrix = self.place(memory, consumer, stage), matrix_of(o, head, batch)
            if cutlass.const_expr(self.tiles.packed):
                mO, table = pack
                shift, end = packed.place_of(table, row // BLOCK)
                inside = end - row
                if inside >= ROWS:
                    self.copy_out(matrix, self.view(own), row - shift)
                elif inside > 0:
                    place, rows = (0, row - shift, head), (cutlass.Int32(0), inside)
                    packed.store_rows(own, self.tiles.of_o, mO, place, rows, lane, packed.WARP)
            else:
                self.copy_out(matrix, self.view(own), row)
            cute.arch.sync_warp()
            # In place of each warp of the consumer.
            if lane < WARPS:
                cute.arch.mbarrier_arrive(v_ring.sync_object_empty.get_barrier(stage))
            if lane == 0:
                cute.arch.mbarrier_arrive(handover.empty + consumer)
            phase = phase ^ 1
            cute.arch.mbarrier_wait(handover.full + consumer, phase)

    @cute.jit
    def copy_out(self, o, sO, row):
        """By a warp: the rows from ``row`` of the matrix on; those outside are clipped."""
        moved = cute.domain_offset((row, 0), o.tensor)
        g = cute.local_tile(moved, (ROWS, self.tiles.value_dim), (None, 0))
        s, g = tma.partition(o.atom, 0, cute.make_layout(1), sO, g)
        cute.copy(o.atom, s[None, 0], g[None, 0])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def divide(acc_o: cute.Tensor, half: cutlass.Constexpr, empty, inverse):
    """A row of O times 1 / sum; +0 for a row without keys.

    And +0 for -0, which would show whether other rows made the tile add a block of zeros.
    """
    for i in cutlass.range_constexpr(cute.size(acc_o) // 4):
        for side in cutlass.range_constexpr(2):
            at = 4 * i + 2 * half + side
            value = cute.math.fma(acc_o[at], inverse, cutlass.Float32(0.0))
            acc_o[at] = cutlass.Float32(0.0) if empty else value
