"""The mainloop of a product: acc[m, n] += Σ_k A[m, k] B[n, k] over a range of K, in one order.

A ring of stages, each one K block of A and of B; a producer warp that loads them by TMA, shared
over a cluster; consumer warpgroups that add them, K ascending in whole groups of 16.  Whoever uses
it owns the rest: which tile is next, what the accumulator starts from, and the epilogue.

K tail       TMA fills zeros inside the last group of 16; groups wholly beyond K are skipped.
M, N tails   loads beyond M or N give zeros, in rows and columns that no output has.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from . import mma, pipeline, smem, tma


@dataclass(frozen=True)
class Loads:
    """What a producer copies: (shared, global) views of A and B by TMA box, and who receives them.

    a, b: (atom, [box, stage] in shared memory, [box, tile, K block] in global, multicast mask)
    """

    a: tuple
    b: tuple

    @property
    def blocks(self):
        """K blocks in all."""
        return cute.size(self.a[2], mode=[2])


@dataclass(frozen=True)
class Operands:
    """What a consumer warpgroup multiplies: the instruction, and A and B in shared memory."""

    tiled: cute.TiledMma
    tCrA: cute.Tensor
    tCrB: cute.Tensor


class Mainloop:
    """One tile shape, static: ``tile`` (m, n, k) in ``stages`` stages, on a cluster (m, n) of CTAs.

    ``majors``: of A and B, ``"k"`` or ``"mn"``.  ``consumers`` warpgroups have 64 rows each.
    """

    def __init__(self, dtype, majors: tuple[str, str], tile, cluster, consumers: int, space: int):
        tile_m, tile_n, tile_k = tile
        assert tile_m == 64 * consumers, "each consumer warpgroup owns 64 rows"
        assert tile_n % 8 == 0 and tile_n <= 256, "one WGMMA spans the tile's N"
        assert tile_k % mma.K_GROUP == 0
        self.dtype, self.majors, self.tile = dtype, majors, tile
        self.cluster, self.consumers = cluster, consumers
        self.stage_bytes = (tile_m + tile_n) * tile_k * dtype.width // 8
        #: As many as fit into ``space`` bytes of shared memory.
        self.stages = space // self.stage_bytes

    def layouts(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """Of A and B in shared memory, with their stages."""
        tile_m, tile_n, tile_k = self.tile
        return (
            smem.operand_layout(self.dtype, tile_m, tile_k, self.majors[0], self.stages),
            smem.operand_layout(self.dtype, tile_n, tile_k, self.majors[1], self.stages),
        )

    def sources(self, mA: cute.Tensor, mB: cute.Tensor) -> tuple[tma.Source, tma.Source]:
        """A [M, K] and B [N, K] as TMA loads them; on the host."""
        tile_m, tile_n, tile_k = self.tile
        sA_layout, sB_layout = self.layouts()
        # A is shared by the CTAs of a cluster row, B by those of a column.
        return (
            tma.load(mA, sA_layout, (tile_m, tile_k), self.cluster[1]),
            tma.load(mB, sB_layout, (tile_n, tile_k), self.cluster[0]),
        )

    def tiled_mma(self, warpgroups: int, n: int = 0) -> cute.TiledMma:
        """``warpgroups`` instructions stacked along M, each ``n`` columns wide (the tile's)."""
        return mma.tiled_mma(self.dtype, *self.majors, warpgroups, n or self.tile[1])

    def ring(self, barriers: cute.Pointer, cluster: cute.Layout):
        """The ring of stages; ``barriers``: 2 for each stage."""
        consumer_warps = 4 * self.consumers
        return pipeline.tma_ring(barriers, self.stages, self.stage_bytes, consumer_warps, cluster)

    @cute.jit
    def loads(self, sources, sA, sB, cluster, rank, origin=None) -> Loads:
        """The producer's views, on CTA ``rank`` of its cluster.

        ``origin``: (row of A, row of B, k) from where tiles and K blocks count; None: 0, 0, 0.
        """
        a, b = sources
        tile_m, tile_n, tile_k = self.tile
        cluster_m, cluster_n = self.cluster
        # (tile_m, tile_k, tiles along M, blocks along K), and the same for B.
        mA, mB = a.tensor, b.tensor
        if cutlass.const_expr(origin is not None):
            mA = cute.domain_offset((origin[0], origin[2]), mA)
            mB = cute.domain_offset((origin[1], origin[2]), mB)
        gA = cute.local_tile(mA, (tile_m, tile_k), (None, None))
        gB = cute.local_tile(mB, (tile_n, tile_k), (None, None))
        tAsA, tAgA = tma.partition(a.atom, rank[1], cute.make_layout(cluster_n), sA, gA)
        tBsB, tBgB = tma.partition(b.atom, rank[0], cute.make_layout(cluster_m), sB, gB)
        mask_a = pipeline.multicast_mask(cluster, rank, 1, cluster_n)
        mask_b = pipeline.multicast_mask(cluster, rank, 0, cluster_m)
        return Loads((a.atom, tAsA, tAgA, mask_a), (b.atom, tBsB, tBgB, mask_b))

    @cute.jit
    def load(self, loads, ring, state, m, n, blocks):
        """``blocks`` (first, end) along K, of tile m of A's rows and tile n of B's, in order."""
        first, end = blocks
        for block in cutlass.range(first, end, unroll=1):
            ring.producer_acquire(state)
            full = ring.producer_get_barrier(state)
            for (atom, shared, source, mask), tile in ((loads.a, m), (loads.b, n)):
                cute.copy(
                    atom,
                    source[None, tile, block],
                    shared[None, state.index],
                    tma_bar_ptr=full,
                    mcast_mask=mask,
                )
            state.advance()
        return state

    def operands(self, sA, sB, consumer) -> Operands:
        """Of consumer warpgroup ``consumer``."""
        tiled = self.tiled_mma(self.consumers)
        return Operands(tiled, *mma.operands(tiled, consumer * mma.WARPGROUP, sA, sB))

    def accumulator(self, operands: Operands) -> cute.Tensor:
        """64 rows of the tile, in registers, in fp32."""
        shape = operands.tiled.get_slice(0).partition_shape_C(self.tile[:2])
        return cute.make_rmem_tensor(shape, cutlass.Float32)

    @cute.jit
    def chain(self, operands, acc, ring, states, blocks, tail_groups):
        """acc += Σ_k A B over ``blocks`` whole K blocks and ``tail_groups`` groups of one more.

        k ascends.  A stage is released one block late, so that WGMMAs overlap.  ``states``: where
        the next stage is read and the next one released; returned as they are then.
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
