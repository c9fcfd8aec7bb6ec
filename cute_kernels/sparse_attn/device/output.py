"""What a forward leaves: O = acc / sum, rounded once, and LSE = ln(sum) + ln 2 c max.

A consumer's O goes out through a stage of V, or half of one, that the loading warp has left it.
"""

import math

import cutlass
from cutlass import cute
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ...dsl import mma, smem, softmax, tma
from . import packed
from .forward_tiles import BLOCK, ROWS, ForwardTiles


class Output:
    """By a consumer's threads; its warpgroup meets at named barrier ``barrier`` + consumer."""

    def __init__(self, tiles: ForwardTiles, barrier: int):
        self.tiles, self.barrier = tiles, barrier

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

    @cute.jit
    def store(self, acc_o, memory, o, pack, at, consumer, lane):
        """A consumer's 64 rows of O, rounded, through ``memory``, whose readers are done with it.

        o: the head's matrix; pack: (O [B, T, H, Dv], table, head) of a pack, or None; at: the
        number of the 64 rows in the matrix.
        """
        layout = self.tiles.o_layout()
        pointer = cute.recast_ptr(memory.align(smem.ALIGN), layout.inner, dtype=self.tiles.dtype)
        sO = cute.make_tensor(pointer, layout.outer)
        rO = cute.make_rmem_tensor(acc_o.layout, self.tiles.dtype)
        rO.store(acc_o.load().to(self.tiles.dtype))
        row_major, fp32 = LayoutEnum.ROW_MAJOR, cutlass.Float32
        atom = hopper_helpers.get_smem_store_op(row_major, self.tiles.dtype, fp32)
        copy = cute.make_tiled_copy_C(atom, self.tiles.pv_mma()).get_slice(lane)
        cute.copy(copy, copy.retile(rO), copy.partition_D(sO)[None, None, None, 0])
        cute.arch.fence_proxy("async.shared", space="cta")
        barrier_id = self.barrier + consumer
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=mma.WARPGROUP)
        if cutlass.const_expr(self.tiles.packed):
            mO, table, head = pack
            row = at * ROWS
            shift, end = packed.place_of(table, row // BLOCK)
            inside = end - row
            if inside >= ROWS:
                if lane == 0:
                    self.copy_out(o, sO, row - shift)
            elif inside > 0:
                place = (0, row - shift, head)
                rows = (cutlass.Int32(0), inside)
                packed.store_rows(memory, self.tiles.of_o, mO, place, rows, lane, mma.WARPGROUP)
        else:
            if lane == 0:
                self.copy_out(o, sO, at * ROWS)
        # A warp goes on when it has read its own rows, and the first when TMA has read all.
        cute.arch.sync_warp()

    def copy_out(self, o, sO, row):
        """By one thread: the rows from ``row`` of the matrix on; those outside are clipped."""
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
