"""G = dlogits of a block of the vocabulary, on SM90: the logits are recomputed, and not stored.

    z, y as in kernel_fwd_sm90      p[t, v] = 2^(y - lse2[t])
    G[t, v] = (1[v = target[t]] - p) a[t] - p (ln p + H[t]) b[t]     times dz/d(uncapped z)

with a = dlogp / τ, b = dentropy / τ.

Layouts      H [T, D], W [V', D] and G [T, V'] row-major, strides of 16 bytes; G of the dtype of H.
Order        z: as kernel_fwd_sm90; everything else is element by element, rounded once at the end.
Masks        a row without a target, and a column that is not of the vocabulary, are exactly 0.
K tail       TMA fills zeros inside the last group of 16; groups wholly beyond D are skipped.
T, V tails   loads beyond give zeros; TMA clips the store.
Roles        as gemm's kernel_sm90: a producer warp, two consumer warpgroups of 64 tokens each.
Limits       SM90a only; bf16 and fp16; T, D < 2^31, V <= 2^19.
Measured     docs/status.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineTmaAsync

from ..compile import fake
from ..dsl import mma, pipeline, tma
from ..dsl.product import CONSUMER_REGISTERS, CONSUMERS, PRODUCER_REGISTERS, THREADS, Frame
from ..schedulers.tiles import persistent_device as persistent
from .config import Config
from .device import gradient, tile, units

#: Rows of tiles in a raster group: tiles in flight share W in the L2 cache.
RASTER_GROUP = 8


class LogpGradientSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.cluster = (config.cluster_m, 1)
        shape = config.tile_m, config.tile_n, config.tile_k
        self.frame = Frame(self.dtype, self.dtype, ("k", "k"), shape, self.cluster)
        self.mainloop, self.epilogue = self.frame.mainloop, self.frame.epilogue
        self.walk = tile.Walk(self.mainloop, config.order == "tree")

    @cute.jit
    def __call__(
        self,
        mH: cute.Tensor,
        mW: cute.Tensor,
        mBias: cute.Tensor | None,
        mTarget: cute.Tensor,
        mScale: cute.Tensor,
        mLse2: cute.Tensor,
        mDlogp: cute.Tensor,
        mDentropy: cute.Tensor | None,
        mEntropy: cute.Tensor | None,
        mG: cute.Tensor,
        start: cutlass.Int32,
        vocab: cutlass.Int32,
        softcap: cutlass.Float32,
        max_clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        h, w = self.mainloop.sources(mH, mW)
        g = self.epilogue.target(mG)
        self.storage = self.frame.storage()
        counts = persistent.tile_counts(
            mG.shape[0], mG.shape[1], self.mainloop.tile[:2], self.cluster
        )
        tokens = gradient.TokenInputs(mTarget, mScale, mLse2, mDlogp, mDentropy, mEntropy)
        head = tile.HeadSlice(start, vocab, softcap)
        self.kernel(h, w, g, mBias, tokens, head, counts).launch(
            grid=persistent.grid(counts, self.cluster, max_clusters),
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
        g: tma.Source,
        mBias: cute.Tensor | None,
        tokens: gradient.TokenInputs,
        head: tile.HeadSlice,
        counts: cute.Tile,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.frame.prefetch(h, w, g)
        storage = SmemAllocator().allocate(self.storage)
        shared = self.frame.tiles(storage)
        sH, sW, sG = shared.sA, shared.sB, shared.sD
        cluster = cute.make_layout((*self.cluster, 1))
        ring = self.frame.make_ring(storage, cluster)
        rank = cluster.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        pipeline.await_barriers(self.cluster)

        warpgroup = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.load((h, w), (sH, sW), cluster, ring, rank, counts)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.multiply((h, g), (sH, sW, sG), mBias, tokens, head, ring, rank, counts)

    @cute.jit
    def load(
        self,
        sources: tuple[tma.Source, tma.Source],
        shared: tuple[cute.Tensor, cute.Tensor],
        cluster: cute.Layout,
        ring: PipelineTmaAsync,
        rank: cute.Coord,
        counts: cute.Shape,
    ):
        """Producer warp: for each tile, load every K block of H and W, in order."""
        state = pipeline.producer_state(self.mainloop.stages)
        last = [
            cute.ceil_div(cute.size(source.tensor, mode=[0]), extent) - 1
            for source, extent in zip(sources, self.mainloop.tile[:2], strict=True)
        ]
        index, step = persistent.first_and_step()
        while index < counts[0] * counts[1]:
            m, n = persistent.coordinates(index, counts, RASTER_GROUP, rank, self.cluster)
            # A tile wholly outside loads the last one: TMA takes longer for zeros than for data.
            coord = cutlass.min(m, last[0]), cutlass.min(n, last[1])
            state = self.walk.load(sources, shared, cluster, rank, ring, state, coord)
            index += step
        # A CTA must not exit while others of its cluster may still arrive on its barriers.
        ring.producer_tail(state)

    @cute.jit
    def multiply(
        self,
        sources: tuple[tma.Source, tma.Source],
        shared: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        mBias: cute.Tensor | None,
        tokens: gradient.TokenInputs,
        head: tile.HeadSlice,
        ring: PipelineTmaAsync,
        rank: cute.Coord,
        counts: cute.Shape,
    ):
        """Consumer warpgroup: for each tile, the logits of 64 tokens, then their gradients."""
        (h, g), (sH, sW, sG) = sources, shared
        k = cute.size(h.tensor, mode=[1])
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP
        thr_mma = self.mainloop.tiled_mma(1).get_slice(lane)
        cLogits = thr_mma.partition_C(cute.make_identity_tensor((64, self.config.tile_n)))
        operands = self.mainloop.operands(sH, sW, consumer)
        accumulators = self.walk.accumulators(operands)
        rG = accumulators.total
        rows = gradient.make_registers(units.ROWS, self.config.entropy)
        states = self.walk.start()
        buffer = cutlass.Int32(0)
        index, step = persistent.first_and_step()
        while index < counts[0] * counts[1]:
            m, n = persistent.coordinates(index, counts, RASTER_GROUP, rank, self.cluster)
            column0 = n * self.config.tile_n
            row0 = m * self.config.tile_m + consumer * 64
            gradient.load(rows, tokens, row0, cLogits, head.start)
            # z[t, v] = softcap tanh((Σ_d H[t, d] W[v, d] + bias[v]) / softcap)
            states = self.walk.multiply(operands, accumulators, ring, states, k)
            capped = self.config.softcap
            tile.finish_logits(rG, mBias, cLogits, column0, head.softcap, capped)
            # G = (1[v = target] - p) a - p (ln p + H) b, times dz/d(uncapped z)
            gradient.from_logits(rG, rows, cLogits, column0, head.softcap, capped)
            gradient.mask(rG, rows, cLogits, column0, head.vocab - head.start)
            coord = (m * CONSUMERS + consumer, n)
            buffer = self.epilogue.store(rG, g, sG, consumer, lane, coord, buffer)
            index += step
        self.epilogue.finish(lane)


def build(config: Config, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    t, v, d = fake.size(), fake.size(), fake.size()
    entropy = (fake.vector("fp32", t), fake.vector("fp32", t)) if config.entropy else (None, None)
    return compile(
        LogpGradientSm90(config),
        fake.matrix(config.dtype, t, d, "k"),
        fake.matrix(config.dtype, v, d, "k"),
        fake.vector(config.dtype, v) if config.bias else None,
        fake.compact(cutlass.Int64, (t,), 8),
        *(fake.vector("fp32", t) for _ in range(3)),
        *entropy,
        fake.matrix(config.dtype, t, v, "k"),
        cutlass.Int32(0),
        cutlass.Int32(1),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
