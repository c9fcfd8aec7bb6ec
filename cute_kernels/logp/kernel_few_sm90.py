"""States of few tokens, on SM90: reads the head once, and gives the bits of the forward kernel.

    z[t, v] = Σ_d H[t, d] W[v, d] + bias[v]      y = z scale[t]      states: logp/exact.py

Layouts      as kernel_fwd_sm90; T <= tile_m; states of P CTAs.
Operands     swapped: 64 entries of the vocabulary on the long side of ``wgmma.m64nTk16``, T tokens
             on the other.  Bits do not depend on it (docs/numerics.md).
Order        A logit: the chain or the tree of the forward.  16 entries are the 16 rows of a warp:
             v and v + 8 are one thread's, neighbours are lanes 4, 8 and 16 apart, which is the
             order of logp/config.py.  Sums of 16 entries are added in integers.
Work         a CTA takes every P-th tile of the head; at its end its warps' states are added in
             shared memory.
K tail       TMA fills zeros inside the last group of 16; groups wholly beyond D are skipped.
T, V tails   loads beyond give zeros; entries beyond the vocabulary become -inf; tokens beyond T
             are not stored.
Roles        ``tile_n`` / 64 consumer warpgroups, then a producer warp.
Limits       SM90a only; bf16 and fp16; T <= 128, D < 2^31, V <= 2^19.
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
from .config import FewConfig, columns_of_state
from .device import column, exact, tile

#: Shared memory of an SM, and the bytes of each CTA for barriers, alignment and the system.
SM_BYTES = 233472
CTA_BYTES = 4096
#: Named barrier of the consumer warpgroups.
CONSUMER_BARRIER = 1


@dataclass(frozen=True)
class TokenTensors:
    """Tensors of the tokens that the consumers read.

    mBias:   [V] in global memory, or None.
    mTarget: Int64 [T] in global memory.
    sScale:  fp32 [tile_m] in shared memory.
    """

    mBias: cute.Tensor | None
    mTarget: cute.Tensor
    sScale: cute.Tensor


class LogpFewSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: FewConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.consumers = config.tile_n // 64
        self.threads = self.consumers * mma.WARPGROUP
        shape = (config.tile_n, config.tile_m, config.tile_k)
        space = SM_BYTES // config.ctas_per_sm - CTA_BYTES
        majors = ("k", "k")
        self.mainloop = Mainloop(self.dtype, majors, shape, (1, 1), self.consumers, space)
        self.walk = tile.Walk(self.mainloop, config.order == "tree")
        self.columns = columns_of_state(config.entropy)
        states = self.threads // 32 * config.tile_m * self.columns * 8
        ring = self.mainloop.stages * self.mainloop.stage_bytes
        assert states <= ring, "the warps' states reuse the ring"
        assert config.tile_m <= self.threads, "one thread adds the states of each token"

    @cute.jit
    def __call__(
        self,
        mH: cute.Tensor,
        mW: cute.Tensor,
        mBias: cute.Tensor | None,
        mTarget: cute.Tensor,
        mScale: cute.Tensor,
        mStates: cute.Tensor,
        start: cutlass.Int32,
        vocab: cutlass.Int32,
        softcap: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        sW_layout, sH_layout = self.mainloop.layouts()
        w, h = self.mainloop.sources(mW, mH)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.mainloop.stages]
            scale: cute.struct.MemRange[cutlass.Float32, self.config.tile_m]
            # Adjacent: the states reuse the memory of both.
            sW: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sW_layout)], smem.ALIGN
            ]
            sH: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sH_layout)], smem.ALIGN
            ]

        self.storage = Storage
        head = tile.HeadSlice(start, vocab, softcap)
        self.kernel(w, h, mBias, mTarget, mScale, mStates, head).launch(
            grid=(mStates.shape[0], 1, 1),
            block=(self.threads + 32, 1, 1),
            min_blocks_per_mp=self.config.ctas_per_sm,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        w: tma.Source,
        h: tma.Source,
        mBias: cute.Tensor | None,
        mTarget: cute.Tensor,
        mScale: cute.Tensor,
        mStates: cute.Tensor,
        head: tile.HeadSlice,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.threads // 32:
            for source in (w, h):
                cpasync.prefetch_descriptor(source.atom)

        storage = SmemAllocator().allocate(self.storage)
        sW_layout, sH_layout = self.mainloop.layouts()
        sW = storage.sW.get_tensor(sW_layout.outer, swizzle=sW_layout.inner)
        sH = storage.sH.get_tensor(sH_layout.outer, swizzle=sH_layout.inner)
        sScale = cute.make_tensor(storage.scale.data_ptr(), cute.make_layout(self.config.tile_m))
        # States of the warps, Int64 [warp, token, column], over the ring.
        warp_states = cute.recast_ptr(storage.sW.data_ptr(), dtype=cutlass.Int64)

        one_cta = cute.make_layout((1, 1, 1))
        ring = self.mainloop.ring(storage.barriers.data_ptr(), one_cta)
        pipeline.announce_barriers((1, 1))
        tokens = mTarget.shape[0]
        if tidx < self.config.tile_m:
            sScale[tidx] = mScale[cutlass.min(tidx, tokens - 1)]
        pipeline.await_barriers((1, 1))
        cute.arch.sync_threads()

        sources, shared = (w, h), (sW, sH)
        if warp == self.threads // 32:
            self.load(sources, shared, one_cta, ring)
        else:
            inputs = TokenTensors(mBias, mTarget, sScale)
            self.multiply(sources, shared, inputs, head, ring, warp_states)
            self.store(warp_states, mStates, tidx)

    @cute.jit
    def load(
        self,
        sources: tuple[tma.Source, tma.Source],
        shared: tuple[cute.Tensor, cute.Tensor],
        cluster: cute.Layout,
        ring: PipelineTmaAsync,
    ):
        """Producer warp: load every K block of each of this CTA's tiles of W, and of all tokens."""
        state = pipeline.producer_state(self.mainloop.stages)
        tiles = cute.ceil_div(cute.size(sources[0].tensor, mode=[0]), self.config.tile_n)
        index, step = self.first_and_step()
        while index < tiles:
            state = self.walk.load(sources, shared, cluster, (0, 0, 0), ring, state, (index, 0))
            index += step
        ring.producer_tail(state)

    @cute.jit
    def multiply(
        self,
        sources: tuple[tma.Source, tma.Source],
        shared: tuple[cute.Tensor, cute.Tensor],
        tokens: TokenTensors,
        head: tile.HeadSlice,
        ring: PipelineTmaAsync,
        warp_states: cute.Pointer,
    ):
        """Consumer warpgroup: the states of all tokens over 64 entries of each tile, 16 a warp."""
        w, h = sources
        k, rows_of_w = cute.size(h.tensor, mode=[1]), cute.size(w.tensor, mode=[0])
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        thr_mma = self.mainloop.tiled_mma(1).get_slice(tidx % mma.WARPGROUP)
        cLogits = thr_mma.partition_C(cute.make_identity_tensor((64, self.config.tile_m)))
        operands = self.mainloop.operands(*shared, consumer)
        accumulators = self.walk.accumulators(operands)
        rLogits = accumulators.total
        state = exact.make_state(column.slots(self.config.tile_m), self.config.entropy)
        exact.clear(state)
        targets = column.load_targets(state, tokens.mTarget, head.start)
        states = self.walk.start()
        tiles = cute.ceil_div(rows_of_w, self.config.tile_n)
        # Number of rows of this head that are in the vocabulary.
        valid = cutlass.min(rows_of_w, head.vocab - head.start)
        index, step = self.first_and_step()
        while index < tiles:
            row0 = index * self.config.tile_n + consumer * 64
            # z[t, v] = Σ_d H[t, d] W[v, d]
            states = self.walk.multiply(operands, accumulators, ring, states, k)
            # z = softcap tanh((z + bias) / softcap); -inf beyond the vocabulary
            column.finish_logits(
                rLogits, tokens.mBias, cLogits, row0, head.softcap, self.config.softcap
            )
            column.choose(rLogits, state, targets, cLogits, row0)
            column.mask(rLogits, cLogits, row0, valid)
            # state += Σ_v 2^y, of 16 entries at a time
            column.add_tile(rLogits, state, tokens.sScale)
            index += step
        # The states overwrite the ring: all consumers must have read it.
        self.sync_consumers()
        column.store_warp(state, warp_states, self.config.tile_m, self.columns)
        self.sync_consumers()

    @cute.jit
    def store(self, warp_states: cute.Pointer, mStates: cute.Tensor, tidx: cutlass.Int32):
        """mStates[CTA, token] = Σ of the warps' states; a thread for each token."""
        block, _, _ = cute.arch.block_idx()
        if tidx < mStates.shape[1]:
            total = exact.make_state(1, self.config.entropy)
            exact.clear(total)
            for warp in cutlass.range(self.threads // 32, unroll=1):
                offset = (warp * self.config.tile_m + tidx) * self.columns
                sState = cute.make_tensor(warp_states + offset, cute.make_layout(self.columns))
                exact.add_stored(total, 0, sState)
            exact.store(total, 0, tile.row_of(mStates, block, tidx))

    def first_and_step(self) -> tuple[cutlass.Int32, cutlass.Int32]:
        """First tile of the calling CTA, and the step to its next one."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        return block, blocks

    def sync_consumers(self):
        """Named barrier of all consumer threads."""
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.threads)


def build(config: FewConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    t, v, d, ctas = fake.size(), fake.size(), fake.size(), fake.size()
    return compile(
        LogpFewSm90(config),
        fake.matrix(config.dtype, t, d, "k"),
        fake.matrix(config.dtype, v, d, "k"),
        fake.vector(config.dtype, v) if config.bias else None,
        fake.compact(cutlass.Int64, (t,), 8),
        fake.vector("fp32", t),
        fake.compact(cutlass.Int64, (ctas, t, columns_of_state(config.entropy)), 8),
        cutlass.Int32(0),
        cutlass.Int32(1),
        cutlass.Float32(1.0),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
