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
Packs        (``packed``) of sequences that are read and written where they lie: batch 1, rows and
             keys counted as ``device/packed`` says, where the lists follow from; a sequence ends as
             Sq and Sk do elsewhere.  Tokens of none: O = 0, LSE = -inf, whatever the sinks.
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

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import mma, pipeline, softmax, tma
from .config import ForwardConfig
from .device import merge, output, packed, place, score_mask, sinks, spans
from .device.forward_tiles import BLOCK, ROWS, ForwardTiles
from .masks import FORWARD_FORMS, SPANS

#: By consumers: what the roles have of the (1 + consumers) times 168 or 128 that the launch gives.
PRODUCER_REGISTERS = {2: 24, 3: 32}
CONSUMER_REGISTERS = {2: 240, 3: 160}
#: Named barrier 0 is the CTA's, 1 that of ``output``; consumer w awaits its turn at 2 + w.
TURN_BARRIER = 2


class ForwardSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ForwardConfig):
        assert config.head_dim in (64, 96, 128) and config.form in FORWARD_FORMS
        self.config, self.packed = config, config.packed
        # Whether a thread knows what its rows see: the first and the last key of each.
        self.by_rows = config.packed or config.form == SPANS
        self.head_dim = config.head_dim
        self.dtype = fake.DTYPES[config.dtype]
        assert config.consumers == 2 or (config.consumers, config.head_dim) == (3, 64)
        assert config.kv_stages >= config.consumers, "V is awaited while V of another block is held"
        self.stages = config.kv_stages
        self.consumers = config.consumers
        self.rows = self.consumers * ROWS
        what = self.dtype, config.head_dim, self.consumers, self.stages, self.packed
        self.tiles = ForwardTiles(*what)
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
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        c: cutlass.Float32,
        inner: cutlass.Float32,
        stream,
    ):
        sQ_layout, sK_layout, sV_layout = self.tiles.layouts()
        box, box_shape = self.tiles.box_layout(), (self.tiles.box_rows, self.head_dim)
        # [S, D, H, B], and [D, S, H, B] for V: its keys are the reduction dimension.
        by_rows, by_keys = [1, 3, 2, 0], [3, 1, 2, 0]
        q = tma.load(tma.view(mQ, by_rows), box, box_shape, 1)
        k = tma.load(tma.view(mK, by_rows), sK_layout, (BLOCK, self.head_dim), 1)
        v = tma.load(tma.view(mV, by_keys), sV_layout, (self.head_dim, BLOCK), 1)
        o = tma.store(tma.view(mO, by_rows), box, box_shape)

        self.storage = self.tiles.storage()
        batch, q_len, heads, _ = mQ.shape
        if cutlass.const_expr(self.packed):
            q_len = mPlace.shape[0] * BLOCK
        tiles = cute.ceil_div(q_len, self.rows) * heads * batch
        pack = (mO, mPlace) if self.packed else None
        tensors = (mK, mLse, mCount, mEntry, mTile, mWords, mSpans, mSinks, pack)
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
        pack: tuple[cute.Tensor, cute.Tensor] | None,
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        c: cutlass.Float32,
        inner: cutlass.Float32,
    ):
        tensors = (mK, mLse, mCount, mEntry, mTile, mWords, mSpans, mSinks, pack)
        numbers = (lo, hi, c, inner)
        if cutlass.const_expr(self.packed):
            tile, _, _ = place.tile_of(pack[1].shape[0] * BLOCK, mLse.shape[1], self.rows)
            # Blocks that are not in use, whose end is 0, are behind all that are.
            _, end = packed.place_of(pack[1], tile * self.rows // BLOCK)
            if end > 0:
                self.run((q, k, v, o), tensors, numbers)
            else:
                # Rule R6 of the certificate counts what a path without it would hold.
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS[self.consumers])
        else:
            self.run((q, k, v, o), tensors, numbers)

    @cute.jit
    def run(self, sources, tensors, numbers):
        """What a CTA does."""
        (q, k, v, o), (lo, hi, c, inner) = sources, numbers
        mK, mLse, mCount, mEntry, mTile, mWords, mSpans, mSinks, pack = tensors
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for source in (q, k, v, o):
                cpasync.prefetch_descriptor(source.atom)

        storage = SmemAllocator().allocate(self.storage)
        sQ_layout, sK_layout, sV_layout = self.tiles.layouts()
        sQ = storage.sQ.get_tensor(sQ_layout.outer, swizzle=sQ_layout.inner)
        sK = storage.sK.get_tensor(sK_layout.outer, swizzle=sK_layout.inner)
        sV = storage.sV.get_tensor(sV_layout.outer, swizzle=sV_layout.inner)
        # By list, word or tile, and the stage of K a step before; the first step's come with its K.
        words = storage.words.get_tensor(cute.make_layout((2, 2, 1 + self.stages)))
        if cutlass.const_expr(self.packed):
            packed.init(storage.barriers.data_ptr() + self.tiles.barriers - 1, tidx)
        rings = self.make_rings(storage.barriers.data_ptr())

        q_len, kv_len = mLse.shape[2], mK.shape[1]
        if cutlass.const_expr(self.packed):
            q_len = pack[1].shape[0] * BLOCK
        tile, head, batch = place.tile_of(q_len, mLse.shape[1], self.rows)
        # Two consumers share a block of the mask, three have rows of two.
        blocks = [tile * self.consumers // 2 + n for n in range(self.consumers - 1)]
        column = cutlass.Int32(0)
        if cutlass.const_expr(self.config.form == SPANS):
            of_rows = mSpans[batch, None, None]
            column = spans.column_of_key_0(of_rows)
            lists = [spans.listing(of_rows, m, column) for m in blocks]
        elif cutlass.const_expr(self.packed):
            of_rows = None
            lists = [packed.listing(pack[1], m, lo, hi) for m in blocks]
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
                tail = storage.barriers.data_ptr() + self.tiles.barriers - 1, storage.sV.data_ptr()
                where = tile, column, pack[1] if self.packed else None, tail
                self.load(own, (sQ, sK, sV), rings, words, where, lists)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS[self.consumers])
            row_sum = cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32)
            row_max = cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32)
            pv = self.tiles.pv_mma()
            acc_o = cute.make_rmem_tensor(
                pv.get_slice(0).partition_shape_C((ROWS, self.head_dim)), cutlass.Float32
            )
            softmax.start(row_max, row_sum)
            if cutlass.const_expr(mSinks is not None):
                consumer, lane = group - 1, tidx % mma.WARPGROUP
                row = tile * self.rows + consumer * ROWS + lane // 32 * 16 + lane % 32 // 4
                sunk = (mSinks[head, None], row, lane, c)
                if cutlass.const_expr(self.packed):
                    first, last = packed.sequence_of(pack[1], row // BLOCK)
                    if first <= last:
                        sinks.start(row_max, row_sum, *sunk)
                else:
                    sinks.start(row_max, row_sum, *sunk)
            acc_o.fill(0.0)
            end = kv_len - column
            if cutlass.const_expr(self.packed):
                # Keys end where rows do, with the sequence.
                _, end = packed.place_of(pack[1], (tile * self.consumers + group - 1) // 2)
            state = (acc_o, row_max, row_sum)
            if count > 0:
                mask = (words, mWords, of_rows, lo, hi, end)
                self.attend((sQ, sK, sV), rings, state, tile, mask, c, inner)
            softmax.finish(row_sum)
            table = pack[1] if self.packed else None
            end = end if self.packed else q_len
            self.output.normalise(state, mLse[batch, head, None], tile, end, c, table)
            self.output.keep(acc_o, sQ)
            if cutlass.const_expr(self.packed):
                self.output.store_of_pack(o, sQ, (storage.sQ.data_ptr(), *pack, head), tile)
            else:
                self.output.store(o, sQ, tile)

    @cute.jit
    def load(self, sources, buffers, rings, words, where, lists):
        """The producer warp: the Q tile, then K and V of every block on a list, ascending.

        K runs one block ahead of V, as its readers do.
        """
        (q, k, v), (sQ, sK, sV), (q_ring, k_ring, v_ring) = sources, buffers, rings
        tile, column, table, tail = where
        # A consumer awaits V while it holds V of its last block, which is in another stage then.
        patience = self.stages - 2
        first = pipeline.producer_state(1)
        q_ring.producer_acquire(first)
        full = q_ring.producer_get_barrier(first)
        if cutlass.const_expr(self.packed):
            for n in cutlass.range_constexpr(self.rows // self.tiles.box_rows):
                s, g = self.tiles.box(q, sQ, self.output.box_place(table, tile, n)[0], n)
                cute.copy(q.atom, g, s, tma_bar_ptr=full)
        else:
            gQ = cute.local_tile(q.tensor, (self.rows, self.head_dim), (None, 0))
            tQsQ, tQgQ = tma.partition(q.atom, 0, cute.make_layout(1), sQ, gQ)
            cute.copy(q.atom, tQgQ[None, tile], tQsQ[None, 0], tma_bar_ptr=full)
        at = merge.cursor(lists)
        block = merge.step(lists, at, words[None, None, self.stages], patience)
        state_k = pipeline.producer_state(self.stages)
        state_v = pipeline.producer_state(self.stages)
        phases = cute.make_rmem_tensor((1,), cutlass.Int32)
        phases.fill(0)
        of_k, of_v = (k, sK, k_ring), (v, sV, v_ring)
        where = column, table, tail, phases
        before = cutlass.Int32(merge.END)
        while block < merge.END:
            k_ring.sync_object_empty.wait(state_k.index, state_k.phase)
            following = merge.step(lists, at, words[None, None, state_k.index], patience)
            self.load_block(of_k, state_k, block, where)
            state_k.advance()
            if before < merge.END:
                self.load_block(of_v, state_v, before, where, True)
                state_v.advance()
            before, block = block, following
        self.load_block(of_v, state_v, before, where, True)

    @cute.jit
    def load_block(self, what, state, block, where, values: cutlass.Constexpr = False):
        """One block of K or V into the ring's next free stage."""
        (source, buffer, ring), (column, table, tail, phases) = what, where
        end = block * BLOCK + BLOCK
        if cutlass.const_expr(self.packed):
            shift, end = packed.place_of(table, block)
            column = -shift
        s, g = self.blocks(source, buffer, column, values)
        if cutlass.const_expr(self.packed and values):
            inside = end - block * BLOCK
            if inside < BLOCK:
                barrier, memory = tail
                ring.sync_object_empty.wait(state.index, state.phase)
                packed.expect(barrier, BLOCK * self.tiles.row_bytes)
                cute.copy(source.atom, g[None, block], s[None, state.index], tma_bar_ptr=barrier)
                memory += state.index * BLOCK * self.head_dim
                full = ring.producer_get_barrier(state)
                packed.clean(barrier, phases, memory, self.tiles.of_v, inside, full)
            else:
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(source.atom, g[None, block], s[None, state.index], tma_bar_ptr=full)
        else:
            ring.producer_acquire(state)
            full = ring.producer_get_barrier(state)
            cute.copy(source.atom, g[None, block], s[None, state.index], tma_bar_ptr=full)

    def blocks(self, source, buffer, column, values: bool):
        """(shared, global) views of K or V, a block first; key 0 is in ``column``."""
        tensor, shape, blocks = source.tensor, (BLOCK, self.head_dim), (None, 0)
        moved = (column, 0)
        if values:  # [D, keys]
            shape, blocks, moved = shape[::-1], blocks[::-1], moved[::-1]
        if self.config.form == SPANS or self.packed:
            tensor = cute.domain_offset(moved, tensor)
        tiles = cute.local_tile(tensor, shape, blocks)
        return tma.partition(source.atom, 0, cute.make_layout(1), buffer, tiles)

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
        rings, place = [], 0
        for stages, rows in ((1, self.rows), (self.stages, BLOCK), (self.stages, BLOCK)):
            size, readers = rows * self.tiles.row_bytes, 4 * self.consumers
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
    lists = spans_alone if config.form == SPANS else stored
    lists = (None,) * 5 if config.packed else lists
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
        *lists,
        by_row if config.sinks else None,
        packed.fake_table() if config.packed else None,
        cutlass.Int32(0),
        cutlass.Int32(0),
        cutlass.Float32(1.0),
        cutlass.Float32(0.0),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
