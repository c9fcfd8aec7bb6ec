"""Epilogue D = round(acc): each warpgroup stores its accumulator by TMA, some columns at a time.

Each warpgroup has its own staging buffers; stores of one tile overlap the next tile's mainloop.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from . import mma, smem, tma
from .mainloop import Mainloop

#: Bytes of a row of a staging buffer: the widest swizzle.
ROW_BYTES = 128
STAGES = 2
#: Named barrier 0 is the CTA's; consumer w uses 1 + w.
BARRIER = 1


def shared_bytes(consumers: int) -> int:
    """Bytes of the staging buffers of all consumers."""
    return consumers * STAGES * 64 * ROW_BYTES


class Epilogue:
    """Epilogue that stores the tiles of a mainloop as ``dtype``."""

    def __init__(self, mainloop: Mainloop, dtype: type[cutlass.Numeric]):
        self.mainloop, self.dtype = mainloop, dtype
        #: Columns of a TMA store.
        self.part_n = ROW_BYTES * 8 // dtype.width
        assert mainloop.tile[1] % self.part_n == 0, "the epilogue stores whole parts"

    def layout(self) -> cute.ComposedLayout:
        """Layout of the staging buffers."""
        buffers = self.mainloop.consumers * STAGES
        return smem.operand_layout(self.dtype, 64, self.part_n, "k", buffers)

    def target(self, mD: cute.Tensor) -> tma.Source:
        """TMA target of D [M, N]; host code."""
        return tma.store(mD, self.layout(), (64, self.part_n))

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,
        d: tma.Source,
        sD: cute.Tensor,
        consumer: cutlass.Int32,
        lane: cutlass.Int32,
        coord: cute.Coord,
        buffer: cutlass.Int32,
    ) -> cutlass.Int32:
        """D = round(acc) at ``coord`` = (group of 64 rows, tile of columns).

        ``buffer``: index of the next staging buffer; returned as it is then.
        """
        tile_n = self.mainloop.tile[1]
        gD_tile = cute.local_tile(d.tensor, (64, tile_n), coord)
        gD_stores = cute.zipped_divide(gD_tile, (64, self.part_n))
        tDsD, tDgD = cpasync.tma_partition(
            d.atom, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), gD_stores
        )
        # An instruction of part_n columns lays its values out as a slice of the wide one's.
        part_mma = self.mainloop.tiled_mma(1, self.part_n)
        tiled_copy = cute.make_tiled_copy_C(self.shared_store_atom(), part_mma)
        thr_copy = tiled_copy.get_slice(lane)
        tRsD = thr_copy.partition_D(sD)
        shape = part_mma.get_slice(lane).partition_shape_C((64, self.part_n))
        rAcc = cute.make_rmem_tensor(shape, cutlass.Float32)
        rD = cute.make_rmem_tensor(shape, self.dtype)
        tRrD = thr_copy.retile(rD)
        stores = tile_n // self.part_n
        values = cute.size(acc) // stores
        for store in cutlass.range_constexpr(stores):
            slot = consumer * STAGES + buffer
            # The last store from this buffer must have read it.
            if lane == 0:
                cute.arch.cp_async_bulk_wait_group(STAGES - 1, read=True)
            self.sync(consumer)
            for i in cutlass.range_constexpr(values):
                rAcc[i] = acc[store * values + i]
            rD.store(rAcc.load().to(self.dtype))
            cute.copy(tiled_copy, tRrD, tRsD[None, None, None, slot])
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync(consumer)
            if lane == 0:
                cute.copy(d.atom, tDsD[None, slot], tDgD[None, store])
                cute.arch.cp_async_bulk_commit_group()
            buffer = (buffer + 1) % STAGES
        return buffer

    @cute.jit
    def finish(self, lane: cutlass.Int32):
        """Wait until all stores have read the staging buffers."""
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def shared_store_atom(self) -> cute.CopyAtom:
        """Copy from registers to shared memory: stmatrix for 16-bit outputs, 8 bytes for fp32."""
        return hopper_helpers.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, cutlass.Float32)

    def sync(self, consumer: cutlass.Int32):
        """Named barrier of the 128 threads of a consumer warpgroup."""
        cute.arch.barrier(barrier_id=BARRIER + consumer, number_of_threads=mma.WARPGROUP)
