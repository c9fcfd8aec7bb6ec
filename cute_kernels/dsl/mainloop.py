"""GEMM mainloop: acc[m, n] += Σ_k A[m, k] B[n, k] over a range of K, in one order.

A stage of the ring is one K block of A and of B.  A producer warp loads it by TMA, with multicast
over a cluster; consumer warpgroups add it, K ascending in whole groups of 16.  The caller chooses
the tiles and the start of the accumulator, and has the epilogue.

K tail       TMA fills zeros inside the last group of 16; groups wholly beyond K are skipped.
M, N tails   loads beyond M or N give zeros, in rows and columns that no output has.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from . import mma, pipeline, smem, tma


@dataclass(frozen=True)
class OperandLoads:
    """TMA loads of one operand X.

    atom:  the copy.
    tXsX:  [box, stage] in shared memory.
    tXgX:  [box, tile, K block] in global memory.
    mask:  the CTAs that receive a load; None without multicast.
    """

    atom: cute.CopyAtom
    tXsX: cute.Tensor
    tXgX: cute.Tensor
    mask: cutlass.Int16 | None

    @property
    def tiles(self) -> cutlass.Int32:
        """Number of tiles along M or N."""
        return cute.size(self.tXgX, mode=[1])


@dataclass(frozen=True)
class Loads:
    """TMA loads of A and B by a producer warp."""

    a: OperandLoads
    b: OperandLoads

    @property
    def blocks(self) -> cutlass.Int32:
        """Number of K blocks."""
        return cute.size(self.a.tXgX, mode=[2])


@dataclass(frozen=True)
class Operands:
    """WGMMA operands of a consumer warpgroup: the instruction, and A and B in shared memory."""

    tiled: cute.TiledMma
    tCrA: cute.Tensor
    tCrB: cute.Tensor


class Mainloop:
    """Mainloop of one static tile shape.

    Args:
        dtype: element type of A and B.
        majors: contiguous dimension of A and of B, ``"k"`` or ``"mn"``.
        tile: (m, n, k) elements.
        cluster: (m, n) CTAs.
        consumers: warpgroups, of 64 rows each.
        space: bytes of shared memory for the ring, which has as many stages as fit.
    """

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        majors: tuple[str, str],
        tile: tuple[int, int, int],
        cluster: tuple[int, int],
        consumers: int,
        space: int,
    ):
        tile_m, tile_n, tile_k = tile
        assert tile_m == 64 * consumers, "each consumer warpgroup owns 64 rows"
        assert tile_n % 8 == 0 and tile_n <= 256, "one WGMMA spans the tile's N"
        assert tile_k % mma.K_GROUP == 0
        self.dtype, self.majors, self.tile = dtype, majors, tile
        self.cluster, self.consumers = cluster, consumers
        self.stage_bytes = (tile_m + tile_n) * tile_k * dtype.width // 8
        self.stages = space // self.stage_bytes

    def layouts(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """Staged shared-memory layouts of A and B."""
        tile_m, tile_n, tile_k = self.tile
        return (
            smem.operand_layout(self.dtype, tile_m, tile_k, self.majors[0], self.stages),
            smem.operand_layout(self.dtype, tile_n, tile_k, self.majors[1], self.stages),
        )

    def sources(self, mA: cute.Tensor, mB: cute.Tensor) -> tuple[tma.Source, tma.Source]:
        """TMA sources of A [M, K] and B [N, K]; host code."""
        tile_m, tile_n, tile_k = self.tile
        sA_layout, sB_layout = self.layouts()
        # A is shared by the CTAs of a cluster row, B by those of a column.
        return (
            tma.load(mA, sA_layout, (tile_m, tile_k), self.cluster[1]),
            tma.load(mB, sB_layout, (tile_n, tile_k), self.cluster[0]),
        )

    def tiled_mma(self, warpgroups: int, n: int = 0) -> cute.TiledMma:
        """``warpgroups`` instructions along M, each ``n`` columns wide (0: the tile's)."""
        return mma.tiled_mma(self.dtype, *self.majors, warpgroups, n or self.tile[1])

    def ring(self, barriers: cute.Pointer, cluster: cute.Layout) -> PipelineTmaAsync:
        """Create the ring of stages; ``barriers``: 2 for each stage."""
        consumer_warps = 4 * self.consumers
        return pipeline.tma_ring(barriers, self.stages, self.stage_bytes, consumer_warps, cluster)

    @cute.jit
    def loads(
        self,
        sources: tuple[tma.Source, tma.Source],
        sA: cute.Tensor,
        sB: cute.Tensor,
        cluster: cute.Layout,
        rank: cute.Coord,
    ) -> Loads:
        """Partition A and B for the producer warp of CTA ``rank`` of the cluster."""
        a, b = sources
        tile_m, tile_n, tile_k = self.tile
        cluster_m, cluster_n = self.cluster
        # (tile_m, tile_k, tiles along M, blocks along K), and the same for B.
        gA = cute.local_tile(a.tensor, (tile_m, tile_k), (None, None))
        gB = cute.local_tile(b.tensor, (tile_n, tile_k), (None, None))
        tAsA, tAgA = tma.partition(a.atom, rank[1], cute.make_layout(cluster_n), sA, gA)
        tBsB, tBgB = tma.partition(b.atom, rank[0], cute.make_layout(cluster_m), sB, gB)
        mask_a = pipeline.multicast_mask(cluster, rank, 1, cluster_n)
        mask_b = pipeline.multicast_mask(cluster, rank, 0, cluster_m)
        return Loads(
            OperandLoads(a.atom, tAsA, tAgA, mask_a), OperandLoads(b.atom, tBsB, tBgB, mask_b)
        )

    @cute.jit
    def load(
        self,
        loads: Loads,
        ring: PipelineTmaAsync,
        state: PipelineState,
        m: cutlass.Int32,
        n: cutlass.Int32,
        blocks: cutlass.Int32,
    ) -> PipelineState:
        """Load the first ``blocks`` K blocks, ascending, of A's tile m and B's tile n."""
        for block in cutlass.range(blocks, unroll=1):
            ring.producer_acquire(state)
            full = ring.producer_get_barrier(state)
            for operand, tile in ((loads.a, m), (loads.b, n)):
                cute.copy(
                    operand.atom,
                    operand.tXgX[None, tile, block],
                    operand.tXsX[None, state.index],
                    tma_bar_ptr=full,
                    mcast_mask=operand.mask,
                )
            state.advance()
        return state

    def operands(self, sA: cute.Tensor, sB: cute.Tensor, consumer: cutlass.Int32) -> Operands:
        """WGMMA operands of consumer warpgroup ``consumer``."""
        tiled = self.tiled_mma(self.consumers)
        return Operands(tiled, *mma.operands(tiled, consumer * mma.WARPGROUP, sA, sB))

    def accumulator(self, operands: Operands) -> cute.Tensor:
        """Registers for 64 rows of the tile, in fp32."""
        shape = operands.tiled.get_slice(0).partition_shape_C(self.tile[:2])
        return cute.make_rmem_tensor(shape, cutlass.Float32)

    @cute.jit
    def chain(
        self,
        operands: Operands,
        acc: cute.Tensor,
        ring: PipelineTmaAsync,
        states: tuple[PipelineState, PipelineState],
        blocks: cutlass.Int32,
        tail_groups: cutlass.Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """acc += Σ_k A B over ``blocks`` whole K blocks and ``tail_groups`` groups of one more.

        k ascends.  A stage is released one block late, so that WGMMAs overlap.  ``states``: the
        ring's states of the next read and of the next release; returned as they are then.
        """
        tiled, tCrA, tCrB = operands.tiled, operands.tCrA, operands.tCrB
        read, release = states
        tiled.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        for block in cutlass.range(blocks, unroll=1):
            ring.consumer_wait(read)
            mma.add_block(tiled, acc, tCrA, tCrB, read.index)
            read.advance()
            if block > 0:
                cute.nvgpu.warpgroup.wait_group(1)
                ring.consumer_release(release)
                release.advance()
        cute.nvgpu.warpgroup.wait_group(0)
        if blocks > 0:
            ring.consumer_release(release)
            release.advance()
        if tail_groups > 0:
            ring.consumer_wait(read)
            mma.add_groups(tiled, acc, tCrA, tCrB, read.index, tail_groups)
            cute.nvgpu.warpgroup.wait_group(0)
            ring.consumer_release(release)
            read.advance()
            release.advance()
        return read, release
