"""What a forward leaves: O = acc / sum, rounded once, and LSE = ln(sum) + ln 2 c max."""

import math

import cutlass
from cutlass import cute
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ...dsl import mma, softmax, tma
from . import packed
from .forward_tiles import BLOCK, ROWS, ForwardTiles

#: The consumers meet at it.
BARRIER = 1


class Output:
    """By the consumers' threads, through the buffer of Q."""

    def __init__(self, tiles: ForwardTiles):
        self.tiles = tiles

    @cute.jit
    def normalise(self, state, rows, tile, end, c, table=None):
        """O = acc / sum; LSE = ln(sum) + ln 2 c max of rows before ``end``."""
        acc_o, row_max, row_sum = state
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP
        row = tile * self.tiles.rows + consumer * ROWS + lane // 32 * 16 + lane % 32 // 4
        shift = 0
        if cutlass.const_expr(table is not None):
            shift, _ = packed.place_of(table, row // BLOCK)
        for half in cutlass.range_constexpr(softmax.ROWS):
            empty = row_sum[half] == 0.0
            divide(acc_o, half, empty, cute.arch.rcp_approx(row_sum[half]))
            log2 = cute.math.fma(row_max[half], c, cute.math.log2(row_sum[half], fastmath=True))
            lse = -cutlass.Float32.inf if empty else log2 * cutlass.Float32(math.log(2.0))
            if lane % 4 == 0 and row + 8 * half < end:
                rows[row + 8 * half - shift] = lse

    def keep(self, acc_o, sO_tile):
        """O, rounded, in the buffer of Q: a warpgroup writes over rows that it alone has read."""
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        rO = cute.make_rmem_tensor(acc_o.layout, self.tiles.dtype)
        rO.store(acc_o.load().to(self.tiles.dtype))
        row_major, fp32 = LayoutEnum.ROW_MAJOR, cutlass.Float32
        atom = hopper_helpers.get_smem_store_op(row_major, self.tiles.dtype, fp32)
        tiled_copy = cute.make_tiled_copy_C(atom, self.tiles.pv_mma())
        copy = tiled_copy.get_slice(tidx % mma.WARPGROUP)
        sO = cute.local_tile(sO_tile, (ROWS, self.tiles.value_dim, 1), (consumer, 0, 0))
        cute.copy(tiled_copy, copy.retile(rO), copy.partition_D(sO)[None, None, None, 0])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()

    @cute.jit
    def store(self, o, sO, tile):
        """The tile of O, from the buffer of Q."""
        tidx, _, _ = cute.arch.thread_idx()
        gO_tile = cute.local_tile(o.tensor, (self.tiles.rows, self.tiles.value_dim), (None, 0))
        tOsO, tOgO = tma.partition(o.atom, 0, cute.make_layout(1), sO, gO_tile)
        if tidx == mma.WARPGROUP:
            cute.copy(o.atom, tOsO[None, 0], tOgO[None, tile])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_of_pack(self, o, sO, what, tile):
        """Likewise, no row behind its sequence's last."""
        memory, mO, table, head = what
        tidx, _, _ = cute.arch.thread_idx()
        for n in cutlass.range_constexpr(self.tiles.rows // self.tiles.box_rows):
            row, inside = self.box_place(table, tile, n)
            s, g = self.tiles.box(o, sO, row, n)
            first = n * self.tiles.box_rows
            if inside >= self.tiles.box_rows:
                if tidx == mma.WARPGROUP:
                    cute.copy(o.atom, s, g)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            elif inside > 0:
                threads = self.tiles.consumers * mma.WARPGROUP
                rows, at = (first, first + inside), (0, row - first, head)
                thread = tidx - mma.WARPGROUP
                packed.store_rows(memory, self.tiles.of_o, mO, at, rows, thread, threads)

    def box_place(self, table, tile, n: int):
        """(where its first row is in the buffer, how many rows of its sequence follow) of a box."""
        row = tile * self.tiles.rows + n * self.tiles.box_rows
        shift, end = packed.place_of(table, row // BLOCK)
        return row - shift, end - row

    def sync(self):
        """The consumers meet."""
        threads = self.tiles.consumers * mma.WARPGROUP
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=threads)


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
