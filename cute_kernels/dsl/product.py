"""Frame of the kernels of products: a CTA's shared memory, its ring and its roles.

Warpgroup 0 loads, by one warp; warpgroups 1 and 2 multiply, 64 rows of a tile each.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineTmaAsync

from . import epilogue, mma, pipeline, smem, tma
from .mainloop import Mainloop

CONSUMERS = 2
THREADS = (1 + CONSUMERS) * mma.WARPGROUP
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
#: The 232448 bytes of shared memory that a CTA may have, less 2 KiB for barriers and alignment.
SHARED_BYTES = 230400


@dataclass(frozen=True)
class SharedTiles:
    """Staged tiles in shared memory: [rows, k, stage] of A and B, staging buffers of D."""

    sA: cute.Tensor
    sB: cute.Tensor
    sD: cute.Tensor


class Frame:
    """Mainloop and epilogue of a kernel, and their shared memory."""

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        d_dtype: type[cutlass.Numeric],
        majors: tuple[str, str],
        tile: tuple[int, int, int],
        cluster: tuple[int, int] = (1, 1),
    ):
        ring_bytes = SHARED_BYTES - epilogue.shared_bytes(CONSUMERS)
        self.dtype, self.d_dtype, self.cluster = dtype, d_dtype, cluster
        self.mainloop = Mainloop(dtype, majors, tile, cluster, CONSUMERS, ring_bytes)
        self.epilogue = epilogue.Epilogue(self.mainloop, d_dtype)

    def storage(self) -> type:
        """Return the struct of a CTA's shared memory; host code."""
        (sA_layout, sB_layout), sD_layout = self.mainloop.layouts(), self.epilogue.layout()

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.mainloop.stages]
            sA: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sA_layout)], smem.ALIGN
            ]
            sB: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sB_layout)], smem.ALIGN
            ]
            sD: cute.struct.Align[
                cute.struct.MemRange[self.d_dtype, cute.cosize(sD_layout)], smem.ALIGN
            ]

        return Storage

    @cute.jit
    def prefetch(self, a: tma.Source, b: tma.Source, d: tma.Source):
        """Fetch the descriptors of A, B and D; by one warp."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            for source in (a, b, d):
                cpasync.prefetch_descriptor(source.atom)

    def tiles(self, storage: cute.struct) -> SharedTiles:
        """View the tiles in a CTA's shared memory."""
        (sA_layout, sB_layout), sD_layout = self.mainloop.layouts(), self.epilogue.layout()
        return SharedTiles(
            storage.sA.get_tensor(sA_layout.outer, swizzle=sA_layout.inner),
            storage.sB.get_tensor(sB_layout.outer, swizzle=sB_layout.inner),
            storage.sD.get_tensor(sD_layout.outer, swizzle=sD_layout.inner),
        )

    def make_ring(self, storage: cute.struct, cluster: cute.Layout) -> PipelineTmaAsync:
        """Make the ring of A and B, and announce its barriers, which the kernel awaits."""
        ring = self.mainloop.ring(storage.barriers.data_ptr(), cluster)
        pipeline.announce_barriers(self.cluster)
        return ring
