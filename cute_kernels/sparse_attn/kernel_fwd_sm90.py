"""Attention forward for SM90: softmax(Q Kᵀ) V over the listed blocks of keys.

    S = Q Kᵀ      t = S, c = scale log2 e      P = exp2(c (t - max t))      O = Σ P V / Σ P

With a softcap t = tanh(S scale / softcap), c = softcap log2 e.

Layouts      Q [B, Sq, Hq, D], O with Dv columns, K [B, Sk, Hkv, D], V with Dv; last dimension
             contiguous, other strides multiples of 16 bytes; LSE fp32 [B, Hq, Sq], natural log;
             lists as in ``masks``, or (form "spans") ranges of keys, int32 [B, Sq, 4] as in
             ``kv_ranges``, of which lists are made here; rows beyond the last range see what it
             sees.  Sinks fp32 [Hq, Sq], any strides, or None.
Order        S: one fp32 accumulator, D ascending in k16 groups.  KV blocks of 128 ascending by
             absolute index.  A block: running maximum, O and the sum times exp2(c (m - m')), P
             rounded to the input dtype, then added to O in k16 groups of keys ascending.  Each of
             four lanes sums its own columns of a row; the lanes are added at the end (``softmax``).
             O is divided once, by multiplication with the reciprocal, and rounded once.
Sinks        a row's maximum and sum begin with its sink's, in lane 0, as after a block that has a
             key of that score with a value of zeros.
Masks        by selection; a block without an allowed key leaves a row's state as it was, bit by
             bit.  Rows without any key: O = 0, LSE = -inf.
Keys         of form "spans": key 0 is the column that ``device/kv_ranges`` names, and blocks are
             counted from there, so that a sequence may lie anywhere in K and V.
Varlen       (``packed``) sequences are read and written in place: batch 1, rows and keys counted
             as in ``device/varlen``, which gives the lists; a sequence ends as Sq and Sk do
             elsewhere.  Tokens of no sequence: O = 0, LSE = -inf, whatever the sinks.
Tails        TMA fills zeros beyond Sq and Sk; keys beyond Sk are masked, rows beyond Sq clipped.
Tiles        128 query rows of a head, or 192, of two blocks of the mask.  A CTA takes one after
             another (``tile_scheduler``) until there are none.
Roles        warpgroup 0: one warp loads what either block lists (``block_union``), of the next tile
             too; warpgroups 1, 2 (and 3): 64 rows each, against what their own block lists.  Q K^T
             of the next block is in flight with P V of this one, and the warpgroups take turns at
             issuing them.  O is stored through stages of V, by a warp of warpgroup 0 for each.
Limits       SM90a only; bf16 and fp16; D = Dv in {64, 96, 128}, and D = 192 with Dv = 128 (96
             is served by ``kernel_fwd_no_overlap_sm90``, 256 by ``kernel_fwd_wide_sm90``); lengths
             below 2^30; scale > 0.  P = 0 times a V that is Inf or NaN is NaN: V of a masked key in
             a visited block must be finite, V in other blocks need not.
Measured     on an H200: docs/status.md, docs/notes/attention_sm90.md.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineState

from ..compile import fake
from ..dsl import mma, pipeline, softmax, tma
from .config import HEAD_DIMS, VALUE_DIMS, ForwardConfig
from .device import block_union, kv_ranges, mask, output, varlen
from .device.block_union import BLOCK, Step, next_step
from .device.forward_loads import Loads
from .device.forward_state import (
    Buffers,
    Rings,
    Scalars,
    Sizes,
    Sources,
    Tensors,
)
from .device.forward_tiles import ROWS, ForwardTiles
from .device.tile_scheduler import TileInfo
from .masks import FORWARD_FORMS, SPANS

#: By consumers: registers of each role, of the (1 + consumers) times 168 or 128 of the launch.
PRODUCER_REGISTERS = {2: 24, 3: 32}
CONSUMER_REGISTERS = {2: 240, 3: 160}
#: Named barrier 0 is the CTA's.  Consumer w awaits its turn at 1 + w.
TURN_BARRIER = 1


@dataclass(frozen=True)
class ConsumerCoord:
    """Position of a consumer thread: tile, consumer, lane in it; the ring code of step 0."""

    tile: cutlass.Int32
    consumer: cutlass.Int32
    lane: cutlass.Int32
    first_step: cutlass.Int32


@dataclass(frozen=True)
class Context:
    """What a consumer thread works with on a tile.

    Operands of S = Q Kᵀ and O += P V, accumulators, softmax state; first_step: ring code of step
    0; c, inner: of `Scalars`.
    """

    rings: Rings
    mask: mask.ThreadMask
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrP: cute.Tensor
    tOrV: cute.Tensor
    tSrS: cute.Tensor
    tOrO: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    factor: cute.Tensor
    shift: cute.Tensor
    consumer: cutlass.Int32
    first_step: cutlass.Int32
    c: cutlass.Float32
    inner: cutlass.Float32


class ForwardSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ForwardConfig):
        assert config.head_dim in HEAD_DIMS and config.form in FORWARD_FORMS
        self.config, self.packed = config, config.packed
        self.head_dim, self.value_dim = config.head_dim, VALUE_DIMS[config.head_dim]
        self.dtype = fake.DTYPES[config.dtype]
        assert config.consumers == 2 or config.head_dim <= 96
        assert config.kv_stages >= config.consumers, "V is awaited while V of another block is held"
        self.stages, self.parts = config.kv_stages, config.parts
        self.consumers, self.rows = config.consumers, config.rows
        dims = self.head_dim, self.value_dim
        self.tiles = ForwardTiles(
            self.dtype, *dims, self.consumers, self.stages, self.parts, self.packed
        )
        self.loads = Loads(self.tiles, config.form, config.max_skipped_steps)
        self.output = output.Output(self.tiles)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        mCount: cute.Tensor | None,
        mEntry: cute.Tensor | None,
        mTile: cute.Tensor | None,
        mWords: cute.Tensor | None,
        mRanges: cute.Tensor | None,
        mSinks: cute.Tensor | None,
        mTable: cute.Tensor | None,
        mCounter: cute.Tensor,
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        c: cutlass.Float32,
        inner: cutlass.Float32,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        _, sK_layout, sV_layout = self.tiles.layouts()
        # [S, D, H, B], and [D, S, H, B] for V: its keys are the reduction dimension.
        by_rows, by_keys = [1, 3, 2, 0], [3, 1, 2, 0]
        q_box, o_box = (self.tiles.box_rows, self.head_dim), (ROWS, self.value_dim)
        q = tma.load(tma.view(mQ, by_rows), self.tiles.box_layout(), q_box, 1)
        k = tma.load(tma.view(mK, by_rows), sK_layout, self.tiles.k_box, 1)
        v = tma.load(tma.view(mV, by_keys), sV_layout, self.tiles.v_box[::-1], 1)
        o = tma.store(tma.view(mO, by_rows), self.tiles.o_layout(), o_box)

        self.storage = self.tiles.storage()
        out = (mO, mTable) if self.packed else (None, None)
        lists = mCount, mEntry, mTile, mWords, mRanges
        tensors = Tensors(mK, mLse, *lists, mSinks, *out, mCounter)
        self.kernel(Sources(q, k, v, o), tensors, Scalars(lo, hi, c, inner)).launch(
            grid=(ctas, 1, 1),
            block=((1 + self.consumers) * mma.WARPGROUP, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, sources: Sources, tensors: Tensors, scalars: Scalars):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for source in (sources.q, sources.k, sources.v, sources.o):
                cpasync.prefetch_descriptor(source.atom)

        storage = SmemAllocator().allocate(self.storage)
        sQ, sK, sV = (
            memory.get_tensor(layout.outer, swizzle=layout.inner)
            for memory, layout in zip(
                (storage.sQ, storage.sK, storage.sV), self.tiles.layouts(), strict=True
            )
        )
        steps = storage.steps.get_tensor(cute.make_layout((2, 2, 1 + self.stages)))
        tile_info = TileInfo(storage.tile_info.get_tensor(cute.make_layout(5)))
        tail = storage.barriers.data_ptr() + self.tiles.barriers - 1
        if cutlass.const_expr(self.packed):
            varlen.init(tail, tidx)
        o_full = storage.o_barriers.data_ptr()
        o_info = storage.o_info.get_tensor(cute.make_layout((4, self.consumers)))
        handover = output.Handover(o_full, o_full + self.consumers, o_info)
        if tidx == 0:
            handover.init(self.consumers)
        rings = self.loads.make_rings(storage.barriers.data_ptr())
        batches, heads, q_len = tensors.mLse.shape
        if cutlass.const_expr(self.packed):
            q_len = varlen.used_blocks(tensors.mTable) * BLOCK
        total = cute.ceil_div(q_len, self.rows) * heads * batches
        sizes = Sizes(total, q_len, heads, tensors.mK.shape[2])
        pV = storage.sV.data_ptr()
        buffers = Buffers(sQ, sK, sV, steps, tile_info, pV, tail, handover)

        group = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS[self.consumers])
            if warp == 0:
                self.loads.load(sources, tensors, scalars, buffers, rings, sizes)
            elif warp <= self.consumers:
                mO, mTable = tensors.mO, tensors.mTable
                self.output.store(sources.o, mO, mTable, pV, handover, rings.v, warp - 1)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS[self.consumers])
            self.consume(tensors, scalars, buffers, rings, sizes)

    @cute.jit
    def consume(
        self, tensors: Tensors, scalars: Scalars, buffers: Buffers, rings: Rings, sizes: Sizes
    ):
        """Consumer warpgroup: 64 rows of each tile."""
        tile_info, handover, mTable = buffers.tile_info, buffers.handover, tensors.mTable
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP
        row_sum = cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32)
        row_max = cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32)
        shape = self.tiles.pv_mma().get_slice(0).partition_shape_C((ROWS, self.value_dim))
        tOrO = cute.make_rmem_tensor(shape, cutlass.Float32)
        q_state = pipeline.consumer_state(1)
        o_phase = cutlass.Int32(0)
        if consumer == self.consumers - 1:
            self.warp_scheduler_arrive(consumer)
        rings.q.consumer_wait(q_state)
        while tile_info.more():
            tile, head, batch = tile_info.coord()
            # m = -inf, l = 0; with a sink m = sink, l = 1
            softmax.start(row_max, row_sum)
            if cutlass.const_expr(tensors.mSinks is not None):
                row = softmax.first_row(tile * self.rows + consumer * ROWS, lane)
                gSinks = tensors.mSinks[head, None]
                if cutlass.const_expr(self.packed):
                    if varlen.is_in_sequence(mTable, row // BLOCK):
                        softmax.start_at_sinks(row_max, row_sum, gSinks, row, lane, scalars.c)
                else:
                    softmax.start_at_sinks(row_max, row_sum, gSinks, row, lane, scalars.c)
            tOrO.fill(0.0)
            ranges, kv_end = None, tensors.mK.shape[1]
            if cutlass.const_expr(self.config.form == SPANS):
                ranges = tensors.mRanges[batch, None, None]
                kv_end -= kv_ranges.column_of_key_0(ranges)
            if cutlass.const_expr(self.packed):
                # Keys end where rows do, with the sequence.
                kv_end = varlen.row_range(mTable, (tile * self.consumers + consumer) // 2).end
            after = tile_info.first_step()
            if tile_info.count() > 0:
                coord = ConsumerCoord(tile, consumer, lane, after)
                state = tOrO, row_max, row_sum
                context = self.bind(tensors, scalars, buffers, rings, state, ranges, kv_end, coord)
                after = self.mainloop(context)
            # Read again: held through the loop above, it would take registers.
            tile, head, batch = tile_info.coord()
            rings.q.consumer_release(q_state)
            q_state.advance()
            # O = acc / l; LSE = ln l + ln 2 c m
            softmax.finish(row_sum)
            number = tile * self.consumers + consumer
            row = softmax.first_row(number * ROWS, lane)
            end, shift = sizes.q_len, 0
            if cutlass.const_expr(self.packed):
                of_block = varlen.row_range(mTable, number // 2)
                shift, end = of_block.shift, of_block.end
            gLse = tensors.mLse[batch, head, None]
            for half in cutlass.range_constexpr(softmax.ROWS):
                softmax.normalise(tOrO, row_sum, half)
                lse = softmax.log_sum(row_max[half], row_sum[half], scalars.c)
                if lane % 4 == 0 and row + 8 * half < end:
                    gLse[row + 8 * half - shift] = lse
            handover.await_empty(consumer, o_phase)
            for step in cutlass.range_constexpr(self.tiles.o_stages):
                stage = self.await_output(rings, after, step)
                if consumer // self.tiles.o_per_stage == step:
                    pO = self.output.pointer(buffers.pV, consumer, stage.index)
                    self.output.keep(tOrO, pO, lane)
                    info = output.OutputInfo(number, head, batch, stage.index)
                    handover.publish(consumer, lane, info)
                else:
                    rings.v.consumer_release(stage)
            o_phase = o_phase ^ 1
            rings.q.consumer_wait(q_state)
        handover.await_empty(consumer, o_phase)
        handover.publish(consumer, lane, output.OutputInfo(*(cutlass.Int32(-1),) * 4))
        if consumer == 0:
            # Drain the last barrier phase.
            self.warp_scheduler_sync(consumer)

    def await_output(self, rings: Rings, after: cutlass.Int32, step: int) -> PipelineState:
        """Await a stage of V that the producer has left; that of K beside it is not used."""
        stage = block_union.ring_state(after, self.stages)
        for _ in range(step):
            stage.advance()
        rings.k.consumer_wait(stage)
        rings.k.consumer_release(stage)
        rings.v.consumer_wait(stage)
        return stage

    def thread_mask(
        self,
        tensors: Tensors,
        scalars: Scalars,
        steps: cute.Tensor,
        ranges: cute.Tensor | None,
        kv_end: cutlass.Int32,
        coord: ConsumerCoord,
    ) -> mask.ThreadMask:
        """Return the mask of a consumer thread's rows."""
        tile, consumer, lane = coord.tile, coord.consumer, coord.lane
        half = tile * self.consumers + consumer
        # Its list, and this thread's first row in the block of the mask; its second is 8 below.
        m, which = half // 2, half // 2 - tile * self.consumers // 2
        row = softmax.first_row(half % 2 * ROWS, lane)
        lo, hi, bounds = scalars.lo, scalars.hi, None
        if self.config.form == SPANS:
            bounds = kv_ranges.row_bounds(ranges, m * BLOCK + row)
        elif self.packed:
            bounds = varlen.row_bounds(lo, hi, kv_end, m * BLOCK + row)
        bits = cute.make_rmem_tensor((mask.WORDS, softmax.ROWS), cutlass.Int32)
        of_list = m, row, lane, steps[which, None, None], bits
        return mask.ThreadMask(self.config.form, tensors.mWords, lo, hi, bounds, kv_end, *of_list)

    def bind(
        self,
        tensors: Tensors,
        scalars: Scalars,
        buffers: Buffers,
        rings: Rings,
        state: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        ranges: cute.Tensor | None,
        kv_end: cutlass.Int32,
        coord: ConsumerCoord,
    ) -> Context:
        """Return what a consumer's mainloop works with; state: O, maxima and sums of its rows."""
        qk, pv = self.tiles.qk_mma(), self.tiles.pv_mma()
        slice_qk, slice_pv = qk.get_slice(coord.consumer * mma.WARPGROUP), pv.get_slice(0)
        tSrQ = qk.make_fragment_A(slice_qk.partition_A(buffers.sQ))
        tSrK = qk.make_fragment_B(slice_qk.partition_B(buffers.sK))
        tOrV = pv.make_fragment_B(slice_pv.partition_B(buffers.sV))
        tOrP = pv.make_fragment_A(slice_pv.partition_shape_A((ROWS, BLOCK)))
        shape = slice_qk.partition_shape_C((self.rows, BLOCK))
        tSrS = cute.make_rmem_tensor(shape, cutlass.Float32)
        factor, shift = (cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32) for _ in range(2))
        thread_mask = self.thread_mask(tensors, scalars, buffers.steps, ranges, kv_end, coord)
        fragments = tSrQ, tSrK, tOrP, tOrV, tSrS, *state, factor, shift
        constants = coord.consumer, coord.first_step, scalars.c, scalars.inner
        return Context(rings, thread_mask, *fragments, *constants)

    @cute.jit
    def mainloop(self, ctx: Context):
        """Attend to every block on the list of a consumer; returns the ring code after them."""
        ctx.rings.k.consumer_wait(block_union.ring_state(ctx.first_step, self.stages))
        step = next_step(ctx.mask.steps, self.stages)
        while self.is_absent(step) and step.has_next:
            step = self.skip_block(ctx, step)
        if self.is_absent(step):
            self.skip_block(ctx, step)
        else:
            step, following = self.kv_loop(ctx, step)
            while step.has_next:
                step = following
                following = self.skip_block(ctx, step)
        stage = step.state(self.stages)
        stage.advance()
        return block_union.ring_code(stage.index, stage.phase)

    @cute.jit
    def kv_loop(self, ctx: Context, step: Step):
        """Attend to the blocks on the list, from ``step`` on; returns the last step and the next.

        Blocks with none between them that only the other list has are one pipeline.
        """
        rings, c = ctx.rings, ctx.c
        # S_0 = Q K_0ᵀ; m_0 = max t_0
        following = self.qk_block(ctx, step, True)
        # P_0 = exp2(c (t_0 - m_0)); l_0 = Σ P_0
        rings.v.consumer_wait(step.state(self.stages))
        softmax.exponentiate(ctx.tSrS, ctx.row_sum, ctx.factor, ctx.shift, c)
        self.round_p(ctx)
        # The step whose V P is yet to be multiplied by.
        of_p = step
        while step.goes_on:
            step = following
            while self.is_absent(step):
                step = self.skip_block(ctx, step)
            # S_n = Q K_nᵀ, and after it O += P_{n-1} V_{n-1}
            state, held = step.state(self.stages), of_p.state(self.stages)
            rings.k.consumer_wait(state)
            ctx.mask.load_bits(step, state.index)
            self.warp_scheduler_sync(ctx.consumer)
            self.qk(ctx, state.index)
            self.pv(ctx, held.index)
            self.warp_scheduler_arrive(ctx.consumer)
            following = next_step(ctx.mask.steps, state.index)
            warpgroup.wait_group(1)
            rings.k.consumer_release(state)
            # t_n as t_0; m_n = max(m_{n-1}, max t_n); factor = exp2(c (m_{n-1} - m_n))
            self.mask_scores(ctx, step)
            softmax.raise_max(ctx.tSrS, ctx.row_max, ctx.factor, ctx.shift, c)
            # P V has had the time of the maxima; ptxas moves its wait up to the last wait for
            # an mbarrier, which is therefore here.  What follows then fills the gaps between
            # exponentials.
            rings.v.consumer_wait(state)
            warpgroup.wait_group(0)
            rings.v.consumer_release(held)
            # P_n = exp2(c (t_n - m_n)); l_n = l_{n-1} factor + Σ P_n; O *= factor
            softmax.exponentiate(ctx.tSrS, ctx.row_sum, ctx.factor, ctx.shift, c)
            softmax.rescale(ctx.tOrO, ctx.factor)
            self.round_p(ctx)
            of_p = step
        # O += P_last V_last
        held = of_p.state(self.stages)
        self.pv(ctx, held.index)
        warpgroup.wait_group(0)
        rings.v.consumer_release(held)
        return step, following

    @cute.jit
    def qk_block(self, ctx: Context, step: Step, turn: cutlass.Constexpr):
        """Compute S of a step, alone at the tensor cores, and the maxima of its rows.

        turn: whether its turn is still to come.  Returns the next step.
        """
        k_ring, state = ctx.rings.k, step.state(self.stages)
        k_ring.consumer_wait(state)
        ctx.mask.load_bits(step, state.index)
        if cutlass.const_expr(turn):
            self.warp_scheduler_sync(ctx.consumer)
        # S = Q Kᵀ
        self.qk(ctx, state.index)
        self.warp_scheduler_arrive(ctx.consumer)
        following = next_step(ctx.mask.steps, state.index)
        warpgroup.wait_group(0)
        k_ring.consumer_release(state)
        # t = S or tanh(S scale / softcap), -inf where masked; m' = max(m, max t); factor
        self.mask_scores(ctx, step)
        softmax.raise_max(ctx.tSrS, ctx.row_max, ctx.factor, ctx.shift, ctx.c)
        return following

    def is_absent(self, step: Step):
        """Return whether only the other list has the block; there is one with three consumers."""
        return block_union.is_absent(step, self.consumers - 1)

    @cute.jit
    def skip_block(self, ctx: Context, step: Step):
        """Pass the turn and the stages of the other list's step on.  Returns the next step."""
        state = step.state(self.stages)
        ctx.rings.k.consumer_wait(state)
        self.warp_scheduler_sync(ctx.consumer)
        return self.finish_skip(ctx, state)

    @cute.jit
    def finish_skip(self, ctx: Context, state: PipelineState):
        """Finish a skipped step in its turn.  Returns the next step."""
        self.warp_scheduler_arrive(ctx.consumer)
        following = next_step(ctx.mask.steps, state.index)
        ctx.rings.k.consumer_release(state)
        ctx.rings.v.consumer_wait(state)
        ctx.rings.v.consumer_release(state)
        return following

    @cute.jit
    def qk(self, ctx: Context, stage: cutlass.Int32):
        """Issue S = Q K^T of one block."""
        mma.start(self.tiles.qk_mma(), ctx.tSrS, ctx.tSrQ, ctx.tSrK, 0, stage)

    @cute.jit
    def pv(self, ctx: Context, stage: cutlass.Int32):
        """Issue O += P V of one block."""
        mma.extend(self.tiles.pv_mma(), ctx.tOrO, ctx.tOrP, ctx.tOrV, stage)

    @cute.jit
    def mask_scores(self, ctx: Context, step: Step):
        """Cap the scores of one block, and set them to -inf where a key is not allowed."""
        # t = tanh(S scale / softcap)
        if cutlass.const_expr(self.config.softcap):
            softmax.cap(ctx.tSrS, ctx.inner)
        ctx.mask.apply(ctx.tSrS, step)

    @cute.jit
    def round_p(self, ctx: Context):
        """Round P to the input dtype, WGMMA's register operand: the accumulator's order."""
        rP = cute.make_tensor(ctx.tOrP.iterator, ctx.tSrS.layout)
        if cutlass.const_expr(self.consumers == 3 or self.parts > 1):
            softmax.round_pairs(ctx.tSrS, rP)
        else:
            # 3% faster where registers allow that P stays fp32 until it is multiplied.
            rP.store(ctx.tSrS.load().to(self.dtype))

    def warp_scheduler_sync(self, consumer: cutlass.Int32):
        """Wait until the consumer before this one has issued its products."""
        threads = 2 * mma.WARPGROUP
        cute.arch.barrier(barrier_id=TURN_BARRIER + consumer, number_of_threads=threads)

    def warp_scheduler_arrive(self, consumer: cutlass.Int32):
        """Let the consumer after this one issue its products."""
        following = TURN_BARRIER + (consumer + 1) % self.consumers
        threads = 2 * mma.WARPGROUP
        cute.arch.barrier_arrive(barrier_id=following, number_of_threads=threads)


