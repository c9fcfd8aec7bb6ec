"""Attention forward for SM90: softmax(Q Kᵀ) V over the listed blocks of keys.

    S = Q Kᵀ      t = S, c = scale log2 e      P = exp2(c (t - max t))      O = Σ P V / Σ P

With a softcap t = tanh(S scale / softcap), c = softcap log2 e.

Layouts      Q [B, Sq, Hq, D], O with Dv columns, K [B, Sk, Hkv, D], V with Dv; last dimension
             contiguous, other strides multiples of 16 bytes; LSE fp32 [B, Hq, Sq], natural log;
             lists as in ``masks``, or (form "spans") ranges of keys, int32 [B, Sq, 4] as in
             ``sequences``, of which lists are made here; rows beyond the last range see what it
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
Keys         of form "spans": key 0 is the column that ``device/spans`` names, and blocks are
             counted from there, so that a sequence may lie anywhere in K and V.
Varlen       (``packed``) sequences are read and written in place: batch 1, rows and keys counted
             as in ``device/packed``, which gives the lists; a sequence ends as Sq and Sk do
             elsewhere.  Tokens of no sequence: O = 0, LSE = -inf, whatever the sinks.
Tails        TMA fills zeros beyond Sq and Sk; keys beyond Sk are masked, rows beyond Sq clipped.
Tiles        128 query rows of a head, or 192, of two blocks of the mask.  A CTA takes one after
             another (``place``) until there are none.
Roles        warpgroup 0: one warp loads what either block lists (``merge``), of the next tile too;
             warpgroups 1, 2 (and 3): 64 rows each, against what their own block lists.  Q K^T of
             the next block is in flight with P V of this one, and the warpgroups take turns at
             issuing them.  O is stored through stages of V, by a warp of warpgroup 0 for each.
Limits       SM90a only; bf16 and fp16; D = Dv in {64, 96, 128}, and D = 192 with Dv = 128 (96
             is served by ``kernel_fwd_apart_sm90``, 256 by ``kernel_fwd_wide_sm90``); lengths
             below 2^30; scale > 0.  P = 0 times a V that is Inf or NaN is NaN: V of a masked key in
             a visited block must be finite, V in other blocks need not.
Measured     on an H200: docs/status.md, docs/notes/attention_sm90.md.
"""

import functools
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from ..compile import fake
from ..dsl import mma, pipeline, softmax, tma
from .config import HEAD_DIMS, VALUE_DIMS, ForwardConfig
from .device import element_mask, merge, output, packed, score_mask, sinks, spans
from .device.element_mask import ElementRule, ListCoord, MaskTensors, TileMask, lists_of
from .device.forward_loads import LoadBuffers, Loads, Rings, Sources, TileInfo, TileSizes
from .device.forward_state import (
    ConsumerBuffers,
    ConsumerCoord,
    Operands,
    Registers,
    RowTensors,
    Scales,
)
from .device.forward_tiles import BLOCK, ROWS, ForwardTiles
from .masks import FORWARD_FORMS, SPANS

