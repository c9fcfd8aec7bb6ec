"""O = Σ P V / Σ P with P = exp2(c (t - max t)), over the listed blocks of keys, on SM90.

t = S = Q K^T, c = scale log2 e; with a softcap t = tanh(S scale / softcap), c = softcap log2 e.

Layouts      Q [B, Sq, Hq, D], O with Dv columns, K [B, Sk, Hkv, D], V with Dv; last dimension
             contiguous, other strides multiples of 16 bytes; LSE fp32 [B, Hq, Sq], natural log;
             lists as in ``masks``, or (form "spans") int32 [B, Sq, 4] as in ``sequences``, of which
             lists are made here; rows beyond the last span see what it sees.  Sinks fp32 [Hq, Sq],
             any strides, or None.
Order        S: one fp32 accumulator, D ascending in k16 groups.  KV blocks of 128 ascending by
             absolute index.  A block: running maximum, O and the sum times exp2(c (m - m')), P
             rounded to the input dtype, then added to O in k16 groups of keys ascending.  Each of
             four lanes sums its own columns of a row; the lanes are added at the end (``softmax``).
             O is divided once, by multiplication with the reciprocal, and rounded once.
Sinks        a row's maximum and sum begin with its sink's, in lane 0, as behind a block that has a
             key of that score with a value of zeros.
Masks        by selection; a block without an allowed key leaves a row's state as it was, bit by
             bit.  Rows without any key: O = 0, LSE = -inf.
Keys         of form "spans": key 0 is the column that ``device/spans`` names, and blocks are
             counted from there, so that a sequence may lie anywhere in K and V.
Packs        (``packed``) of sequences that are read and written where they lie: batch 1, rows and
             keys counted as ``device/packed`` says, where the lists follow from; a sequence ends as
             Sq and Sk do elsewhere.  Tokens of none: O = 0, LSE = -inf, whatever the sinks.
Tails        TMA fills zeros beyond Sq and Sk; keys beyond Sk are masked, rows beyond Sq clipped.
Tiles        of 128 query rows of a head, or of 192, of two blocks of the mask.  A CTA takes one
             after another (``place``) until there are none.
Roles        warpgroup 0: one warp loads what either block lists (``merge``), of the next tile too;
             warpgroups 1, 2 (and 3): 64 rows each, against what their own block lists.  Q K^T of
             the next block is in flight with P V of this one, and the warpgroups take turns at
             issuing them.  O leaves through stages of V, by a warp of warpgroup 0 for each.
Limits       SM90a only; bf16 and fp16; D = Dv in {64, 96, 128}, and D = 192 with Dv = 128 (what
             ships for 96: ``kernel_fwd_apart_sm90``, for 256: ``kernel_fwd_wide_sm90``); lengths
             below 2^30; scale > 0.  P = 0 times a V that is Inf or NaN is NaN: V of a masked key in
             a visited block must be finite, V in other blocks need not.
Measured     on an H200: docs/status.md, docs/notes/attention_sm90.md.
"""

import functools

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import mma, pipeline, softmax, tma
from .config import HEAD_DIMS, VALUE_DIMS, ForwardConfig
from .device import merge, output, packed, score_mask, sinks, spans
from .device.forward_loads import Loads, Told
from .device.forward_tiles import BLOCK, ROWS, ForwardTiles
from .masks import FORWARD_FORMS, SPANS

#: By consumers: what the roles have of the (1 + consumers) times 168 or 128 that the launch gives.
PRODUCER_REGISTERS = {2: 24, 3: 32}
CONSUMER_REGISTERS = {2: 240, 3: 160}
#: Named barrier 0 is the CTA's.  Consumer w awaits its turn at 1 + w.
TURN_BARRIER = 1


class ForwardSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ForwardConfig):
        assert config.head_dim in HEAD_DIMS and config.form in FORWARD_FORMS
        self.config, self.packed = config, config.packed
        # Whether a thread knows what its rows see: the first and the last key of each.
        self.by_rows = config.packed or config.form == SPANS
        self.head_dim, self.value_dim = config.head_dim, VALUE_DIMS[config.head_dim]
        self.dtype = fake.DTYPES[config.dtype]
        assert config.consumers == 2 or config.head_dim <= 96
        assert config.kv_stages >= config.consumers, "V is awaited while V of another block is held"
        self.stages, self.parts = config.kv_stages, config.parts
        self.consumers, self.rows = config.consumers, config.rows
        what = self.dtype, self.head_dim, self.value_dim, self.consumers, self.stages, self.parts
        self.tiles = ForwardTiles(*what, self.packed)
        self.loads = Loads(self.tiles, config.form, config.patience)
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
        mSpans: cute.Tensor | None,
        mSinks: cute.Tensor | None,
        mPlace: cute.Tensor | None,
        mCounter: cute.Tensor,
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        c: cutlass.Float32,
        inner: cutlass.Float32,
        ctas: cutlass.Int32,
        stream,
    ):
        _, sK_layout, sV_layout = self.tiles.layouts()
        # [S, D, H, B], and [D, S, H, B] for V: its keys are the reduction dimension.
        by_rows, by_keys = [1, 3, 2, 0], [3, 1, 2, 0]
        of_q, of_o = (self.tiles.box_rows, self.head_dim), (ROWS, self.value_dim)
        q = tma.load(tma.view(mQ, by_rows), self.tiles.box_layout(), of_q, 1)
        k = tma.load(tma.view(mK, by_rows), sK_layout, self.tiles.k_box, 1)
        v = tma.load(tma.view(mV, by_keys), sV_layout, self.tiles.v_box[::-1], 1)
        o = tma.store(tma.view(mO, by_rows), self.tiles.o_layout(), of_o)

        self.storage = self.tiles.storage()
        pack = (mO, mPlace) if self.packed else None
        tensors = (mK, mLse, mCount, mEntry, mTile, mWords, mSpans, mSinks, pack, mCounter)
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
        mSpans: cute.Tensor | None,
        mSinks: cute.Tensor | None,
        pack: tuple[cute.Tensor, cute.Tensor] | None,
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
        told = Told(storage.told.get_tensor(cute.make_layout(5)))
        tail = storage.barriers.data_ptr() + self.tiles.barriers - 1
        if cutlass.const_expr(self.packed):
            packed.init(tail, tidx)
        of_o = storage.of_o.data_ptr()
        told_o = storage.told_o.get_tensor(cute.make_layout((4, self.consumers)))
        handover = output.Handover(of_o, of_o + self.consumers, told_o)
        if tidx == 0:
            handover.init(self.consumers)
        rings = self.make_rings(storage.barriers.data_ptr())
        batch, heads, q_len = mLse.shape
        table = None
        if cutlass.const_expr(self.packed):
            table = pack[1]
            q_len = packed.blocks_of(table) * BLOCK
        total = cute.ceil_div(q_len, self.rows) * heads * batch
        sizes = (total, q_len, heads, mK.shape[2])

        group = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS[self.consumers])
            if warp == 0:
                stored = (mCount, mEntry, mTile, mSpans, table, lo, hi)
                shared = (sQ, sK, sV), words, told, (tail, storage.sV.data_ptr()), table

                def lists_of(tile, head, batch):
                    return self.listing(stored, tile, head, batch)

                self.loads.load((q, k, v), shared, rings, lists_of, sizes, mCounter)
            elif warp <= self.consumers:
                where = storage.sV.data_ptr(), handover, rings[2]
                self.output.store(o, pack, *where, warp - 1)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS[self.consumers])
            buffers = (sQ, sK, sV), words, told, storage.sV.data_ptr(), handover
            mask = (mWords, mSpans, lo, hi)
            self.consume((mK, mLse, mSinks, table), buffers, rings, q_len, mask, c, inner)

    @cute.jit
    def listing(self, stored, tile, head, batch):
        """(the column of key 0, the list of each block of the mask that a tile has rows of)."""
        mCount, mEntry, mTile, mSpans, table, lo, hi = stored
        # Two consumers share a block of the mask, three have rows of two.
        blocks = [tile * self.consumers // 2 + n for n in range(self.consumers - 1)]
        column = cutlass.Int32(0)
        if cutlass.const_expr(self.config.form == SPANS):
            of_rows = mSpans[batch, None, None]
            column = spans.column_of_key_0(of_rows)
            lists = [spans.listing(of_rows, m, column) for m in blocks]
        elif cutlass.const_expr(self.packed):
            lists = [packed.listing(table, m, lo, hi) for m in blocks]
        else:
            # A mask of one batch or one head serves all of them.
            mask_batch = cutlass.min(batch, mCount.shape[0] - 1)
            mask_head = cutlass.min(head, mCount.shape[1] - 1)
            of_head = (
                mCount[mask_batch, mask_head, None],
                mEntry[mask_batch, mask_head, None, None],
                mTile[mask_batch, mask_head, None, None] if self.config.form == "bits" else None,
            )
            lists = [merge.listing(*of_head, m) for m in blocks]
        return column, lists

    @cute.jit
    def consume(self, tensors, buffers, rings, q_len, mask, c, inner):
        """A consumer warpgroup: 64 rows of each tile."""
        mK, mLse, mSinks, table = tensors
        operands, words, told, memory, handover = buffers
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
        rings[0].consumer_wait(q_state)
        while told.more():
            tile, head, batch = told.place()
            softmax.start(row_max, row_sum)
            if cutlass.const_expr(mSinks is not None):
                row = tile * self.rows + consumer * ROWS + lane // 32 * 16 + lane % 32 // 4
                sunk = mSinks[head, None], row, lane, c
                if cutlass.const_expr(self.packed):
                    if packed.pairs(table, row // BLOCK):
                        sinks.start(row_max, row_sum, *sunk)
                else:
                    sinks.start(row_max, row_sum, *sunk)
            acc_o.fill(0.0)
            of_rows, last = None, mK.shape[1]
            if cutlass.const_expr(self.config.form == SPANS):
                of_rows = mask[1][batch, None, None]
                last -= spans.column_of_key_0(of_rows)
            if cutlass.const_expr(self.packed):
                # Keys end where rows do, with the sequence.
                _, last = packed.place_of(table, (tile * self.consumers + consumer) // 2)
            state = (acc_o, row_max, row_sum)
            behind = told.first()
            if told.count() > 0:
                of_tile = (words, mask[0], of_rows, mask[2], mask[3], last)
                where = tile, consumer, lane, behind
                behind = self.attend(operands, rings, state, where, of_tile, c, inner)
            # Read again: it would have taken registers meanwhile.
            tile, head, batch = told.place()
            rings[0].consumer_release(q_state)
            q_state.advance()
            softmax.finish(row_sum)
            at = tile * self.consumers + consumer
            row = at * ROWS + lane // 32 * 16 + lane % 32 // 4
            end, shift = q_len, 0
            if cutlass.const_expr(self.packed):
                shift, end = packed.place_of(table, at // 2)
            self.output.normalise(state, mLse[batch, head, None], row, lane, end, c, shift)
            handover.await_room(consumer, o_phase)
            for step in cutlass.range_constexpr(self.tiles.o_stages):
                place = self.await_output(rings, behind, step)
                if consumer // self.tiles.o_per_stage == step:
                    own = self.output.place(memory, consumer, place.index)
                    self.output.keep(acc_o, own, lane)
                    handover.tell(consumer, lane, at, head, batch, place.index)
                else:
                    rings[2].consumer_release(place)
            o_phase = o_phase ^ 1
            rings[0].consumer_wait(q_state)
        handover.await_room(consumer, o_phase)
        handover.tell(consumer, lane, *(cutlass.Int32(-1),) * 4)
        if consumer == 0:
            # The last turn, which nobody takes.
            self.await_turn(consumer)

    def await_output(self, rings, behind, step: int):
        """A stage of V that the loading warp has left; that of K beside it is of no use."""
        place = merge.state_at(behind, self.stages)
        for _ in range(step):
            place.advance()
        rings[1].consumer_wait(place)
        rings[1].consumer_release(place)
        rings[2].consumer_wait(place)
        return place

    @cute.jit
    def attend(self, buffers, rings, state, where, mask, c, inner):
        """64 rows of a tile against every block on their list, ascending.

        Returns the place behind its last step in the rings.
        """
        (sQ, sK, sV), (tile, consumer, lane, first) = buffers, where
        half = tile * self.consumers + consumer
        # Its list, and this thread's first row in the block of the mask; its second is 8 below.
        m, which = half // 2, half // 2 - tile * self.consumers // 2
        row = half % 2 * ROWS + lane // 32 * 16 + lane % 32 // 4
        if cutlass.const_expr(self.config.form == SPANS):
            mask = (*mask[:3], *spans.between(mask[2], m * BLOCK + row), mask[5])
        elif cutlass.const_expr(self.packed):
            mask = (*mask[:3], *packed.between(*mask[3:], m * BLOCK + row), mask[5])

        qk, pv = self.tiles.qk_mma(), self.tiles.pv_mma()
        slice_qk, slice_pv = qk.get_slice(consumer * mma.WARPGROUP), pv.get_slice(0)
        tSrQ = qk.make_fragment_A(slice_qk.partition_A(sQ))
        tSrK = qk.make_fragment_B(slice_qk.partition_B(sK))
        tOrV = pv.make_fragment_B(slice_pv.partition_B(sV))
        tOrP = pv.make_fragment_A(slice_pv.partition_shape_A((ROWS, BLOCK)))
        shape = slice_qk.partition_shape_C((self.rows, BLOCK))
        acc_s = cute.make_rmem_tensor(shape, cutlass.Float32)
        factor, shift = (cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32) for _ in range(2))
        bits = cute.make_rmem_tensor((score_mask.WORDS, softmax.ROWS), cutlass.Int32)

        operands = (tSrQ, tSrK, tOrP, tOrV)
        of_rows = (acc_s, *state, factor, shift, bits)
        where = (consumer, lane, m, row, mask[0][which, None, None], first)
        return self.walk(operands, rings[1:], of_rows, where, mask, c, inner)

    @cute.jit
    def walk(self, operands, rings, of_rows, where, mask, c, inner):
        """Every block on the list of a consumer; returns the place behind them."""
        (k_ring, v_ring), (consumer, *_, words, first) = rings, where
        k_ring.consumer_wait(merge.state_at(first, self.stages))
        word = word_of(words, self.stages)
        while self.absent(word) and word & merge.LAST == 0:
            word = self.skip(k_ring, v_ring, consumer, word, words)
        if self.absent(word):
            self.skip(k_ring, v_ring, consumer, word, words)
        else:
            word, following = self.visit(operands, rings, of_rows, where, word, mask, c, inner)
            while word & merge.LAST == 0:
                word = following
                following = self.skip(k_ring, v_ring, consumer, word, words)
        place = merge.state_of(word, self.stages)
        place.advance()
        return merge.place_code(place.index, place.phase)

    @cute.jit
    def visit(self, operands, rings, of_rows, where, word, mask, c, inner):
        """Every block on the list, the first of ``word``; returns the last one's word and the next.

        Blocks with none between them that only the other list has are one pipeline.
        """
        (tSrQ, tSrK, tOrP, tOrV), (k_ring, v_ring) = operands, rings
        acc_s, acc_o, row_max, row_sum, factor, shift, bits = of_rows
        consumer, lane, m, row, words, _ = where
        # S_0 = Q K_0ᵀ; m_0 = max t_0
        following = self.maxima(operands, k_ring, of_rows, where, word, mask, (c, inner), True)
        # P_0 = exp2(c (t_0 - m_0)); l_0 = Σ P_0
        v_ring.consumer_wait(merge.state_of(word, self.stages))
        softmax.exponentiate(acc_s, row_sum, factor, shift, c)
        self.round_weights(acc_s, tOrP)
        # The word of the step whose V P is yet to be multiplied by.
        of_p = word
        while word & merge.ENDS == 0:
            word = following
            while self.absent(word):
                word = self.skip(k_ring, v_ring, consumer, word, words)
            # S_n = Q K_nᵀ, and behind it O += P_{n-1} V_{n-1}
            state, held = (merge.state_of(w, self.stages) for w in (word, of_p))
            k_ring.consumer_wait(state)
            self.fetch(bits, word, words, state.index, row, mask)
            self.await_turn(consumer)
            self.scores(acc_s, tSrQ, tSrK, state.index)
            self.add_values(acc_o, tOrP, tOrV, held.index)
            self.give_turn(consumer)
            following = word_of(words, state.index)
            warpgroup.wait_group(1)
            k_ring.consumer_release(state)
            # t_n as t_0; m_n = max(m_{n-1}, max t_n); factor = exp2(c (m_{n-1} - m_n))
            self.mask(acc_s, word, bits, row, lane, m, mask, inner)
            softmax.raise_max(acc_s, row_max, factor, shift, c)
            # P V has had the time of the maxima; ptxas moves its wait up to the last wait for
            # an mbarrier, which is therefore here.  What follows then fills the gaps between
            # exponentials.
            v_ring.consumer_wait(state)
            warpgroup.wait_group(0)
            v_ring.consumer_release(held)
            # P_n = exp2(c (t_n - m_n)); l_n = l_{n-1} factor + Σ P_n; O *= factor
            softmax.exponentiate(acc_s, row_sum, factor, shift, c)
            softmax.rescale(acc_o, factor)
            self.round_weights(acc_s, tOrP)
            of_p = word
        # O += P_last V_last
        held = merge.state_of(of_p, self.stages)
        self.add_values(acc_o, tOrP, tOrV, held.index)
        warpgroup.wait_group(0)
        v_ring.consumer_release(held)
        return word, following

    @cute.jit
    def maxima(self, operands, k_ring, of_rows, where, word, mask, scales, turn: cutlass.Constexpr):
        """S of a step, alone at the tensor cores, and the maxima of its rows.

        turn: whether its turn is still to come.  Returns the word behind it.
        """
        (tSrQ, tSrK, _, _), (c, inner) = operands, scales
        consumer, lane, m, row, words, _ = where
        acc_s, _, row_max, _, factor, shift, bits = of_rows
        state = merge.state_of(word, self.stages)
        k_ring.consumer_wait(state)
        self.fetch(bits, word, words, state.index, row, mask)
        if cutlass.const_expr(turn):
            self.await_turn(consumer)
        # S = Q Kᵀ
        self.scores(acc_s, tSrQ, tSrK, state.index)
        self.give_turn(consumer)
        following = word_of(words, state.index)
        warpgroup.wait_group(0)
        k_ring.consumer_release(state)
        # t = S or tanh(S scale / softcap), -inf where masked; m' = max(m, max t); factor
        self.mask(acc_s, word, bits, row, lane, m, mask, inner)
        softmax.raise_max(acc_s, row_max, factor, shift, c)
        return following

    def absent(self, word):
        """Whether only the other list has the block; there is one with three consumers."""
        return word < 0 if self.consumers == 3 else cutlass.Boolean(False)

    @cute.jit
    def skip(self, k_ring, v_ring, consumer, word, words):
        """A step for others: its turn and its stages are given on.  Returns the next word."""
        state = merge.state_of(word, self.stages)
        k_ring.consumer_wait(state)
        self.await_turn(consumer)
        return self.give_on(k_ring, v_ring, consumer, state, words)

    @cute.jit
    def give_on(self, k_ring, v_ring, consumer, state, words):
        """The end of ``skip``, in the step's turn."""
        self.give_turn(consumer)
        following = word_of(words, state.index)
        k_ring.consumer_release(state)
        v_ring.consumer_wait(state)
        v_ring.consumer_release(state)
        return following

    @cute.jit
    def fetch(self, bits, word, words, stage, row, mask):
        """The mask words of this thread's rows, on their way before the scores are asked for."""
        if cutlass.const_expr(self.config.form == "bits"):
            if word & merge.PARTIAL != 0:
                for half in cutlass.range_constexpr(softmax.ROWS):
                    at = (mask[1], words[1, stage], row + 8 * half, 0)
                    bits[None, half].store(score_mask.words_of(*at, score_mask.WORDS))

    @cute.jit
    def scores(self, acc_s, tSrQ, tSrK, stage):
        """S = Q K^T of one block, issued."""
        mma.start(self.tiles.qk_mma(), acc_s, tSrQ, tSrK, 0, stage)

    @cute.jit
    def add_values(self, acc_o, tOrP, tOrV, stage):
        """O += P V of one block, issued."""
        mma.extend(self.tiles.pv_mma(), acc_o, tOrP, tOrV, stage)

    @cute.jit
    def mask(self, acc_s, word, bits, row, lane, m, mask, inner):
        """The scores of one block, capped; -inf where a key is not allowed."""
        if cutlass.const_expr(self.config.softcap):
            softmax.cap(acc_s, inner)
        _, _, _, lo, hi, kv_len = mask
        key = (word >> merge.BLOCK_SHIFT) * BLOCK
        partial = word & merge.PARTIAL != 0
        last = kv_len - 1 - key
        if cutlass.const_expr(self.by_rows):
            if spans.hides(lo, hi, key):
                first, until = [at - key for at in lo], [at - key for at in hi]
                score_mask.keep_between(acc_s, lane, first, until)
        elif cutlass.const_expr(self.config.form == "band"):
            if partial or last < BLOCK - 1:
                # kv - q in [lo, hi] and kv < Sk, as columns of the block.
                at = m * BLOCK + row - key
                first = (at + lo, at + 8 + lo)
                until = (cutlass.min(at + hi, last), cutlass.min(at + 8 + hi, last))
                score_mask.keep_between(acc_s, lane, first, until)
        else:
            if cutlass.const_expr(self.config.form == "bits"):
                if partial:
                    score_mask.keep_bits(acc_s, lane, bits)
            if last < BLOCK - 1:
                score_mask.keep_between(acc_s, lane, (0, 0), (last, last))

    @cute.jit
    def round_weights(self, acc_s, tOrP):
        """P in the input dtype, as WGMMA's register operand: the accumulator's values in order."""
        rounded = cute.make_tensor(tOrP.iterator, acc_s.layout)
        if cutlass.const_expr(self.consumers == 3):
            softmax.round_pairs(acc_s, rounded)
        else:
            # 3% faster where registers allow that P stays fp32 until it is multiplied.
            rounded.store(acc_s.load().to(self.dtype))

    def make_rings(self, barriers):
        """The rings of Q, K and V, their barriers published to the CTA."""
        alone = cute.make_layout((1, 1, 1))
        rings, place, readers = [], 0, 4 * self.consumers
        counts = 1, self.stages, self.stages
        for stages, size in zip(counts, self.tiles.stage_bytes, strict=True):
            ring = pipeline.tma_ring(barriers + place, stages, size, readers, alone)
            rings.append(ring)
            place += 2 * stages
        pipeline.announce_barriers((1, 1))
        pipeline.await_barriers((1, 1))
        return tuple(rings)

    def await_turn(self, consumer):
        """Waits until the consumer before this one has issued its products."""
        threads = 2 * mma.WARPGROUP
        cute.arch.barrier(barrier_id=TURN_BARRIER + consumer, number_of_threads=threads)

    def give_turn(self, consumer):
        """Lets the consumer after this one issue its products."""
        following = TURN_BARRIER + (consumer + 1) % self.consumers
        threads = 2 * mma.WARPGROUP
        cute.arch.barrier_arrive(barrier_id=following, number_of_threads=threads)


def word_of(words, at):
    """The word of a step, from where the step before finds it."""
    return cute.arch.make_warp_uniform(words[0, at])


def build(config: ForwardConfig, compile=cute.compile, kernel=ForwardSm90):
    """Compiles one configuration against fake tensors; no GPU needed."""
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
    spans_alone = (None,) * 4 + (ints((batch, fake.size(), len(spans.FIELDS)), fake.TMA_ALIGN),)
    any_strides = (cute.sym_int64(), cute.sym_int64())
    lists = spans_alone if config.form == SPANS else stored
    lists = (None,) * 5 if config.packed else lists
    by_row = make_fake_tensor(cutlass.Float32, (heads, q_len), any_strides, assumed_align=4)
    width, of_values = config.head_dim, VALUE_DIMS[config.head_dim]

    def rows(length, heads, columns):
        return fake.activations(config.dtype, batch, length, heads, columns)

    return compile(
        kernel(config),
        rows(q_len, heads, width),
        rows(kv_len, kv_heads, width),
        rows(kv_len, kv_heads, of_values),
        rows(q_len, heads, of_values),
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
