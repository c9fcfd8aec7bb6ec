"""D[m, n] = round(acc0[m, n] + Σ_k A[m, k] B[n, k] + bias[n]), on SM90: TMA, WGMMA, persistent.

Layouts      A [M, K] and B [N, K], each row- or column-major (16-byte strides); D [M, N] row-major.
Order        ``chain``: one fp32 accumulator per output, K ascending in whole groups of 16, each
             group one ``wgmma.m64nNk16`` as wide as the tile, whose width shows in no bit
             (docs/gemm.md); bias added in fp32; one rounding, at the store.
             ``accumulate``: acc0 is read from D (fp32), which is then overwritten.
K tail       TMA fills zeros inside the last group of 16; groups wholly beyond K are skipped.
M, N tails   TMA clips the store; loads beyond M or N give zeros that no stored output sees.
Roles        warpgroup 0: one warp loads; warpgroups 1, 2: 64 rows of the tile each, and their
             own epilogue, which stores by TMA while the loads of the next tile are under way.
Limits       SM90a only; bf16 and fp16; M, N, K < 2^31.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ..compile import fake
from ..dsl import mma, pipeline, smem, tma
from ..schedulers.tiles import persistent_device as persistent
from .config import Config

CONSUMERS = 2
THREADS = (1 + CONSUMERS) * mma.WARPGROUP
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
#: Bytes of one row of an epilogue buffer: the widest swizzle.
EPILOGUE_ROW_BYTES = 128
EPILOGUE_STAGES = 2
#: The 232448 bytes of shared memory that a CTA may have, less 2 KiB for barriers and alignment.
SHARED_BYTES = 230400
#: Named barrier 0 is the CTA's; consumer w uses 1 + w for its epilogue.
EPILOGUE_BARRIER = 1


class GemmSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: Config):
        assert config.tile_m == 64 * CONSUMERS, "each consumer warpgroup owns 64 rows"
        assert config.tile_n % 8 == 0 and config.tile_n <= 256, "one WGMMA spans the tile's N"
        assert config.tile_k % mma.K_GROUP == 0
        self.config = config
        self.tile = (config.tile_m, config.tile_n, config.tile_k)
        self.cluster = (config.cluster_m, config.cluster_n)
        self.dtype = fake.DTYPES[config.dtype]
        self.accumulate = config.epilogue == "accumulate"
        self.d_dtype = cutlass.Float32 if self.accumulate else self.dtype
        self.epi_n = EPILOGUE_ROW_BYTES * 8 // self.d_dtype.width
        assert config.tile_n % self.epi_n == 0, "the epilogue stores whole parts"
        self.stage_bytes = (config.tile_m + config.tile_n) * config.tile_k * self.dtype.width // 8
        epilogue_bytes = CONSUMERS * EPILOGUE_STAGES * 64 * EPILOGUE_ROW_BYTES
        self.stages = (SHARED_BYTES - epilogue_bytes) // self.stage_bytes

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        mBias: cute.Tensor | None,
        max_clusters: cutlass.Int32,
        stream,
    ):
        tile_m, tile_n, tile_k = self.tile
        sA_layout, sB_layout, sD_layout = self.shared_layouts()
        # A is shared by the CTAs of a cluster row, B by those of a column.
        tma_a, gA = tma.load(mA, sA_layout, (tile_m, tile_k), self.cluster[1])
        tma_b, gB = tma.load(mB, sB_layout, (tile_n, tile_k), self.cluster[0])
        tma_d, gD = tma.store(mD, sD_layout, (64, self.epi_n))

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            sA: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sA_layout)], smem.ALIGN
            ]
            sB: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sB_layout)], smem.ALIGN
            ]
            sD: cute.struct.Align[
                cute.struct.MemRange[self.d_dtype, cute.cosize(sD_layout)], smem.ALIGN
            ]

        self.storage = Storage
        counts = persistent.tile_counts(mD.shape[0], mD.shape[1], (tile_m, tile_n), self.cluster)
        self.kernel(tma_a, gA, tma_b, gB, tma_d, gD, mD, mBias, counts).launch(
            grid=persistent.grid(counts, self.cluster, max_clusters),
            block=(THREADS, 1, 1),
            cluster=(*self.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        gA: cute.Tensor,
        tma_b: cute.CopyAtom,
        gB: cute.Tensor,
        tma_d: cute.CopyAtom,
        gD: cute.Tensor,
        mD: cute.Tensor,
        mBias: cute.Tensor | None,
        counts: cute.Tile,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (tma_a, tma_b, tma_d):
                cpasync.prefetch_descriptor(atom)

        storage = SmemAllocator().allocate(self.storage)
        sA_layout, sB_layout, sD_layout = self.shared_layouts()
        sA = storage.sA.get_tensor(sA_layout.outer, swizzle=sA_layout.inner)
        sB = storage.sB.get_tensor(sB_layout.outer, swizzle=sB_layout.inner)
        sD = storage.sD.get_tensor(sD_layout.outer, swizzle=sD_layout.inner)

        cluster = cute.make_layout((*self.cluster, 1))
        ring = pipeline.tma_ring(
            storage.barriers.data_ptr(), self.stages, self.stage_bytes, 4 * CONSUMERS, cluster
        )
        pipeline.announce_barriers(self.cluster)
        cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank = cluster.get_flat_coord(cta)
        pipeline.await_barriers(self.cluster)

        warpgroup = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.load(tma_a, gA, tma_b, gB, sA, sB, ring, cluster, rank, counts)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.multiply(
                tma_d, gD, mD, mBias, sA, sB, sD, ring, rank, counts, cute.size(gA, mode=[1])
            )

    @cute.jit
    def load(self, tma_a, gA, tma_b, gB, sA, sB, ring, cluster, rank, counts):
        """The producer warp: for each tile, every K block of A and B, in order."""
        tile_m, tile_n, tile_k = self.tile
        cluster_m, cluster_n = self.cluster
        # (tile_m, tile_k, tiles along M, blocks along K), and the same for B.
        gA = cute.local_tile(gA, (tile_m, tile_k), (None, None))
        gB = cute.local_tile(gB, (tile_n, tile_k), (None, None))
        tAsA, tAgA = tma.partition(tma_a, rank[1], cute.make_layout(cluster_n), sA, gA)
        tBsB, tBgB = tma.partition(tma_b, rank[0], cute.make_layout(cluster_m), sB, gB)
        mask_a = pipeline.multicast_mask(cluster, rank, 1, cluster_n)
        mask_b = pipeline.multicast_mask(cluster, rank, 0, cluster_m)
        blocks = cute.size(gA, mode=[3])

        state = pipeline.producer_state(self.stages)
        index, step = persistent.first_and_step()
        total = counts[0] * counts[1]
        while index < total:
            m, n = persistent.coordinates(
                index, counts, self.config.raster_group, rank, self.cluster
            )
            for block in cutlass.range(blocks, unroll=1):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                stage = state.index
                cute.copy(
                    tma_a,
                    tAgA[None, m, block],
                    tAsA[None, stage],
                    tma_bar_ptr=full,
                    mcast_mask=mask_a,
                )
                cute.copy(
                    tma_b,
                    tBgB[None, n, block],
                    tBsB[None, stage],
                    tma_bar_ptr=full,
                    mcast_mask=mask_b,
                )
                state.advance()
            index += step
        # A CTA must not exit while others of its cluster may still arrive on its barriers.
        ring.producer_tail(state)

    @cute.jit
    def multiply(self, tma_d, gD, mD, mBias, sA, sB, sD, ring, rank, counts, k):
        """A consumer warpgroup: for each tile, 64 rows of the chain, then their epilogue."""
        tile_m, tile_n, tile_k = self.tile
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP

        tiled = self.tiled_mma(CONSUMERS)
        # A slice of one warpgroup: its values' coordinates and its copies in the epilogue.
        one = self.tiled_mma(1).get_slice(lane)
        thr_mma = tiled.get_slice(consumer * mma.WARPGROUP)
        tCrA = tiled.make_fragment_A(thr_mma.partition_A(sA))
        tCrB = tiled.make_fragment_B(thr_mma.partition_B(sB))
        acc_shape = thr_mma.partition_shape_C((tile_m, tile_n))
        acc = cute.make_rmem_tensor(acc_shape, cutlass.Float32)

        blocks = k // tile_k
        tail_groups = cute.ceil_div(k - blocks * tile_k, mma.K_GROUP)
        read = pipeline.consumer_state(self.stages)
        release = pipeline.consumer_state(self.stages)
        buffer = cutlass.Int32(0)
        index, step = persistent.first_and_step()
        total = counts[0] * counts[1]
        while index < total:
            m, n = persistent.coordinates(
                index, counts, self.config.raster_group, rank, self.cluster
            )
            row0 = m * tile_m + consumer * 64
            column0 = n * tile_n
            if cutlass.const_expr(self.accumulate):
                self.start_from(acc, mD, row0, column0, one)
            else:
                acc.fill(0.0)
            read, release = self.chain(
                tiled, acc, tCrA, tCrB, ring, read, release, blocks, tail_groups
            )
            if cutlass.const_expr(mBias is not None):
                self.add_bias(acc, mBias, column0, one)
            buffer = self.store(
                acc, tma_d, gD, sD, consumer, lane, m * CONSUMERS + consumer, n, buffer
            )
            index += step
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def chain(self, tiled, acc, tCrA, tCrB, ring, read, release, blocks, tail_groups):
        """acc += Σ_k A B, k ascending; a stage is released one block late, so WGMMAs overlap."""
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

    @cute.jit
    def start_from(self, acc, mD, row0, column0, one):
        """acc = D's tile; elements outside D are read from its last row or column pair instead."""
        rows, columns = mD.shape[0], mD.shape[1]
        last_pair = (columns - 1) // 2 * 2
        tDcD = one.partition_C(cute.make_identity_tensor((64, self.config.tile_n)))
        for pair in cutlass.range_constexpr(cute.size(acc) // 2):
            at = tDcD[2 * pair]
            row = cutlass.min(row0 + at[0], rows - 1)
            column = cutlass.min(column0 + at[1], last_pair)
            offset = cutlass.Int64(row) * mD.stride[0] + column
            # Rows are 16-byte aligned and the column is even: one 8-byte load.
            source = cute.make_ptr(
                cutlass.Float32,
                mD.iterator.toint() + offset * 4,
                cute.AddressSpace.gmem,
                assumed_align=8,
            )
            two = cute.make_tensor(source, cute.make_layout(2)).load()
            acc[2 * pair] = two[0]
            acc[2 * pair + 1] = two[1]

    @cute.jit
    def add_bias(self, acc, mBias, column0, one):
        """acc[m, n] += bias[n], in fp32; columns outside are clipped by the store."""
        tDcD = one.partition_C(cute.make_identity_tensor((64, self.config.tile_n)))
        last = mBias.shape[0] - 1
        # Values 4 i + {0, 1} and 4 i + {2, 3} of a thread are two rows of the same two columns.
        for four in cutlass.range_constexpr(cute.size(acc) // 4):
            for side in cutlass.range_constexpr(2):
                column = cutlass.min(column0 + tDcD[4 * four + side][1], last)
                bias = mBias[column].to(cutlass.Float32)
                acc[4 * four + side] += bias
                acc[4 * four + side + 2] += bias

    @cute.jit
    def store(self, acc, tma_d, gD, sD, consumer, lane, m, n, buffer):
        """D = round(acc): 64 x epi_n at a time through this warpgroup's own buffers."""
        gD_tile = cute.local_tile(gD, (64, self.config.tile_n), (m, n))
        gD_parts = cute.zipped_divide(gD_tile, (64, self.epi_n))
        tDsD, tDgD = cpasync.tma_partition(
            tma_d, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), gD_parts
        )
        # An instruction of epi_n columns lays its values out as a slice of the wide one's.
        part_mma = self.tiled_mma(1, self.epi_n)
        tiled_copy = cute.make_tiled_copy_C(self.shared_store_atom(), part_mma)
        copy = tiled_copy.get_slice(lane)
        tRsD = copy.partition_D(sD)
        shape = part_mma.get_slice(lane).partition_shape_C((64, self.epi_n))
        rPart = cute.make_rmem_tensor(shape, cutlass.Float32)
        rD = cute.make_rmem_tensor(shape, self.d_dtype)
        tRrD = copy.retile(rD)
        parts = self.config.tile_n // self.epi_n
        values = cute.size(acc) // parts
        for part in cutlass.range_constexpr(parts):
            slot = consumer * EPILOGUE_STAGES + buffer
            # The store that used this buffer last must have read it.
            if lane == 0:
                cute.arch.cp_async_bulk_wait_group(EPILOGUE_STAGES - 1, read=True)
            self.sync(consumer)
            for i in cutlass.range_constexpr(values):
                rPart[i] = acc[part * values + i]
            rD.store(rPart.load().to(self.d_dtype))
            cute.copy(tiled_copy, tRrD, tRsD[None, None, None, slot])
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync(consumer)
            if lane == 0:
                cute.copy(tma_d, tDsD[None, slot], tDgD[None, part])
                cute.arch.cp_async_bulk_commit_group()
            buffer = (buffer + 1) % EPILOGUE_STAGES
        return buffer

    def tiled_mma(self, warpgroups: int, n: int = 0) -> cute.TiledMma:
        """``warpgroups`` instructions stacked along M, each ``n`` columns wide (the tile's)."""
        config = self.config
        n = n or config.tile_n
        return mma.tiled_mma(self.dtype, config.a_major, config.b_major, warpgroups, n)

    def shared_layouts(self):
        """The staged layouts of A and B, and of the consumers' epilogue buffers."""
        tile_m, tile_n, tile_k = self.tile
        config = self.config
        buffers = CONSUMERS * EPILOGUE_STAGES
        return (
            smem.operand_layout(self.dtype, tile_m, tile_k, config.a_major, self.stages),
            smem.operand_layout(self.dtype, tile_n, tile_k, config.b_major, self.stages),
            smem.operand_layout(self.d_dtype, 64, self.epi_n, "k", buffers),
        )

    def shared_store_atom(self) -> cute.CopyAtom:
        """stmatrix for 16-bit outputs, 8-byte stores for fp32."""
        return hopper_helpers.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.d_dtype, cutlass.Float32)

    def sync(self, consumer):
        """The 128 threads of one consumer warpgroup meet."""
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + consumer, number_of_threads=mma.WARPGROUP)


def build(config: Config, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    m, n, k = fake.size(), fake.size(), fake.size()
    accumulate = config.epilogue == "accumulate"
    return compile(
        GemmSm90(config),
        fake.matrix(config.dtype, m, k, config.a_major),
        fake.matrix(config.dtype, n, k, config.b_major),
        fake.matrix("fp32" if accumulate else config.dtype, m, n, "k"),
        fake.vector(config.dtype, n) if config.epilogue == "bias" else None,
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
