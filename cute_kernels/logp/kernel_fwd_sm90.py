"""States of tokens over runs of the vocabulary, on SM90: TMA and WGMMA.

Logits stay in registers, but for those of the first tokens if the configuration keeps them.

    z[t, v] = Σ_d H[t, d] W[v, d] + bias[v]      y = z scale[t]      states: logp/exact.py

Layouts      H [T, D] row-major, W [V, D] row-major (16-byte strides); states int64
             [P, T, C], C = 6, or 10 with an entropy.  Kept sums over D: fp32 [T', V'], T' <= T, V'
             a multiple of 4 that is not below V; columns from V on are 0.
Order        A logit is the chain (or tree) of gemm's kernel_sm90: the same instructions in the
             same order.  16 entries are added in fp32 in the order of logp/config.py; their sums
             are added in integers, so that bits do not depend on runs, tiles or CTAs.
Work         A work item is 256 tokens (a cluster's two CTAs, which share the loads of W) by a run
             of tiles of 256 entries; clusters take items run by run, so that items in flight read
             the same W.  At the end of an item a row's four lanes are added, and it is stored.
K tail       TMA fills zeros inside the last group of 16; groups wholly beyond D are skipped.
T, V tails   loads beyond give zeros; columns beyond the vocabulary become -inf; rows beyond T are
             not stored.
Roles        as gemm's kernel_sm90: a producer warp, two consumer warpgroups of 64 tokens each.
Limits       SM90a only; bf16 and fp16; D < 2^31, V <= 2^19.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineTmaAsync

from ..compile import fake
from ..dsl import mma, pipeline, smem, tma
from ..dsl.mainloop import Mainloop
from ..dsl.product import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    SHARED_BYTES,
    THREADS,
)
from .config import Config, columns_of_state
from .device import exact, tile, units


@dataclass(frozen=True)
class TokenTensors:
    """Global tensors of the consumers.

    mBias:   [V], or None.
    mTarget: Int64 [T].
    mScale:  fp32 [T].
    mStates: Int64 [P, T, C], the result.
    mSums:   fp32 [T', V'], sums over D of the first T' tokens, a second result; or None.
    """

    mBias: cute.Tensor | None
    mTarget: cute.Tensor
    mScale: cute.Tensor
    mStates: cute.Tensor
    mSums: cute.Tensor | None


class LogpForwardSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.cluster = (config.cluster_m, 1)
        shape = (config.tile_m, config.tile_n, config.tile_k)
        majors = ("k", "k")
        self.mainloop = Mainloop(self.dtype, majors, shape, self.cluster, CONSUMERS, SHARED_BYTES)
        self.walk = tile.Walk(self.mainloop, config.order == "tree")

    @cute.jit
    def __call__(
        self,
        mH: cute.Tensor,
        mW: cute.Tensor,
        mBias: cute.Tensor | None,
        mTarget: cute.Tensor,
        mScale: cute.Tensor,
        mStates: cute.Tensor,
        mSums: cute.Tensor | None,
        start: cutlass.Int32,
        vocab: cutlass.Int32,
        softcap: cutlass.Float32,
        max_clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        sH_layout, sW_layout = self.mainloop.layouts()
        h, w = self.mainloop.sources(mH, mW)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.mainloop.stages]
            sH: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sH_layout)], smem.ALIGN
            ]
            sW: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sW_layout)], smem.ALIGN
            ]

        self.storage = Storage
        groups = cute.ceil_div(mH.shape[0], self.config.tile_m * self.config.cluster_m)
        items = groups * mStates.shape[0]
        tokens = TokenTensors(mBias, mTarget, mScale, mStates, mSums)
        head = tile.HeadSlice(start, vocab, softcap)
        self.kernel(h, w, tokens, head, groups).launch(
            grid=(*self.cluster, cutlass.min(items, max_clusters)),
            block=(THREADS, 1, 1),
            cluster=(*self.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        h: tma.Source,
        w: tma.Source,
        tokens: TokenTensors,
        head: tile.HeadSlice,
        groups: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for source in (h, w):
                cpasync.prefetch_descriptor(source.atom)

        storage = SmemAllocator().allocate(self.storage)
        sH_layout, sW_layout = self.mainloop.layouts()
        sH = storage.sH.get_tensor(sH_layout.outer, swizzle=sH_layout.inner)
        sW = storage.sW.get_tensor(sW_layout.outer, swizzle=sW_layout.inner)

        cluster = cute.make_layout((*self.cluster, 1))
        ring = self.mainloop.ring(storage.barriers.data_ptr(), cluster)
        pipeline.announce_barriers(self.cluster)
        rank = cluster.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        pipeline.await_barriers(self.cluster)

        warpgroup = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                runs = tokens.mStates.shape[0]
                self.load((h, w), (sH, sW), cluster, ring, rank, groups, runs)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.multiply((h, w), (sH, sW), tokens, head, ring, rank, groups)

    @cute.jit
    def load(
        self,
        sources: tuple[tma.Source, tma.Source],
        shared: tuple[cute.Tensor, cute.Tensor],
        cluster: cute.Layout,
        ring: PipelineTmaAsync,
        rank: cute.Coord,
        groups: cutlass.Int32,
        runs: cutlass.Int32,
    ):
        """Producer warp: for each item, load every K block of its tokens and of each tile of W."""
        state = pipeline.producer_state(self.mainloop.stages)
        index, step = self.first_and_step()
        tiles = cute.ceil_div(cute.size(sources[1].tensor, mode=[0]), self.config.tile_n)
        # A group of tokens may end inside the cluster: a tile wholly outside loads the last one.
        last = cute.ceil_div(cute.size(sources[0].tensor, mode=[0]), self.config.tile_m) - 1
        while index < groups * runs:
            m = cutlass.min(index % groups * self.config.cluster_m + rank[0], last)
            first, end = self.run(index // groups, tiles, runs)
            for n in cutlass.range(first, end, unroll=1):
                state = self.walk.load(sources, shared, cluster, rank, ring, state, (m, n))
            index += step
        # A CTA must not exit while others of its cluster may still arrive on its barriers.
        ring.producer_tail(state)

    @cute.jit
    def multiply(
        self,
        sources: tuple[tma.Source, tma.Source],
        shared: tuple[cute.Tensor, cute.Tensor],
        tokens: TokenTensors,
        head: tile.HeadSlice,
        ring: PipelineTmaAsync,
        rank: cute.Coord,
        groups: cutlass.Int32,
    ):
        """Consumer warpgroup: for each item, the states of 64 tokens over its run of W."""
        h, w = sources
        k, rows_of_w = cute.size(h.tensor, mode=[1]), cute.size(w.tensor, mode=[0])
        runs, count = tokens.mStates.shape[0], tokens.mStates.shape[1]
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP
        thr_mma = self.mainloop.tiled_mma(1).get_slice(lane)
        cLogits = thr_mma.partition_C(cute.make_identity_tensor((64, self.config.tile_n)))
        operands = self.mainloop.operands(*shared, consumer)
        accumulators = self.walk.accumulators(operands)
        rLogits = accumulators.total
        state = exact.make_state(units.ROWS, self.config.entropy)
        rScale = cute.make_rmem_tensor(units.ROWS, cutlass.Float32)
        rTarget = cute.make_rmem_tensor(units.ROWS, cutlass.Int32)

        states = self.walk.start()
        tiles = cute.ceil_div(rows_of_w, self.config.tile_n)
        # Number of columns of this head that are in the vocabulary.
        valid = cutlass.min(rows_of_w, head.vocab - head.start)
        index, step = self.first_and_step()
        while index < groups * runs:
            row0 = (index % groups * self.config.cluster_m + rank[0]) * self.config.tile_m
            row0 += consumer * 64
            for half in cutlass.range_constexpr(units.ROWS):
                row = cutlass.min(row0 + cLogits[2 * half][0], count - 1)
                rScale[half] = tokens.mScale[row]
                rTarget[half] = tokens.mTarget[row].to(cutlass.Int32) - head.start
            exact.clear(state)
            first, end = self.run(index // groups, tiles, runs)
            for n in cutlass.range(first, end, unroll=1):
                column0 = n * self.config.tile_n
                # z[t, v] = Σ_d H[t, d] W[v, d]
                states = self.walk.multiply(operands, accumulators, ring, states, k)
                if cutlass.const_expr(self.config.keep):
                    tile.keep(rLogits, tokens.mSums, cLogits, row0, column0)
                # z = softcap tanh((z + bias) / softcap); -inf beyond the vocabulary
                tile.finish_logits(
                    rLogits, tokens.mBias, cLogits, column0, head.softcap, self.config.softcap
                )
                tile.choose(rLogits, cLogits, rTarget, column0, state.chosen)
                tile.mask(rLogits, cLogits, column0, valid)
                # state += Σ_v 2^y, of 16 entries at a time
                units.add_tile(rLogits, state, rScale)
            for half in cutlass.range_constexpr(units.ROWS):
                exact.add_lane(state, half, 1)
                exact.add_lane(state, half, 2)
                row = row0 + cLogits[2 * half][0]
                if (lane % units.QUAD == 0) & (row < count):
                    exact.store(state, half, tile.row_of(tokens.mStates, index // groups, row))
            index += step

    def first_and_step(self) -> tuple[cutlass.Int32, cutlass.Int32]:
        """First item of the calling cluster, and the step to its next one."""
        _, _, cluster = cute.arch.block_idx()
        _, _, clusters = cute.arch.grid_dim()
        return cluster, clusters

    def run(
        self, number: cutlass.Int32, tiles: cutlass.Int32, runs: cutlass.Int32
    ) -> tuple[cutlass.Int32, cutlass.Int32]:
        """(first, end): the tiles of W of a run."""
        return number * tiles // runs, (number + 1) * tiles // runs


def build(config: Config, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    t, v, d, runs = fake.size(), fake.size(), fake.size(), fake.size()
    return compile(
        LogpForwardSm90(config),
        fake.matrix(config.dtype, t, d, "k"),
        fake.matrix(config.dtype, v, d, "k"),
        fake.vector(config.dtype, v) if config.bias else None,
        fake.compact(cutlass.Int64, (t,), 8),
        fake.vector("fp32", t),
        fake.compact(cutlass.Int64, (runs, t, columns_of_state(config.entropy)), 8),
        fake.matrix("fp32", fake.size(), fake.size(4), "k") if config.keep else None,
        cutlass.Int32(0),
        cutlass.Int32(1),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
