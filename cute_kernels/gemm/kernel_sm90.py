"""D[m, n] = round(acc0[m, n] + Σ_k A[m, k] B[n, k] + bias[n]), on SM90: TMA, WGMMA, persistent.

Layouts      A [M, K] and B [N, K], each row- or column-major (16-byte strides); D [M, N] row-major.
Order        ``chain``: one fp32 accumulator per output, K ascending in whole groups of 16, each
             group one ``wgmma.m64nNk16`` as wide as the tile, whose width shows in no bit
             (docs/gemm.md); bias added in fp32; one rounding, at the store.
             ``accumulate``: acc0 is read from D (fp32), which is then overwritten.
             ``fp32``: D is fp32, and no bias: the chain as it is.
             ``tree``: the leaves of K are added in fp32, ascending.
K tail       TMA fills zeros inside the last group of 16; groups wholly beyond K are skipped.
M, N tails   TMA clips the store; loads beyond M or N give zeros, in no stored output.
Roles        warpgroup 0: one warp loads; warpgroups 1, 2: 64 rows of the tile each, and their
             own epilogue, which stores by TMA while the loads of the next tile are in flight.
Limits       SM90a only; bf16 and fp16; M, N, K < 2^31.
Measured     docs/status.md.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from ..compile import fake
from ..dsl import copy, mma, pipeline, tma
from ..dsl.mainloop import Operands
from ..dsl.product import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    THREADS,
    Frame,
    SharedTiles,
)
from ..schedulers.tiles import leaves
from ..schedulers.tiles import persistent_device as persistent
from .config import Config


class GemmSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: Config):
        self.config = config
        self.tree = config.order == "tree"
        self.cluster = (config.cluster_m, config.cluster_n)
        self.dtype = fake.DTYPES[config.dtype]
        self.accumulate = config.epilogue == "accumulate"
        assert not (self.tree and self.accumulate), "a tree does not start from what is stored"
        self.d_dtype = cutlass.Float32 if config.stores_fp32 else self.dtype
        majors = config.a_major, config.b_major
        tile = config.tile_m, config.tile_n, config.tile_k
        self.frame = Frame(self.dtype, self.d_dtype, majors, tile, self.cluster)
        self.mainloop, self.epilogue = self.frame.mainloop, self.frame.epilogue

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        mBias: cute.Tensor | None,
        max_clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        a, b = self.mainloop.sources(mA, mB)
        d = self.epilogue.target(mD)
        self.storage = self.frame.storage()
        counts = persistent.tile_counts(
            mD.shape[0], mD.shape[1], self.mainloop.tile[:2], self.cluster
        )
        self.kernel(a, b, d, mD, mBias, counts).launch(
            grid=persistent.grid(counts, self.cluster, max_clusters),
            block=(THREADS, 1, 1),
            cluster=(*self.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        a: tma.Source,
        b: tma.Source,
        d: tma.Source,
        mD: cute.Tensor,
        mBias: cute.Tensor | None,
        counts: cute.Shape,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.frame.prefetch(a, b, d)
        storage = SmemAllocator().allocate(self.storage)
        smem_tiles = self.frame.tiles(storage)
        cluster = cute.make_layout((*self.cluster, 1))
        ring = self.frame.make_ring(storage, cluster)
        cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank = cluster.get_flat_coord(cta)
        pipeline.await_barriers(self.cluster)

        warpgroup = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.load(a, b, smem_tiles, cluster, ring, rank, counts)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            k = cute.size(a.tensor, mode=[1])
            self.multiply(smem_tiles, d, mD, mBias, ring, rank, counts, k)

    @cute.jit
    def load(
        self,
        a: tma.Source,
        b: tma.Source,
        smem_tiles: SharedTiles,
        cluster: cute.Layout,
        ring: PipelineTmaAsync,
        rank: cute.Coord,
        counts: cute.Shape,
    ):
        """Producer warp: load the K blocks of A and B of each tile, ascending, leaf by leaf."""
        sA, sB = smem_tiles.sA, smem_tiles.sB
        loads = self.mainloop.loads((a, b), sA, sB, cluster, rank)
        k = cute.size(a.tensor, mode=[1])
        last = [loads.a.tiles - 1, loads.b.tiles - 1]
        state = pipeline.producer_state(self.mainloop.stages)
        index, step = persistent.first_and_step()
        tiles = counts[0] * counts[1]
        while index < tiles:
            m, n = persistent.coordinates(
                index, counts, self.config.raster_group, rank, self.cluster
            )
            # A tile wholly outside loads the last one: zeros that TMA fills in cost more than data.
            m, n = cutlass.min(m, last[0]), cutlass.min(n, last[1])
            if cutlass.const_expr(self.tree):
                for leaf in cutlass.range(leaves.count(k), unroll=1):
                    start, size = self.span(leaf, k)
                    leaf_loads = self.mainloop.loads((a, b), sA, sB, cluster, rank, (0, 0, start))
                    blocks = cute.ceil_div(size, self.config.tile_k)
                    state = self.mainloop.load(leaf_loads, ring, state, m, n, (0, blocks))
            else:
                state = self.mainloop.load(loads, ring, state, m, n, (0, loads.blocks))
            index += step
        # A CTA must not exit while others of its cluster may still arrive on its barriers.
        ring.producer_tail(state)

    @cute.jit
    def multiply(
        self,
        smem_tiles: SharedTiles,
        d: tma.Source,
        mD: cute.Tensor,
        mBias: cute.Tensor | None,
        ring: PipelineTmaAsync,
        rank: cute.Coord,
        counts: cute.Shape,
        k: cutlass.Int32,
    ):
        """Consumer warpgroup: compute and store 64 rows of each tile."""
        sA, sB, sD = smem_tiles.sA, smem_tiles.sB, smem_tiles.sD
        tile_m, tile_n, tile_k = self.mainloop.tile
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP

        # The slice of one warpgroup gives the coordinates of this thread's values.
        thr_mma = self.mainloop.tiled_mma(1).get_slice(lane)
        operands = self.mainloop.operands(sA, sB, consumer)
        acc = self.mainloop.accumulator(operands)
        total = acc
        if cutlass.const_expr(self.tree):
            total = self.mainloop.accumulator(operands)

        blocks = k // tile_k
        tail_groups = cute.ceil_div(k - blocks * tile_k, mma.K_GROUP)
        states = tuple(pipeline.consumer_state(self.mainloop.stages) for _ in range(2))
        buffer = cutlass.Int32(0)
        index, step = persistent.first_and_step()
        tiles = counts[0] * counts[1]
        while index < tiles:
            m, n = persistent.coordinates(
                index, counts, self.config.raster_group, rank, self.cluster
            )
            row0 = m * tile_m + consumer * 64
            column0 = n * tile_n
            if cutlass.const_expr(self.tree):
                # -0 is neutral: +0 would change the sign of a leaf of -0.
                total.fill(-0.0)
                states = self.add_leaves(operands, acc, total, ring, states, k)
            else:
                # acc = acc0 + Σ_k A[m, k] B[n, k]
                if cutlass.const_expr(self.accumulate):
                    self.start_from(acc, mD, row0, column0, thr_mma)
                else:
                    acc.fill(0.0)
                states = self.mainloop.chain(operands, acc, ring, states, blocks, tail_groups)
            # D = round(acc + bias)
            if cutlass.const_expr(mBias is not None):
                self.add_bias(total, mBias, column0, thr_mma)
            coord = (m * CONSUMERS + consumer, n)
            buffer = self.epilogue.store(total, d, sD, consumer, lane, coord, buffer)
            index += step
        self.epilogue.finish(lane)

    @cute.jit
    def add_leaves(
        self,
        operands: Operands,
        acc: cute.Tensor,
        total: cute.Tensor,
        ring: PipelineTmaAsync,
        states: tuple[PipelineState, PipelineState],
        k: cutlass.Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """total = ((total + leaf 0) + leaf 1) + ..., each leaf a chain from zero in ``acc``."""
        tile_k = self.config.tile_k
        for leaf in cutlass.range(leaves.count(k), unroll=1):
            _, size = self.span(leaf, k)
            blocks = size // tile_k
            tail_groups = cute.ceil_div(size - blocks * tile_k, mma.K_GROUP)
            acc.fill(0.0)
            states = self.mainloop.chain(operands, acc, ring, states, blocks, tail_groups)
            total.store(total.load() + acc.load())
        return states

    def span(self, leaf: cutlass.Int32, k: cutlass.Int32) -> tuple[cutlass.Int32, cutlass.Int32]:
        """(first k, number of elements) of a leaf."""
        return leaf * leaves.length(k), leaves.size(leaf, k, cutlass.min, cutlass.max)

    @cute.jit
    def start_from(
        self,
        acc: cute.Tensor,
        mD: cute.Tensor,
        row0: cutlass.Int32,
        column0: cutlass.Int32,
        thr_mma: cute.ThrMma,
    ):
        """acc[m, n] = D[m, n] (fp32); elements outside read its last row or column pair instead."""
        rows, columns = mD.shape[0], mD.shape[1]
        last_pair = (columns - 1) // 2 * 2
        tCcD = thr_mma.partition_C(cute.make_identity_tensor((64, self.config.tile_n)))
        for pair in cutlass.range_constexpr(cute.size(acc) // 2):
            coord = tCcD[2 * pair]
            row = cutlass.min(row0 + coord[0], rows - 1)
            column = cutlass.min(column0 + coord[1], last_pair)
            # Rows are 16-byte aligned and the column is even: one 8-byte load.
            values = copy.vector(mD, (row, column), 2).load()
            acc[2 * pair] = values[0]
            acc[2 * pair + 1] = values[1]

    @cute.jit
    def add_bias(
        self,
        acc: cute.Tensor,
        mBias: cute.Tensor,
        column0: cutlass.Int32,
        thr_mma: cute.ThrMma,
    ):
        """acc[m, n] += bias[n], in fp32; the store clips columns outside."""
        tCcD = thr_mma.partition_C(cute.make_identity_tensor((64, self.config.tile_n)))
        last = mBias.shape[0] - 1
        # Values 4 i + {0, 1} and 4 i + {2, 3} of a thread are two rows of the same two columns.
        for four in cutlass.range_constexpr(cute.size(acc) // 4):
            for side in cutlass.range_constexpr(2):
                column = cutlass.min(column0 + tCcD[4 * four + side][1], last)
                bias = mBias[column].to(cutlass.Float32)
                acc[4 * four + side] += bias
                acc[4 * four + side + 2] += bias


def build(config: Config, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    m, n, k = fake.size(), fake.size(), fake.size()
    bias = fake.vector(config.dtype, n) if config.epilogue == "bias" else None
    return compile(
        GemmSm90(config),
        fake.matrix(config.dtype, m, k, config.a_major),
        fake.matrix(config.dtype, n, k, config.b_major),
        fake.matrix("fp32" if config.stores_fp32 else config.dtype, m, n, "k"),
        bias,
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
