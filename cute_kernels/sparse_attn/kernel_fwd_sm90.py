"""O = Σ P V / Σ P with P = exp2(c (t - max t)), over the listed blocks of keys, on SM90.

t = S = Q K^T, c = scale log2 e; with a softcap t = tanh(S scale / softcap), c = softcap log2 e.

Layouts      Q, O [B, Sq, Hq, D], K, V [B, Sk, Hkv, D], last dimension contiguous, other strides
             multiples of 16 bytes; LSE fp32 [B, Hq, Sq], natural log; lists as in ``masks``, or
             (form "spans") int32 [B, Sq, 4] as in ``sequences``, of which lists are made here; rows
             beyond the last span see what it sees.  Sinks fp32 [Hq, Sq], any strides, or None.
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
Tails        TMA fills zeros beyond Sq and Sk; keys beyond Sk are masked, rows beyond Sq clipped.
Roles        one CTA per 128 query rows of a head, or per 192, of two blocks of the mask.
             Warpgroup 0: one warp loads what either block lists (``merge``); warpgroups 1, 2 (and
             3): 64 rows each, against what their own block lists.  Q K^T of the next block is in
             flight with P V of this one, and the warpgroups take turns at issuing them.  O leaves
             through Q's buffer.
Limits       SM90a only; bf16 and fp16; D in {64, 96, 128}; lengths below 2^30; scale > 0.  P = 0
             times a V that is Inf or NaN is NaN: V of a masked key in a visited block must be
             finite, V in other blocks need not.
Measured     on an H200: docs/status.md, docs/notes/attention_sm90.md.
"""

import functools
import math

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ..compile import fake
from ..dsl import mma, pipeline, smem, softmax, tma
from .config import ForwardConfig
from .device import merge, place, score_mask, sinks, spans
from .masks import FORWARD_FORMS, SPANS

#: By consumers: what the roles have of the (1 + consumers) times 168 or 128 that the launch gives.
PRODUCER_REGISTERS = {2: 24, 3: 32}
CONSUMER_REGISTERS = {2: 240, 3: 160}
#: Query rows and keys of a block of the mask.
BLOCK = 128
#: Rows of a consumer warpgroup: half a block, so that it has one list.
ROWS = BLOCK // 2
#: Named barrier 0 is the CTA's; the consumers meet at 1, and consumer w awaits its turn at 2 + w.
EPILOGUE_BARRIER = 1
TURN_BARRIER = 2


class ForwardSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ForwardConfig):
        assert config.head_dim in (64, 96, 128) and config.form in FORWARD_FORMS
        self.config = config
        self.head_dim = config.head_dim
        self.dtype = fake.DTYPES[config.dtype]
        assert config.consumers == 2 or (config.consumers, config.head_dim) == (3, 64)
        assert config.kv_stages >= config.consumers, "V is awaited while V of another block is held"
        self.stages = config.kv_stages
        self.consumers = config.consumers
        self.rows = self.consumers * ROWS
        self.row_bytes = config.head_dim * self.dtype.width // 8

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
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        c: cutlass.Float32,
        inner: cutlass.Float32,
        stream,
    ):
        sQ_layout, sK_layout, sV_layout = self.shared_layouts()
        # [S, D, H, B], and [D, S, H, B] for V: its keys are the reduction dimension.
        by_rows, by_keys = [1, 3, 2, 0], [3, 1, 2, 0]
        q = tma.load(tma.view(mQ, by_rows), sQ_layout, (self.rows, self.head_dim), 1)
        k = tma.load(tma.view(mK, by_rows), sK_layout, (BLOCK, self.head_dim), 1)
        v = tma.load(tma.view(mV, by_keys), sV_layout, (self.head_dim, BLOCK), 1)
        o = tma.store(tma.view(mO, by_rows), sQ_layout, (self.rows, self.head_dim))

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * (1 + 2 * self.stages)]
            words: cute.struct.MemRange[cutlass.Int32, 4 * (1 + self.stages)]
            sQ: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sQ_layout)], smem.ALIGN
            ]
            sK: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sK_layout)], smem.ALIGN
            ]
            sV: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sV_layout)], smem.ALIGN
            ]

        self.storage = Storage
        batch, q_len, heads, _ = mQ.shape
        tiles = cute.ceil_div(q_len, self.rows) * heads * batch
        tensors = (mK, mLse, mCount, mEntry, mTile, mWords, mSpans, mSinks)
        self.kernel(q, k, v, o, *tensors, lo, hi, c, inner).launch(
            grid=(tiles, 1, 1),
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
        sQ_layout, sK_layout, sV_layout = self.shared_layouts()
        sQ = storage.sQ.get_tensor(sQ_layout.outer, swizzle=sQ_layout.inner)
        sK = storage.sK.get_tensor(sK_layout.outer, swizzle=sK_layout.inner)
        sV = storage.sV.get_tensor(sV_layout.outer, swizzle=sV_layout.inner)
        # By list, word or tile, and the stage of K a step before; the first step's come with its K.
        words = storage.words.get_tensor(cute.make_layout((2, 2, 1 + self.stages)))
        rings = self.make_rings(storage.barriers.data_ptr())

        q_len, kv_len = mLse.shape[2], mK.shape[1]
        tile, head, batch = place.tile_of(q_len, mLse.shape[1], self.rows)
        # Two consumers share a block of the mask, three have rows of two.
        blocks = [tile * self.consumers // 2 + n for n in range(self.consumers - 1)]
        column = cutlass.Int32(0)
        if cutlass.const_expr(self.config.form == SPANS):
            of_rows = mSpans[batch, None, None]
            column = spans.column_of_key_0(of_rows)
            lists = [spans.listing(of_rows, m, column) for m in blocks]
        else:
            of_rows = None
            # A mask of one batch or one head serves all of them.
            mask_batch = cutlass.min(batch, mCount.shape[0] - 1)
            mask_head = cutlass.min(head, mCount.shape[1] - 1)
            stored = (
                mCount[mask_batch, mask_head, None],
                mEntry[mask_batch, mask_head, None, None],
                mTile[mask_batch, mask_head, None, None] if self.config.form == "bits" else None,
            )
            lists = [merge.listing(*stored, m) for m in blocks]
        count = lists[0][0] + lists[-1][0]
        kv_head = place.kv_head_of(head, mLse.shape[1], mK.shape[2])
        own = (matrix_of(q, head, batch), *(matrix_of(t, kv_head, batch) for t in (k, v)))
        o = matrix_of(o, head, batch)

        group = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS[self.consumers])
            if warp == 0 and count > 0:
                self.load(own, (sQ, sK, sV), rings, words, (tile, column), lists)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS[self.consumers])
            row_sum = cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32)
            row_max = cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32)
            pv = self.pv_mma()
            acc_o = cute.make_rmem_tensor(
                pv.get_slice(0).partition_shape_C((ROWS, self.head_dim)), cutlass.Float32
            )
            softmax.start(row_max, row_sum)
            if cutlass.const_expr(mSinks is not None):
                consumer, lane = group - 1, tidx % mma.WARPGROUP
                row = tile * self.rows + consumer * ROWS + lane // 32 * 16 + lane % 32 // 4
                sinks.start(row_max, row_sum, mSinks[head, None], row, lane, c)
            acc_o.fill(0.0)
            if count > 0:
                mask = (words, mWords, of_rows, lo, hi, kv_len - column)
                state = (acc_o, row_max, row_sum)
                self.attend((sQ, sK, sV), rings, state, tile, mask, c, inner)
            softmax.finish(row_sum)
            self.store((acc_o, row_max, row_sum), o, sQ, mLse[batch, head, None], tile, q_len, c)

    @cute.jit
    def load(self, sources, buffers, rings, words, place, lists):
        """The producer warp: the Q tile, then K and V of every block on a list, ascending.

        K runs one block ahead of V, as its readers do.
        """
        (q, k, v), (sQ, sK, sV), (q_ring, k_ring, v_ring) = sources, buffers, rings
        tile, column = place
        k_tensor, v_tensor = k.tensor, v.tensor
        if cutlass.const_expr(self.config.form == SPANS):
            k_tensor = cute.domain_offset((column, 0), k_tensor)
            v_tensor = cute.domain_offset((0, column), v_tensor)
        # (rows, D, blocks), and (D, keys, blocks) for V.
        gQ = cute.local_tile(q.tensor, (self.rows, self.head_dim), (None, 0))
        gK = cute.local_tile(k_tensor, (BLOCK, self.head_dim), (None, 0))
        gV = cute.local_tile(v_tensor, (self.head_dim, BLOCK), (0, None))
        alone = cute.make_layout(1)
        tQsQ, tQgQ = tma.partition(q.atom, 0, alone, sQ, gQ)
        tKsK, tKgK = tma.partition(k.atom, 0, alone, sK, gK)
        tVsV, tVgV = tma.partition(v.atom, 0, alone, sV, gV)

        # A consumer awaits V while it holds V of its last block, which is in another stage then.
        patience = self.stages - 2
        first = pipeline.producer_state(1)
        q_ring.producer_acquire(first)
        full = q_ring.producer_get_barrier(first)
        cute.copy(q.atom, tQgQ[None, tile], tQsQ[None, 0], tma_bar_ptr=full)
        at = merge.cursor(lists)
        block = merge.step(lists, at, words[None, None, self.stages], patience)
        state_k = pipeline.producer_state(self.stages)
        state_v = pipeline.producer_state(self.stages)
        before = cutlass.Int32(merge.END)
        while block < merge.END:
            k_ring.sync_object_empty.wait(state_k.index, state_k.phase)
            following = merge.step(lists, at, words[None, None, state_k.index], patience)
            self.load_block(k.atom, tKgK, tKsK, k_ring, state_k, block)
            state_k.advance()
            if before < merge.END:
                self.load_block(v.atom, tVgV, tVsV, v_ring, state_v, before)
                state_v.advance()
            before, block = block, following
        self.load_block(v.atom, tVgV, tVsV, v_ring, state_v, before)

    @cute.jit
    def load_block(self, atom, source, target, ring, state, block):
        """One block of K or V into the ring's next free stage."""
        ring.producer_acquire(state)
        full = ring.producer_get_barrier(state)
        cute.copy(atom, source[None, block], target[None, state.index], tma_bar_ptr=full)

    @cute.jit
    def attend(self, buffers, rings, state, tile, mask, c, inner):
        """A consumer warpgroup: its 64 rows against every block on its list, ascending.

        Its blocks with none between them that only the other list has are one pipeline.
        """
        (sQ, sK, sV), (q_ring, k_ring, v_ring) = buffers, rings
        acc_o, row_max, row_sum = state
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP
        half = tile * self.consumers + consumer
        # Its list, and this thread's first row in the block of the mask; its second is 8 below.
        m, which = half // 2, half // 2 - tile * self.consumers // 2
        row = half % 2 * ROWS + lane // 32 * 16 + lane % 32 // 4
        if cutlass.const_expr(self.config.form == SPANS):
            mask = (*mask[:3], *spans.between(mask[2], m * BLOCK + row), mask[5])

        qk, pv = self.qk_mma(), self.pv_mma()
        slice_qk, slice_pv = qk.get_slice(consumer * mma.WARPGROUP), pv.get_slice(0)
        tSrQ = qk.make_fragment_A(slice_qk.partition_A(sQ))
        tSrK = qk.make_fragment_B(slice_qk.partition_B(sK))
        tOrV = pv.make_fragment_B(slice_pv.partition_B(sV))
        tOrP = pv.make_fragment_A(slice_pv.partition_shape_A((ROWS, BLOCK)))
        shape = slice_qk.partition_shape_C((self.rows, BLOCK))
        acc_s = cute.make_rmem_tensor(shape, cutlass.Float32)
        factor, shift = (cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32) for _ in range(2))
        bits = cute.make_rmem_tensor((score_mask.WORDS, softmax.ROWS), cutlass.Int32)

        # Where K of a step is, and V in its own ring; and V that P is yet to be multiplied by.
        state = pipeline.consumer_state(self.stages)
        of_p = pipeline.consumer_state(self.stages)
        words = mask[0][which, None, None]
        # Without keys too: O goes where Q comes.
        q_ring.consumer_wait(pipeline.consumer_state(1))
        if consumer == self.consumers - 1:
            self.give_turn(consumer)
        word = self.first_word(k_ring, state, words)
        while self.absent(word) and word & merge.LAST == 0:
            word = self.skip(k_ring, v_ring, state, consumer, word, words)
            state.advance()
        if self.absent(word):
            self.skip(k_ring, v_ring, state, consumer, word, words)
        else:
            # S_0 = Q K_0ᵀ
            k_ring.consumer_wait(state)
            self.fetch(bits, word, words, state.index, row, mask)
            self.await_turn(consumer)
            self.scores(acc_s, tSrQ, tSrK, state.index)
            self.give_turn_after(consumer, word)
            following = word_of(words, state.index)
            warpgroup.wait_group(0)
            k_ring.consumer_release(state)
            # t_0 = S_0 or tanh(S_0 scale / softcap), -inf where masked; m_0 = max t_0
            self.mask(acc_s, word, bits, row, lane, m, mask, inner)
            softmax.raise_max(acc_s, row_max, factor, shift, c)
            # P_0 = exp2(c (t_0 - m_0)); l_0 = Σ P_0
            v_ring.consumer_wait(state)
            softmax.exponentiate(acc_s, row_sum, factor, shift, c)
            self.round_weights(acc_s, tOrP)
            of_p = state.clone()
            while word & merge.ENDS == 0:
                state.advance()
                word = following
                while self.absent(word):
                    word = self.skip(k_ring, v_ring, state, consumer, word, words)
                    state.advance()
                # S_n = Q K_nᵀ, and behind it O += P_{n-1} V_{n-1}
                k_ring.consumer_wait(state)
                self.fetch(bits, word, words, state.index, row, mask)
                self.await_turn(consumer)
                self.scores(acc_s, tSrQ, tSrK, state.index)
                self.add_values(acc_o, tOrP, tOrV, of_p.index)
                self.give_turn_after(consumer, word)
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
                v_ring.consumer_release(of_p)
                # P_n = exp2(c (t_n - m_n)); l_n = l_{n-1} factor + Σ P_n; O *= factor
                softmax.exponentiate(acc_s, row_sum, factor, shift, c)
                softmax.rescale(acc_o, factor)
                self.round_weights(acc_s, tOrP)
                of_p = state.clone()
            # O += P_last V_last
            self.add_values(acc_o, tOrP, tOrV, of_p.index)
            warpgroup.wait_group(0)
            v_ring.consumer_release(of_p)
            while word & merge.LAST == 0:
                state.advance()
                word = following
                following = self.skip(k_ring, v_ring, state, consumer, word, words)

    def first_word(self, k_ring, state, words):
        """The word of the first step, which comes with its K."""
        k_ring.consumer_wait(state)
        return word_of(words, self.stages)

    def absent(self, word):
        """Whether only the other list has the block; there is one with three consumers."""
        return word < 0 if self.consumers == 3 else cutlass.Boolean(False)

    @cute.jit
    def skip(self, k_ring, v_ring, state, consumer, word, words):
        """A step for others: its turn and its stages are given on.  Returns the next word."""
        k_ring.consumer_wait(state)
        self.await_turn(consumer)
        self.give_turn_after(consumer, word)
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
        mma.start(self.qk_mma(), acc_s, tSrQ, tSrK, 0, stage)

    @cute.jit
    def add_values(self, acc_o, tOrP, tOrV, stage):
        """O += P V of one block, issued."""
        mma.extend(self.pv_mma(), acc_o, tOrP, tOrV, stage)

    @cute.jit
    def mask(self, acc_s, word, bits, row, lane, m, mask, inner):
        """The scores of one block, capped; -inf where a key is not allowed."""
        if cutlass.const_expr(self.config.softcap):
            softmax.cap(acc_s, inner)
        _, _, _, lo, hi, kv_len = mask
        key = (word >> merge.BLOCK_SHIFT) * BLOCK
        partial = word & merge.PARTIAL != 0
        last = kv_len - 1 - key
        if cutlass.const_expr(self.config.form == "band"):
            if partial or last < BLOCK - 1:
                # kv - q in [lo, hi] and kv < Sk, as columns of the block.
                at = m * BLOCK + row - key
                first = (at + lo, at + 8 + lo)
                until = (cutlass.min(at + hi, last), cutlass.min(at + 8 + hi, last))
                score_mask.keep_between(acc_s, lane, first, until)
        elif cutlass.const_expr(self.config.form == SPANS):
            if spans.hides(lo, hi, key):
                first, until = [at - key for at in lo], [at - key for at in hi]
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

    @cute.jit
    def store(self, state, o, sQ, rows, tile, q_len, c):
        """O = round(acc / sum) through the buffer of Q; LSE = ln(sum) + ln 2 c max.

        A warpgroup writes over the rows of Q that it alone has read.
        """
        acc_o, row_max, row_sum = state
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP
        row = tile * self.rows + consumer * ROWS + lane // 32 * 16 + lane % 32 // 4
        for half in cutlass.range_constexpr(softmax.ROWS):
            empty = row_sum[half] == 0.0
            self.normalise(acc_o, half, empty, cute.arch.rcp_approx(row_sum[half]))
            log2 = cute.math.fma(row_max[half], c, cute.math.log2(row_sum[half], fastmath=True))
            lse = -cutlass.Float32.inf if empty else log2 * cutlass.Float32(math.log(2.0))
            if lane % 4 == 0 and row + 8 * half < q_len:
                rows[row + 8 * half] = lse

        rO = cute.make_rmem_tensor(acc_o.layout, self.dtype)
        rO.store(acc_o.load().to(self.dtype))
        atom = hopper_helpers.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, cutlass.Float32)
        tiled_copy = cute.make_tiled_copy_C(atom, self.pv_mma())
        copy = tiled_copy.get_slice(lane)
        sO = cute.local_tile(sQ, (ROWS, self.head_dim, 1), (consumer, 0, 0))
        cute.copy(tiled_copy, copy.retile(rO), copy.partition_D(sO)[None, None, None, 0])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()
        gO_tile = cute.local_tile(o.tensor, (self.rows, self.head_dim), (None, 0))
        tOsO, tOgO = tma.partition(o.atom, 0, cute.make_layout(1), sQ, gO_tile)
        if tidx == mma.WARPGROUP:
            cute.copy(o.atom, tOsO[None, 0], tOgO[None, tile])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def normalise(self, acc_o, half: cutlass.Constexpr, empty, inverse):
        """A row of O times 1 / sum; +0 for a row without keys.

        And +0 for -0, which would show whether other rows made the tile add a block of zeros.
        """
        for i in cutlass.range_constexpr(cute.size(acc_o) // 4):
            for side in cutlass.range_constexpr(2):
                at = 4 * i + 2 * half + side
                value = cute.math.fma(acc_o[at], inverse, cutlass.Float32(0.0))
                acc_o[at] = cutlass.Float32(0.0) if empty else value

    def qk_mma(self) -> cute.TiledMma:
        """Q K^T: both operands from shared memory, the consumers stacked along the rows."""
        return mma.tiled_mma(self.dtype, "k", "k", self.consumers, BLOCK)

    def pv_mma(self) -> cute.TiledMma:
        """P V of one consumer: P from registers, V with its keys along the reduction."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            cutlass.Float32,
            (1, 1, 1),
            (ROWS, self.head_dim),
            warpgroup.OperandSource.RMEM,
        )

    def shared_layouts(self):
        """The layouts of Q, which is O's too, and of the stages of K and V."""
        dtype, width, stages = self.dtype, self.head_dim, self.stages
        return (
            smem.operand_layout(dtype, self.rows, width, "k", 1),
            smem.operand_layout(dtype, BLOCK, width, "k", stages),
            smem.operand_layout(dtype, width, BLOCK, "mn", stages),
        )

    def make_rings(self, barriers):
        """The rings of Q, K and V, their barriers published to the CTA."""
        alone = cute.make_layout((1, 1, 1))
        rings, place = [], 0
        for stages, rows in ((1, self.rows), (self.stages, BLOCK), (self.stages, BLOCK)):
            size, readers = rows * self.row_bytes, 4 * self.consumers
            ring = pipeline.tma_ring(barriers + place, stages, size, readers, alone)
            rings.append(ring)
            place += 2 * stages
        pipeline.announce_barriers((1, 1))
        pipeline.await_barriers((1, 1))
        return tuple(rings)

    def sync(self):
        """The consumers meet."""
        threads = self.consumers * mma.WARPGROUP
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=threads)

    def await_turn(self, consumer):
        """Waits until the consumer before this one has issued its products."""
        threads = 2 * mma.WARPGROUP
        cute.arch.barrier(barrier_id=TURN_BARRIER + consumer, number_of_threads=threads)

    def give_turn(self, consumer):
        """Lets the consumer after this one issue its products."""
        following = TURN_BARRIER + (consumer + 1) % self.consumers
        threads = 2 * mma.WARPGROUP
        cute.arch.barrier_arrive(barrier_id=following, number_of_threads=threads)

    @cute.jit
    def give_turn_after(self, consumer, word):
        """Consumer 0 takes the first turn, and the last consumer the last."""
        if consumer < self.consumers - 1 or word & merge.LAST == 0:
            self.give_turn(consumer)


def word_of(words, at):
    """The word of a step, from where the step before finds it."""
    return cute.arch.make_warp_uniform(words[0, at])


def matrix_of(source, head, batch):
    """One head's matrix of a source [rows, columns, heads, batches]."""
    return tma.Source(source.atom, source.tensor[None, None, head, batch])


def build(config: ForwardConfig, compile=cute.compile):
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
    by_row = make_fake_tensor(cutlass.Float32, (heads, q_len), any_strides, assumed_align=4)
    width = config.head_dim

    def rows(length, heads):
        return fake.activations(config.dtype, batch, length, heads, width)

    return compile(
        ForwardSm90(config),
        rows(q_len, heads),
        rows(kv_len, kv_heads),
        rows(kv_len, kv_heads),
        rows(q_len, heads),
        fake.compact(cutlass.Float32, (batch, heads, q_len)),
        *(spans_alone if config.form == SPANS else stored),
        by_row if config.sinks else None,
        cutlass.Int32(0),
        cutlass.Int32(0),
        cutlass.Float32(1.0),
        cutlass.Float32(0.0),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