def build(
    config: ForwardConfig,
    compile: Callable = cute.compile,
    kernel: type[ForwardSm90] = ForwardSm90,
):
    """Compile one configuration against fake tensors; no GPU needed."""
    batch, q_len, kv_len = fake.size(), fake.size(), fake.size()
    heads, kv_heads, blocks, longest = fake.size(), fake.size(), fake.size(), fake.size()
    shared = (fake.size(), fake.size(), blocks)
    listed = (*shared, longest) if config.form == "bits" else tuple(fake.size() for _ in range(4))
    ints = functools.partial(fake.compact, cutlass.Int32)
    stored = (
        *(ints(shared), ints((*shared, longest)), ints(listed)),
        ints((fake.size(), BLOCK, mask.WORDS), fake.TMA_ALIGN),
        None,
    )
    ranges = ints((batch, fake.size(), len(kv_ranges.FIELDS)), fake.TMA_ALIGN)
    ranges_alone = (None,) * 4 + (ranges,)
    any_strides = (cute.sym_int64(), cute.sym_int64())
    lists = ranges_alone if config.form == SPANS else stored
    lists = (None,) * 5 if config.packed else lists
    by_row = make_fake_tensor(cutlass.Float32, (heads, q_len), any_strides, assumed_align=4)
    width, value_dim = config.head_dim, VALUE_DIMS[config.head_dim]

    def rows(length: cutlass.Int32, heads: cutlass.Int32, columns: int):
        return fake.activations(config.dtype, batch, length, heads, columns)

    return compile(
        kernel(config),
        rows(q_len, heads, width),
        rows(kv_len, kv_heads, width),
        rows(kv_len, kv_heads, value_dim),
        rows(q_len, heads, value_dim),
        fake.compact(cutlass.Float32, (batch, heads, q_len)),
        *lists,
        by_row if config.sinks else None,
        varlen.fake_table() if config.packed else None,
        ints((1,)),
        cutlass.Int32(0),
        cutlass.Int32(0),
        cutlass.Float32(1.0),
        cutlass.Float32(0.0),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
