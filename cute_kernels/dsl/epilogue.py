"""D = round(acc): the rows of a warpgroup's accumulator to global memory by TMA, part by part.

Each warpgroup has buffers of its own; the stores of one tile go on while the next is computed.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from . import mma, smem, tma
from .mainloop import Mainloop

#: Bytes of one row of a buffer: the widest swizzle.
ROW_BYTES = 128
STAGES = 2
#: Named barrier 0 is the CTA's; consumer w uses 1 + w.
BARRIER = 1


def shared_bytes(consumers: int) -> int:
    """Of the buffers of all consumers."""
    return consumers * STAGES * 64 * ROW_BYTES


class Epilogue:
    """Stores the tiles of a mainloop as ``dtype``."""

    def __init__(self, mainloop: Mainloop, dtype):
        self.mainloop, self.dtype = mainloop, dtype
        #: Columns that are stored at a time.
        self.part_n = ROW_BYTES * 8 // dtype.width
        assert mainloop.tile[1] % self.part_n == 0, "the epilogue stores whole parts"

    def layout(self) -> cute.ComposedLayout:
        """Of the consumers' buffers."""
        buffers = self.mainloop.consumers * STAGES
        return smem.operand_layout(self.dtype, 64, self.part_n, "k", buffers)

    def target(self, mD: cute.Tensor) -> tma.Source:
        """D [M, N] as TMA stores to it; on the host."""
        return tma.store(mD, self.layout(), (64, self.part_n))

    @cute.jit
    def store(self, acc, d: tma.Source, sD, consumer, lane, at, buffer):
        """D = round(acc) at ``at``, in units of 64 rows and of tiles.

        ``buffer``: which one is next; returned as it is then.
        """
        tile_n = self.mainloop.tile[1]
        gD_tile = cute.local_tile(d.tensor, (64, tile_n), at)
        gD_parts = cute.zipped_divide(gD_tile, (64, self.part_n))
        tDsD, tDgD = cpasync.tma_partition(
            d.atom, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), gD_parts
        )
        # An instruction of part_n columns lays its values out as a slice of the wide one's.
        part_mma = self.mainloop.tiled_mma(1, self.part_n)
        tiled_copy = cute.make_tiled_copy_C(self.shared_store_atom(), part_mma)
        own = tiled_copy.get_slice(lane)
        tRsD = own.partition_D(sD)
        shape = part_mma.get_slice(lane).partition_shape_C((64, self.part_n))
        rPart = cute.make_rmem_tensor(shape, cutlass.Float32)
        rD = cute.make_rmem_tensor(shape, self.dtype)
        tRrD = own.retile(rD)
        parts = tile_n // self.part_n
        values = cute.size(acc) // parts
        for part in cutlass.range_constexpr(parts):
            slot = consumer * STAGES + buffer
            # The store that used this buffer last must have read it.
            if lane == 0:
                cute.arch.cp_async_bulk_wait_group(STAGES - 1, read=True)
            self.sync(consumer)
            for i in cutlass.range_constexpr(values):
                rPart[i] = acc[part * values + i]
            rD.store(rPart.load().to(self.dtype))
            cute.copy(tiled_copy, tRrD, tRsD[None, None, None, slot])
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync(consumer)
            if lane == 0:
                cute.copy(d.atom, tDsD[None, slot], tDgD[None, part])
                cute.arch.cp_async_bulk_commit_group()
            buffer = (buffer + 1) % STAGES
        return buffer

    @cute.jit
    def finish(self, lane):
        """Waits until the buffers may go."""
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def shared_store_atom(self) -> cute.CopyAtom:
        """stmatrix for 16-bit outputs, 8-byte stores for fp32."""
        return hopper_helpers.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, cutlass.Float32)

    def sync(self, consumer):
        """The 128 threads of one consumer warpgroup meet."""
        cute.arch.barrier(barrier_id=BARRIER + consumer, number_of_threads=mma.WARPGROUP)