#: By consumers: registers of each role, of the (1 + consumers) times 168 or 128 of the launch.
PRODUCER_REGISTERS = {2: 24, 3: 32}
CONSUMER_REGISTERS = {2: 240, 3: 160}
#: Named barrier 0 is the CTA's.  Consumer w awaits its turn at 1 + w.
TURN_BARRIER = 1


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
        varlen = output.VarlenOutput(mO, mTable) if self.packed else None
        tensors = (mK, mLse, mCount, mEntry, mTile, mWords, mRanges, mSinks, varlen, mCounter)
        self.kernel(q, k, v, o, *tensors, lo, hi, c, inner).launch(
            grid=(ctas, 1, 1),
            block=((1 + self.consumers) * mma.WARPGROUP, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q: tma.Source,
        k: tma.Source,
        v: tma.Source,
        o: tma.Source,
        mK: cute.Tensor,
        mLse: cute.Tensor,
        mCount: cute.Tensor | None,
        mEntry: cute.Tensor | None,
        mTile: cute.Tensor | None,
        mWords: cute.Tensor | None,
        mRanges: cute.Tensor | None,
        mSinks: cute.Tensor | None,
        varlen: output.VarlenOutput | None,
        mCounter: cute.Tensor,
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        c: cutlass.Float32,
        inner: cutlass.Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for source in (q, k, v, o):
                cpasync.prefetch_descriptor(source.atom)

        storage = SmemAllocator().allocate(self.storage)
        sQ, sK, sV = (
            memory.get_tensor(layout.outer, swizzle=layout.inner)
            for memory, layout in zip(
                (storage.sQ, storage.sK, storage.sV), self.tiles.layouts(), strict=True
            )
        )
        # By list, word or tile, and the stage of K a step before; the first step's come with its K.
        words = storage.words.get_tensor(cute.make_layout((2, 2, 1 + self.stages)))
        tile_info = TileInfo(storage.tile_info.get_tensor(cute.make_layout(5)))
        tail = storage.barriers.data_ptr() + self.tiles.barriers - 1
        if cutlass.const_expr(self.packed):
            packed.init(tail, tidx)
        o_full = storage.o_barriers.data_ptr()
        o_info = storage.o_info.get_tensor(cute.make_layout((4, self.consumers)))
        handover = output.Handover(o_full, o_full + self.consumers, o_info)
        if tidx == 0:
            handover.init(self.consumers)
        rings = self.loads.make_rings(storage.barriers.data_ptr())
        batches, heads, q_len = mLse.shape
        mTable = None
        if cutlass.const_expr(self.packed):
            mTable = varlen.mTable
            q_len = packed.blocks_of(mTable) * BLOCK
        total = cute.ceil_div(q_len, self.rows) * heads * batches
        sizes = TileSizes(total, q_len, heads, mK.shape[2])

        group = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS[self.consumers])
            if warp == 0:
                mask = MaskTensors(mCount, mEntry, mTile, mRanges, mTable, lo, hi)
                pV = storage.sV.data_ptr()
                load_buffers = LoadBuffers(sQ, sK, sV, words, tile_info, pV, tail)

                def lists(tile: cutlass.Int32, head: cutlass.Int32, batch: cutlass.Int32):
                    return lists_of(mask, self.config.form, self.consumers, tile, head, batch)

                sources = Sources(q, k, v)
                self.loads.load(sources, load_buffers, rings, lists, sizes, mTable, mCounter)
            elif warp <= self.consumers:
                pV = storage.sV.data_ptr()
                self.output.store(o, varlen, pV, handover, rings.v, warp - 1)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS[self.consumers])
            pV = storage.sV.data_ptr()
            buffers = ConsumerBuffers(sQ, sK, sV, words, tile_info, pV, handover)
            rows = RowTensors(mLse, mSinks, mTable, q_len, mK.shape[1])
            rule = ElementRule(mWords, lo, hi, None, mK.shape[1])
            self.consume(rows, buffers, rings, mRanges, rule, Scales(c, inner))

    @cute.jit
    def consume(
        self,
        rows: RowTensors,
        buffers: ConsumerBuffers,
        rings: Rings,
        mRanges: cute.Tensor | None,
        rule: ElementRule,
        scales: Scales,
    ):
        """Consumer warpgroup: 64 rows of each tile."""
        tile_info, handover, mTable = buffers.tile_info, buffers.handover, rows.mTable
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP
        row_sum = cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32)
        row_max = cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32)
        shape = self.tiles.pv_mma().get_slice(0).partition_shape_C((ROWS, self.value_dim))
        acc_o = cute.make_rmem_tensor(shape, cutlass.Float32)
        q_state = pipeline.consumer_state(1)
        o_phase = cutlass.Int32(0)
        if consumer == self.consumers - 1:
            self.give_turn(consumer)
        rings.q.consumer_wait(q_state)
        while tile_info.more():
            tile, head, batch = tile_info.coord()
            # m = -inf, l = 0; with a sink m = sink, l = 1
            softmax.start(row_max, row_sum)
            if cutlass.const_expr(rows.mSinks is not None):
                row = tile * self.rows + consumer * ROWS + lane // 32 * 16 + lane % 32 // 4
                gSinks = rows.mSinks[head, None]
                if cutlass.const_expr(self.packed):
                    if packed.pairs(mTable, row // BLOCK):
                        sinks.start(row_max, row_sum, gSinks, row, lane, scales.c)
                else:
                    sinks.start(row_max, row_sum, gSinks, row, lane, scales.c)
            acc_o.fill(0.0)
            ranges, kv_end = None, rows.kv_len
            if cutlass.const_expr(self.config.form == SPANS):
                ranges = mRanges[batch, None, None]
                kv_end -= spans.column_of_key_0(ranges)
            if cutlass.const_expr(self.packed):
                # Keys end where rows do, with the sequence.
                kv_end = packed.place_of(mTable, (tile * self.consumers + consumer) // 2).end
            state = output.SoftmaxState(acc_o, row_max, row_sum)
            after = tile_info.first_step()
            if tile_info.count() > 0:
                of_tile = ElementRule(rule.mWords, rule.lo, rule.hi, None, kv_end)
                mask = TileMask(buffers.words, ranges, of_tile)
                coord = ConsumerCoord(tile, consumer, lane, after)
                after = self.attend(buffers, rings, state, coord, mask, scales)
            # Read again: held through the loop above, it would take registers.
            tile, head, batch = tile_info.coord()
            rings.q.consumer_release(q_state)
            q_state.advance()
            # O = acc / l; LSE = ln l + ln 2 c m
            softmax.finish(row_sum)
            # This thread's first row, from the accumulator's layout (``softmax``).
            number = tile * self.consumers + consumer
            row = number * ROWS + lane // 32 * 16 + lane % 32 // 4
            end, shift = rows.q_len, 0
            if cutlass.const_expr(self.packed):
                of_block = packed.place_of(mTable, number // 2)
                shift, end = of_block.shift, of_block.end
            lse = output.LseRows(rows.mLse[batch, head, None], shift, end)
            self.output.normalise(state, lse, row, lane, scales.c)
            handover.await_empty(consumer, o_phase)
            for step in cutlass.range_constexpr(self.tiles.o_stages):
                stage = self.await_output(rings, after, step)
                if consumer // self.tiles.o_per_stage == step:
                    pO = self.output.pointer(buffers.pV, consumer, stage.index)
                    self.output.keep(acc_o, pO, lane)
                    info = output.OutputInfo(number, head, batch, stage.index)
                    handover.publish(consumer, lane, info)
                else:
                    rings.v.consumer_release(stage)
            o_phase = o_phase ^ 1
            rings.q.consumer_wait(q_state)
        handover.await_empty(consumer, o_phase)
        handover.publish(consumer, lane, output.OutputInfo(*(cutlass.Int32(-1),) * 4))
        if consumer == 0:
            # The last turn, which nobody takes.
            self.await_turn(consumer)

    def await_output(self, rings: Rings, after: cutlass.Int32, step: int) -> PipelineState:
        """Await a stage of V that the producer has left; that of K beside it is not used."""
        stage = merge.state_at(after, self.stages)
        for _ in range(step):
            stage.advance()
        rings.k.consumer_wait(stage)
        rings.k.consumer_release(stage)
        rings.v.consumer_wait(stage)
        return stage

    @cute.jit
    def attend(
        self,
        buffers: ConsumerBuffers,
        rings: Rings,
        state: output.SoftmaxState,
        coord: ConsumerCoord,
        mask: TileMask,
        scales: Scales,
    ):
        """Attend 64 rows of a tile to every block on their list, ascending.

        Returns the ring position after the last step.
        """
        tile, consumer, lane, rule = coord.tile, coord.consumer, coord.lane, mask.rule
        half = tile * self.consumers + consumer
        # Its list, and this thread's first row in the block of the mask; its second is 8 below.
        m, which = half // 2, half // 2 - tile * self.consumers // 2
        row = half % 2 * ROWS + lane // 32 * 16 + lane % 32 // 4
        bounds = None
        if cutlass.const_expr(self.config.form == SPANS):
            bounds = spans.between(mask.ranges, m * BLOCK + row)
        elif cutlass.const_expr(self.packed):
            bounds = packed.between(rule.lo, rule.hi, rule.kv_len, m * BLOCK + row)
        rule = ElementRule(rule.mWords, rule.lo, rule.hi, bounds, rule.kv_len)

        qk, pv = self.tiles.qk_mma(), self.tiles.pv_mma()
        slice_qk, slice_pv = qk.get_slice(consumer * mma.WARPGROUP), pv.get_slice(0)
        tSrQ = qk.make_fragment_A(slice_qk.partition_A(buffers.sQ))
        tSrK = qk.make_fragment_B(slice_qk.partition_B(buffers.sK))
        tOrV = pv.make_fragment_B(slice_pv.partition_B(buffers.sV))
        tOrP = pv.make_fragment_A(slice_pv.partition_shape_A((ROWS, BLOCK)))
        shape = slice_qk.partition_shape_C((self.rows, BLOCK))
        acc_s = cute.make_rmem_tensor(shape, cutlass.Float32)
        factor, shift = (cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32) for _ in range(2))
        bits = cute.make_rmem_tensor((score_mask.WORDS, softmax.ROWS), cutlass.Int32)

        operands = Operands(tSrQ, tSrK, tOrP, tOrV)
        registers = Registers(acc_s, state.acc_o, state.row_max, state.row_sum, factor, shift, bits)
        words = mask.words[which, None, None]
        on_list = ListCoord(consumer, lane, m, row, words, coord.first_step)
        return self.walk(operands, rings, registers, on_list, rule, scales)

    @cute.jit
    def walk(
        self,
        operands: Operands,
        rings: Rings,
        registers: Registers,
        coord: ListCoord,
        rule: ElementRule,
        scales: Scales,
    ):
        """Visit every block on the list of a consumer; returns the ring position after them."""
        rings.k.consumer_wait(merge.state_at(coord.first_step, self.stages))
        word = word_of(coord.words, self.stages)
        while self.absent(word) and word & merge.LAST == 0:
            word = self.skip(rings, coord, word)
        if self.absent(word):
            self.skip(rings, coord, word)
        else:
            word, following = self.visit(operands, rings, registers, coord, word, rule, scales)
            while word & merge.LAST == 0:
                word = following
                following = self.skip(rings, coord, word)
        stage = merge.state_of(word, self.stages)
        stage.advance()
        return merge.place_code(stage.index, stage.phase)

    @cute.jit
    def visit(
        self,
        operands: Operands,
        rings: Rings,
        registers: Registers,
        coord: ListCoord,
        word: cutlass.Int32,
        rule: ElementRule,
        scales: Scales,
    ):
        """Visit every block on the list, the first of ``word``; returns the last word and the next.

        Blocks with none between them that only the other list has are one pipeline.
        """
        tSrQ, tSrK, tOrP, tOrV = operands.tSrQ, operands.tSrK, operands.tOrP, operands.tOrV
        acc_s, acc_o, row_max, row_sum = (
            *(registers.acc_s, registers.acc_o),
            *(registers.row_max, registers.row_sum),
        )
        factor, shift, bits = registers.factor, registers.shift, registers.bits
        consumer, words, c = coord.consumer, coord.words, scales.c
        # S_0 = Q K_0ᵀ; m_0 = max t_0
        following = self.maxima(operands, rings.k, registers, coord, word, rule, scales, True)
        # P_0 = exp2(c (t_0 - m_0)); l_0 = Σ P_0
        rings.v.consumer_wait(merge.state_of(word, self.stages))
        softmax.exponentiate(acc_s, row_sum, factor, shift, c)
        self.round_weights(acc_s, tOrP)
        # The word of the step whose V P is yet to be multiplied by.
        of_p = word
        while word & merge.ENDS == 0:
            word = following
            while self.absent(word):
                word = self.skip(rings, coord, word)
            # S_n = Q K_nᵀ, and after it O += P_{n-1} V_{n-1}
            state, held = (merge.state_of(w, self.stages) for w in (word, of_p))
            rings.k.consumer_wait(state)
            element_mask.fetch(bits, self.config.form, word, coord, state.index, rule)
            self.await_turn(consumer)
            self.scores(acc_s, tSrQ, tSrK, state.index)
            self.add_values(acc_o, tOrP, tOrV, held.index)
            self.give_turn(consumer)
            following = word_of(words, state.index)
            warpgroup.wait_group(1)
            rings.k.consumer_release(state)
            # t_n as t_0; m_n = max(m_{n-1}, max t_n); factor = exp2(c (m_{n-1} - m_n))
            self.mask(acc_s, word, bits, coord, rule, scales)
            softmax.raise_max(acc_s, row_max, factor, shift, c)
            # P V has had the time of the maxima; ptxas moves its wait up to the last wait for
            # an mbarrier, which is therefore here.  What follows then fills the gaps between
            # exponentials.
            rings.v.consumer_wait(state)
            warpgroup.wait_group(0)
            rings.v.consumer_release(held)
            # P_n = exp2(c (t_n - m_n)); l_n = l_{n-1} factor + Σ P_n; O *= factor
            softmax.exponentiate(acc_s, row_sum, factor, shift, c)
            softmax.rescale(acc_o, factor)
            self.round_weights(acc_s, tOrP)
            of_p = word
        # O += P_last V_last
        held = merge.state_of(of_p, self.stages)
        self.add_values(acc_o, tOrP, tOrV, held.index)
        warpgroup.wait_group(0)
        rings.v.consumer_release(held)
        return word, following

    @cute.jit
    def maxima(
        self,
        operands: Operands,
        k_ring: PipelineTmaAsync,
        registers: Registers,
        coord: ListCoord,
        word: cutlass.Int32,
        rule: ElementRule,
        scales: Scales,
        turn: cutlass.Constexpr,
    ):
        """Compute S of a step, alone at the tensor cores, and the maxima of its rows.

        turn: whether its turn is still to come.  Returns the next word.
        """
        acc_s, bits = registers.acc_s, registers.bits
        state = merge.state_of(word, self.stages)
        k_ring.consumer_wait(state)
        element_mask.fetch(bits, self.config.form, word, coord, state.index, rule)
        if cutlass.const_expr(turn):
            self.await_turn(coord.consumer)
        # S = Q Kᵀ
        self.scores(acc_s, operands.tSrQ, operands.tSrK, state.index)
        self.give_turn(coord.consumer)
        following = word_of(coord.words, state.index)
        warpgroup.wait_group(0)
        k_ring.consumer_release(state)
        # t = S or tanh(S scale / softcap), -inf where masked; m' = max(m, max t); factor
        self.mask(acc_s, word, bits, coord, rule, scales)
        softmax.raise_max(acc_s, registers.row_max, registers.factor, registers.shift, scales.c)
        return following

    def absent(self, word: cutlass.Int32):
        """Return whether only the other list has the block; there is one with three consumers."""
        return word < 0 if self.consumers == 3 else cutlass.Boolean(False)

    @cute.jit
    def skip(self, rings: Rings, coord: ListCoord, word: cutlass.Int32):
        """Pass the turn and the stages of the other list's step on.  Returns the next word."""
        state = merge.state_of(word, self.stages)
        rings.k.consumer_wait(state)
        self.await_turn(coord.consumer)
        return self.give_on(rings, coord, state)

    @cute.jit
    def give_on(self, rings: Rings, coord: ListCoord, state: PipelineState):
        """Finish a skipped step in its turn.  Returns the next word."""
        self.give_turn(coord.consumer)
        following = word_of(coord.words, state.index)
        rings.k.consumer_release(state)
        rings.v.consumer_wait(state)
        rings.v.consumer_release(state)
        return following

    @cute.jit
    def scores(
        self, acc_s: cute.Tensor, tSrQ: cute.Tensor, tSrK: cute.Tensor, stage: cutlass.Int32
    ):
        """Issue S = Q K^T of one block."""
        mma.start(self.tiles.qk_mma(), acc_s, tSrQ, tSrK, 0, stage)

    @cute.jit
    def add_values(
        self, acc_o: cute.Tensor, tOrP: cute.Tensor, tOrV: cute.Tensor, stage: cutlass.Int32
    ):
        """Issue O += P V of one block."""
        mma.extend(self.tiles.pv_mma(), acc_o, tOrP, tOrV, stage)

    @cute.jit
    def mask(
        self,
        acc_s: cute.Tensor,
        word: cutlass.Int32,
        bits: cute.Tensor,
        coord: ListCoord,
        rule: ElementRule,
        scales: Scales,
    ):
        """Cap the scores of one block, and set them to -inf where a key is not allowed."""
        # t = tanh(S scale / softcap)
        if cutlass.const_expr(self.config.softcap):
            softmax.cap(acc_s, scales.inner)
        element_mask.apply(acc_s, self.config.form, word, bits, coord, rule)

    @cute.jit
    def round_weights(self, acc_s: cute.Tensor, tOrP: cute.Tensor):
        """Round P to the input dtype, WGMMA's register operand: the accumulator's order."""
        rP = cute.make_tensor(tOrP.iterator, acc_s.layout)
        if cutlass.const_expr(self.consumers == 3):
            softmax.round_pairs(acc_s, rP)
        else:
            # 3% faster where registers allow that P stays fp32 until it is multiplied.
            rP.store(acc_s.load().to(self.dtype))

    def await_turn(self, consumer: cutlass.Int32):
        """Wait until the consumer before this one has issued its products."""
        threads = 2 * mma.WARPGROUP
        cute.arch.barrier(barrier_id=TURN_BARRIER + consumer, number_of_threads=threads)

    def give_turn(self, consumer: cutlass.Int32):
        """Let the consumer after this one issue its products."""
        following = TURN_BARRIER + (consumer + 1) % self.consumers
        threads = 2 * mma.WARPGROUP
        cute.arch.barrier_arrive(barrier_id=following, number_of_threads=threads)


def word_of(words: cute.Tensor, stage: cutlass.Int32):
    """Return the word of a step, from the stage of the step before it."""
    return cute.arch.make_warp_uniform(words[0, stage])


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
        ints((fake.size(), BLOCK, score_mask.WORDS), fake.TMA_ALIGN),
        None,
    )
    ranges_alone = (None,) * 4 + (ints((batch, fake.size(), len(spans.FIELDS)), fake.TMA_ALIGN),)
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
        packed.fake_table() if config.packed else None,
        ints((1,)),
        cutlass.Int32(0),
        cutlass.Int32(0),
        cutlass.Float32(1.0),
        cutlass.Float32(0.0),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
