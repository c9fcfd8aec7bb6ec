"""The states of few tokens, on SM90: the head streams through once, with the bits of the forward.

    z[t, v] = Σ_d H[t, d] W[v, d] + bias[v]      y = z scale[t]      states: logp/exact.py

Layouts      as kernel_fwd_sm90; T <= tile_m; states of P CTAs.
Operands     swapped: 64 entries of the vocabulary on the long side of ``wgmma.m64nTk16``, T tokens
             on the other.  Neither shows in a bit (docs/numerics.md).
Order        A logit: the chain or the tree of the forward.  A unit of 16 entries is the 16 rows
             of a warp: v and v + 8 are one thread's, neighbours are lanes 4, 8 and 16 apart, which
             is the order of logp/config.py.  Units are added in integers.
Work         a CTA takes every P-th tile of the head; at its end its warps' states meet in shared
             memory.
K tail       TMA fills zeros inside the last group of 16; groups wholly beyond D are skipped.
T, V tails   loads beyond give zeros; entries beyond the vocabulary become -inf; no token is stored.
Roles        ``tile_n`` / 64 warpgroups multiply, one more warp loads.
Limits       SM90a only; bf16 and fp16; T <= 128, D < 2^31, V <= 2^19.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import mma, pipeline, smem, tma
from ..dsl.mainloop import Mainloop
from .config import FewConfig, columns_of_state
from .device import column, exact, tile

#: Shared memory of an SM, less what each CTA on it has for barriers, alignment and its own needs.
SM_BYTES = 233472
CTA_BYTES = 4096
#: Named barrier of the warpgroups that multiply.
CONSUMER_BARRIER = 1


class LogpFewSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

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
        assert config.tile_m <= self.threads, "a thread for each token"

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
        stream,
    ):
        sW_layout, sH_layout = self.mainloop.layouts()
        w, h = self.mainloop.sources(mW, mH)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.mainloop.stages]
            scale: cute.struct.MemRange[cutlass.Float32, self.config.tile_m]
            # One after the other: states reuse the memory of both.
            sW: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sW_layout)], smem.ALIGN
            ]
            sH: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sH_layout)], smem.ALIGN
            ]

        self.storage = Storage
        place = start, vocab, softcap
        self.kernel(w, h, mBias, mTarget, mScale, mStates, place).launch(
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
        place: tuple,
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
        scale = cute.make_tensor(storage.scale.data_ptr(), cute.make_layout(self.config.tile_m))
        kept = cute.recast_ptr(storage.sW.data_ptr(), dtype=cutlass.Int64)

        alone = cute.make_layout((1, 1, 1))
        ring = self.mainloop.ring(storage.barriers.data_ptr(), alone)
        pipeline.announce_barriers((1, 1))
        tokens = mTarget.shape[0]
        if tidx < self.config.tile_m:
            scale[tidx] = mScale[cutlass.min(tidx, tokens - 1)]
        pipeline.await_barriers((1, 1))
        cute.arch.sync_threads()

        sources, shared = (w, h), (sW, sH)
        if warp == self.threads // 32:
            self.load(sources, shared, alone, ring)
        else:
            sizes = cute.size(h.tensor, mode=[1]), cute.size(w.tensor, mode=[0])
            self.multiply(shared, (mBias, mTarget, scale), place, ring, sizes, kept)
            self.store(kept, mStates, tidx)

    @cute.jit
    def load(self, sources, shared, alone, ring):
        """The producer warp: every K block of each of this CTA's tiles of W, and of all tokens."""
        state = pipeline.producer_state(self.mainloop.stages)
        tiles = cute.ceil_div(cute.size(sources[0].tensor, mode=[0]), self.config.tile_n)
        index, step = self.first_and_step()
        while index < tiles:
            state = self.walk.load(sources, shared, alone, (0, 0, 0), ring, state, (index, 0))
            index += step
        ring.producer_tail(state)

    @cute.jit
    def multiply(self, shared, tokens, place, ring, sizes, kept):
        """A consumer warpgroup: 64 entries of each tile, a unit for each warp."""
        mBias, mTarget, scale = tokens
        start, vocab, softcap = place
        k, rows_of_w = sizes
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        one = self.mainloop.tiled_mma(1).get_slice(tidx % mma.WARPGROUP)
        at = one.partition_C(cute.make_identity_tensor((64, self.config.tile_m)))
        operands = self.mainloop.operands(*shared, consumer)
        acc, result = self.walk.accumulators(operands)
        own = exact.state(column.slots(self.config.tile_m), self.config.entropy)
        exact.clear(own)
        targets = column.targets(own, mTarget, start)
        states = self.walk.start()
        tiles = cute.ceil_div(rows_of_w, self.config.tile_n)
        valid = cutlass.min(rows_of_w, vocab - start)
        index, step = self.first_and_step()
        while index < tiles:
            row0 = index * self.config.tile_n + consumer * 64
            states = self.walk.multiply(operands, (acc, result), ring, states, k)
            column.finish_logits(result, mBias, at, row0, softcap, self.config.softcap)
            column.choose(result, own, targets, (mTarget, start), at, row0)
            column.mask(result, at, row0, valid)
            column.absorb(result, own, scale)
            index += step
        # Everyone has read the ring, whose memory the states take.
        self.meet()
        column.keep(own, kept, self.config.tile_m, self.columns)
        self.meet()

    @cute.jit
    def store(self, kept, mStates, tidx):
        """A token's states of all warps, added, to global memory."""
        block, _, _ = cute.arch.block_idx()
        if tidx < mStates.shape[1]:
            total = exact.state(1, self.config.entropy)
            exact.clear(total)
            for warp in cutlass.range(self.threads // 32, unroll=1):
                at = (warp * self.config.tile_m + tidx) * self.columns
                exact.take(total, 0, cute.make_tensor(kept + at, cute.make_layout(self.columns)))
            exact.store(total, 0, tile.row_of(mStates, block, tidx))

    def first_and_step(self):
        """The calling CTA's first tile and the distance to its next one."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        return block, blocks

    def meet(self):
        """All threads that multiply."""
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.threads)


def build(config: FewConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
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
