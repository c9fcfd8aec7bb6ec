"""O = Σ P V / Σ P with P = exp2(c (t - max t)), over the listed blocks of keys, on SM90.

t = S = Q K^T, c = scale log2 e; with a softcap t = tanh(S scale / softcap), c = softcap log2 e.

Layouts      Q, O [B, Sq, Hq, D], K, V [B, Sk, Hkv, D], last dimension contiguous, other strides
             multiples of 16 bytes; LSE fp32 [B, Hq, Sq], natural log; lists as in ``masks``.
Order        S: one fp32 accumulator, D ascending in k16 groups.  KV blocks of 128 ascending by
             absolute index.  A block: running maximum, O and the sum times exp2(c (m - m')), P
             rounded to the input dtype, then added to O in k16 groups of keys ascending.  Each of
             four lanes sums its own columns of a row; the lanes are added at the end (``softmax``).
             O is divided once, by multiplication with the reciprocal, and rounded once.
Masks        by selection; a block without an allowed key leaves a row's state as it was, bit by
             bit.  Rows without any key: O = 0, LSE = -inf.
Tails        TMA fills zeros beyond Sq and Sk; keys beyond Sk are masked, rows beyond Sq clipped.
Roles        one CTA per 128 query rows of a head; warpgroup 0: one warp loads; warpgroups 1, 2: 64
             rows each.  Q K^T of the next block is in flight with P V of this one, and the two
             warpgroups take turns at issuing them.  O leaves through Q's buffer.
Limits       SM90a only; bf16 and fp16; D in {64, 96, 128}; lengths below 2^30; scale > 0.  P = 0
             times a V that is Inf or NaN is NaN: V of a masked key in a visited block must be
             finite, V in other blocks need not.
Measured     on an H200: docs/status.md, docs/notes/attention_sm90.md.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ..compile import fake
from ..dsl import mma, pipeline, score_mask, smem, softmax, tma
from .config import ForwardConfig
from .masks import FORMS

CONSUMERS = 2
THREADS = (1 + CONSUMERS) * mma.WARPGROUP
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240
#: Query rows of a CTA, keys of a block: the blocks of the mask.
BLOCK = 128
#: Rows of a consumer warpgroup.
ROWS = BLOCK // CONSUMERS
#: Named barrier 0 is the CTA's; the consumers meet at 1, and consumer w awaits its turn at 2 + w.
EPILOGUE_BARRIER = 1
TURN_BARRIER = 2


class ForwardSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ForwardConfig):
        assert config.head_dim in (64, 96, 128) and config.form in FORMS
        self.config = config
        self.head_dim = config.head_dim
        self.dtype = fake.DTYPES[config.dtype]
        assert config.kv_stages >= 2, "a block's V is awaited before the last one is given back"
        self.stages = config.kv_stages
        self.block_bytes = BLOCK * config.head_dim * self.dtype.width // 8

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        mCount: cute.Tensor,
        mEntry: cute.Tensor,
        mTile: cute.Tensor,
        mWords: cute.Tensor,
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        c: cutlass.Float32,
        inner: cutlass.Float32,
        stream,
    ):
        sQ_layout, sK_layout, sV_layout = self.shared_layouts()
        # [S, D, H, B], and [D, S, H, B] for V: its keys are the reduction dimension.
        by_rows, by_keys = [1, 3, 2, 0], [3, 1, 2, 0]
        tma_q, gQ = tma.load(tma.view(mQ, by_rows), sQ_layout, (BLOCK, self.head_dim), 1)
        tma_k, gK = tma.load(tma.view(mK, by_rows), sK_layout, (BLOCK, self.head_dim), 1)
        tma_v, gV = tma.load(tma.view(mV, by_keys), sV_layout, (self.head_dim, BLOCK), 1)
        tma_o, gO = tma.store(tma.view(mO, by_rows), sQ_layout, (BLOCK, self.head_dim))

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * (1 + 2 * self.stages)]
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
        tiles = cute.ceil_div(q_len, BLOCK) * heads * batch
        tensors = (mK, mLse, mCount, mEntry, mTile, mWords)
        self.kernel(tma_q, gQ, tma_k, gK, tma_v, gV, tma_o, gO, *tensors, lo, hi, c, inner).launch(
            grid=(tiles, 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        gQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        gK: cute.Tensor,
        tma_v: cute.CopyAtom,
        gV: cute.Tensor,
        tma_o: cute.CopyAtom,
        gO: cute.Tensor,
        mK: cute.Tensor,
        mLse: cute.Tensor,
        mCount: cute.Tensor,
        mEntry: cute.Tensor,
        mTile: cute.Tensor,
        mWords: cute.Tensor,
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        c: cutlass.Float32,
        inner: cutlass.Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (tma_q, tma_k, tma_v, tma_o):
                cpasync.prefetch_descriptor(atom)

        storage = SmemAllocator().allocate(self.storage)
        sQ_layout, sK_layout, sV_layout = self.shared_layouts()
        sQ = storage.sQ.get_tensor(sQ_layout.outer, swizzle=sQ_layout.inner)
        sK = storage.sK.get_tensor(sK_layout.outer, swizzle=sK_layout.inner)
        sV = storage.sV.get_tensor(sV_layout.outer, swizzle=sV_layout.inner)
        rings = self.make_rings(storage.barriers.data_ptr())

        q_len, kv_len = mLse.shape[2], mK.shape[1]
        m, head, batch = tile_of(q_len, mLse.shape[1])
        # A mask of one batch or one head serves all of them.
        mask_batch = cutlass.min(batch, mCount.shape[0] - 1)
        mask_head = cutlass.min(head, mCount.shape[1] - 1)
        count = mCount[mask_batch, mask_head, m]
        entries = kept(mEntry[mask_batch, mask_head, m, None])
        kv_head = kv_head_of(head, mLse.shape[1], mK.shape[2])
        hQ, hO = gQ[None, None, head, batch], gO[None, None, head, batch]
        hK, hV = gK[None, None, kv_head, batch], gV[None, None, kv_head, batch]

        group = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0 and count > 0:
                self.load(tma_q, hQ, tma_k, hK, tma_v, hV, sQ, sK, sV, rings, m, count, entries)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            row_sum = cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32)
            row_max = cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32)
            pv = self.pv_mma()
            acc_o = cute.make_rmem_tensor(
                pv.get_slice(0).partition_shape_C((ROWS, self.head_dim)), cutlass.Float32
            )
            softmax.start(row_max, row_sum)
            acc_o.fill(0.0)
            # Unread unless the form is "bits".
            tiles = kept(mTile[mask_batch, mask_head, m, None])
            if count > 0:
                mask = (entries, tiles, mWords, lo, hi, kv_len)
                self.attend(sQ, sK, sV, rings, acc_o, row_max, row_sum, m, count, mask, c, inner)
            softmax.finish(row_sum)
            rows = mLse[batch, head, None]
            self.store(acc_o, row_max, row_sum, tma_o, hO, sQ, rows, m, q_len, c)

    @cute.jit
    def load(self, tma_q, gQ, tma_k, gK, tma_v, gV, sQ, sK, sV, rings, m, count, entries):
        """The producer warp: the Q tile, then K and V of every listed block, in order.

        K runs one block ahead of V, as its readers do.
        """
        q_ring, k_ring, v_ring = rings
        # (rows, D, blocks), and (D, keys, blocks) for V.
        gQ = cute.local_tile(gQ, (BLOCK, self.head_dim), (None, 0))
        gK = cute.local_tile(gK, (BLOCK, self.head_dim), (None, 0))
        gV = cute.local_tile(gV, (self.head_dim, BLOCK), (0, None))
        alone = cute.make_layout(1)
        tQsQ, tQgQ = tma.partition(tma_q, 0, alone, sQ, gQ)
        tKsK, tKgK = tma.partition(tma_k, 0, alone, sK, gK)
        tVsV, tVgV = tma.partition(tma_v, 0, alone, sV, gV)

        entry = entries[0]
        first = pipeline.producer_state(1)
        q_ring.producer_acquire(first)
        full = q_ring.producer_get_barrier(first)
        cute.copy(tma_q, tQgQ[None, m], tQsQ[None, 0], tma_bar_ptr=full)
        state_k = pipeline.producer_state(self.stages)
        state_v = pipeline.producer_state(self.stages)
        self.load_block(tma_k, tKgK, tKsK, k_ring, state_k, entry >> 1)
        state_k.advance()
        for i in cutlass.range(1, count, unroll=1):
            block = entry >> 1
            entry = entries[i]
            self.load_block(tma_k, tKgK, tKsK, k_ring, state_k, entry >> 1)
            state_k.advance()
            self.load_block(tma_v, tVgV, tVsV, v_ring, state_v, block)
            state_v.advance()
        self.load_block(tma_v, tVgV, tVsV, v_ring, state_v, entry >> 1)

    @cute.jit
    def load_block(self, atom, source, target, ring, state, block):
        """One block of K or V into the ring's next free stage."""
        ring.producer_acquire(state)
        full = ring.producer_get_barrier(state)
        cute.copy(atom, source[None, block], target[None, state.index], tma_bar_ptr=full)

    @cute.jit
    def attend(self, sQ, sK, sV, rings, acc_o, row_max, row_sum, m, count, mask, c, inner):
        """A consumer warpgroup: its 64 rows against every listed block, ascending."""
        q_ring, k_ring, v_ring = rings
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP
        # This thread's first row in the tile; its second is 8 below.
        row = consumer * ROWS + lane // 32 * 16 + lane % 32 // 4

        qk, pv = self.qk_mma(), self.pv_mma()
        slice_qk, slice_pv = qk.get_slice(consumer * mma.WARPGROUP), pv.get_slice(0)
        tSrQ = qk.make_fragment_A(slice_qk.partition_A(sQ))
        tSrK = qk.make_fragment_B(slice_qk.partition_B(sK))
        tOrV = pv.make_fragment_B(slice_pv.partition_B(sV))
        tOrP = pv.make_fragment_A(slice_pv.partition_shape_A((ROWS, BLOCK)))
        acc_s = cute.make_rmem_tensor(slice_qk.partition_shape_C((BLOCK, BLOCK)), cutlass.Float32)
        factor, shift = (cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32) for _ in range(2))
        bits = cute.make_rmem_tensor((score_mask.WORDS, softmax.ROWS), cutlass.Int32)

        state_k = pipeline.consumer_state(self.stages)
        state_v = pipeline.consumer_state(self.stages)
        release_v = pipeline.consumer_state(self.stages)
        entry, tile = self.listed(mask, 0)
        self.fetch(bits, entry, tile, row, mask)
        next_entry, next_tile = self.listed(mask, cutlass.min(1, count - 1))
        q_ring.consumer_wait(pipeline.consumer_state(1))
        k_ring.consumer_wait(state_k)
        self.scores(acc_s, tSrQ, tSrK, state_k.index)
        warpgroup.wait_group(0)
        k_ring.consumer_release(state_k)
        state_k.advance()
        self.mask(acc_s, entry, bits, row, lane, m, mask, inner)
        softmax.raise_max(acc_s, row_max, factor, shift, c)
        v_ring.consumer_wait(state_v)
        softmax.exponentiate(acc_s, row_sum, factor, shift, c)
        self.round_weights(acc_s, tOrP)
        if consumer == 1 and count > 1:
            self.give_turn(0)
        for i in cutlass.range(1, count, unroll=1):
            entry, tile = next_entry, next_tile
            self.fetch(bits, entry, tile, row, mask)
            next_entry, next_tile = self.listed(mask, cutlass.min(i + 1, count - 1))
            k_ring.consumer_wait(state_k)
            self.await_turn(consumer)
            self.scores(acc_s, tSrQ, tSrK, state_k.index)
            self.add_values(acc_o, tOrP, tOrV, state_v.index)
            state_v.advance()
            # Consumer 0 takes the first turn and consumer 1 the last.
            if consumer == 0 or i + 1 < count:
                self.give_turn(1 - consumer)
            warpgroup.wait_group(1)
            k_ring.consumer_release(state_k)
            state_k.advance()
            self.mask(acc_s, entry, bits, row, lane, m, mask, inner)
            softmax.raise_max(acc_s, row_max, factor, shift, c)
            # P V has had the time of the maxima; ptxas moves its wait up to the last wait for an
            # mbarrier, which is therefore here.  What follows then fills the gaps between
            # exponentials.
            v_ring.consumer_wait(state_v)
            warpgroup.wait_group(0)
            v_ring.consumer_release(release_v)
            release_v.advance()
            softmax.exponentiate(acc_s, row_sum, factor, shift, c)
            softmax.rescale(acc_o, factor)
            self.round_weights(acc_s, tOrP)
        self.add_values(acc_o, tOrP, tOrV, state_v.index)
        warpgroup.wait_group(0)

    @cute.jit
    def listed(self, mask, place):
        """(entry, mask tile) at one place of the list; no tile in other forms than "bits"."""
        tile = cutlass.Int32(-1)
        if cutlass.const_expr(self.config.form == "bits"):
            tile = mask[1][place]
        return mask[0][place], tile

    @cute.jit
    def fetch(self, bits, entry, tile, row, mask):
        """The mask words of this thread's rows, on their way before the scores are asked for."""
        if cutlass.const_expr(self.config.form == "bits"):
            if (entry & 1) == 1:
                for half in cutlass.range_constexpr(softmax.ROWS):
                    at = (mask[2], tile, row + 8 * half, 0)
                    bits[None, half].store(score_mask.words_of(*at, score_mask.WORDS))

    @cute.jit
    def scores(self, acc_s, tSrQ, tSrK, stage):
        """S = Q K^T of one block, issued."""
        qk = self.qk_mma()
        warpgroup.fence()
        for group in cutlass.range_constexpr(cute.size(tSrQ, mode=[2])):
            qk.set(warpgroup.Field.ACCUMULATE, group > 0)
            cute.gemm(qk, acc_s, tSrQ[None, None, group, 0], tSrK[None, None, group, stage], acc_s)
        warpgroup.commit_group()

    @cute.jit
    def add_values(self, acc_o, tOrP, tOrV, stage):
        """O += P V of one block, issued."""
        pv = self.pv_mma()
        pv.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for group in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
            cute.gemm(pv, acc_o, tOrP[None, None, group], tOrV[None, None, group, stage], acc_o)
        warpgroup.commit_group()

    @cute.jit
    def mask(self, acc_s, entry, bits, row, lane, m, mask, inner):
        """The scores of one block, capped; -inf where a key is not allowed."""
        if cutlass.const_expr(self.config.softcap):
            softmax.cap(acc_s, inner)
        _, _, _, lo, hi, kv_len = mask
        key = (entry >> 1) * BLOCK
        partial = (entry & 1) == 1
        last = kv_len - 1 - key
        if cutlass.const_expr(self.config.form == "band"):
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
        rounded.store(acc_s.load().to(self.dtype))

    @cute.jit
    def store(self, acc_o, row_max, row_sum, tma_o, gO, sQ, rows, m, q_len, c):
        """O = round(acc / sum) through the buffer of Q; LSE = ln(sum) + ln 2 c max.

        A warpgroup writes over the rows of Q that it alone has read.
        """
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP
        row = m * BLOCK + consumer * ROWS + lane // 32 * 16 + lane % 32 // 4
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
        gO_tile = cute.local_tile(gO, (BLOCK, self.head_dim), (None, 0))
        tOsO, tOgO = tma.partition(tma_o, 0, cute.make_layout(1), sQ, gO_tile)
        if tidx == mma.WARPGROUP:
            cute.copy(tma_o, tOsO[None, 0], tOgO[None, m])
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
        return mma.tiled_mma(self.dtype, "k", "k", CONSUMERS, BLOCK)

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
            smem.operand_layout(dtype, BLOCK, width, "k", 1),
            smem.operand_layout(dtype, BLOCK, width, "k", stages),
            smem.operand_layout(dtype, width, BLOCK, "mn", stages),
        )

    def make_rings(self, barriers):
        """The rings of Q, K and V, their barriers published to the CTA."""
        alone = cute.make_layout((1, 1, 1))
        rings, place = [], 0
        for stages in (1, self.stages, self.stages):
            ring = pipeline.tma_ring(
                barriers + place, stages, self.block_bytes, 4 * CONSUMERS, alone
            )
            rings.append(ring)
            place += 2 * stages
        pipeline.announce_barriers((1, 1))
        pipeline.await_barriers((1, 1))
        return tuple(rings)

    def sync(self):
        """The consumers meet."""
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=CONSUMERS * mma.WARPGROUP)

    def await_turn(self, consumer):
        """Waits until the other consumer has issued its products."""
        cute.arch.barrier(
            barrier_id=TURN_BARRIER + consumer, number_of_threads=CONSUMERS * mma.WARPGROUP
        )

    def give_turn(self, consumer):
        """Lets ``consumer`` issue its products."""
        cute.arch.barrier_arrive(
            barrier_id=TURN_BARRIER + consumer, number_of_threads=CONSUMERS * mma.WARPGROUP
        )


def kept(values: cute.Tensor) -> cute.Tensor:
    """The same int32 list, its address in two registers.

    ptxas would otherwise multiply the strides again in every iteration, and a shuffle it cannot.
    """
    address = values.iterator.toint()
    low = cute.arch.make_warp_uniform(cutlass.Int32(address & 0xFFFFFFFF))
    high = cute.arch.make_warp_uniform(cutlass.Int32(address >> 32))
    whole = (cutlass.Int64(high) << 32) | (cutlass.Int64(low) & 0xFFFFFFFF)
    pointer = cute.make_ptr(cutlass.Int32, whole, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, values.layout)


def tile_of(q_len, heads):
    """(query block, head, batch) of this CTA: a head's blocks from the last, the longest if causal,
    to the first; heads that share K and V follow each other."""
    index, _, _ = cute.arch.block_idx()
    blocks = cute.ceil_div(q_len, BLOCK)
    of_head = index // blocks
    return blocks - 1 - index % blocks, of_head % heads, of_head // heads


def kv_head_of(head, heads, kv_heads):
    """The head of K and V that a query head sees: consecutive query heads share one."""
    return head // (heads // kv_heads)


def build(config: ForwardConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    batch, q_len, kv_len = fake.size(), fake.size(), fake.size()
    heads, kv_heads, blocks, longest = fake.size(), fake.size(), fake.size(), fake.size()
    shared = (fake.size(), fake.size(), blocks)
    listed = (*shared, longest) if config.form == "bits" else tuple(fake.size() for _ in range(4))
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
        fake.compact(cutlass.Int32, shared),
        fake.compact(cutlass.Int32, (*shared, longest)),
        fake.compact(cutlass.Int32, listed),
        fake.compact(cutlass.Int32, (fake.size(), BLOCK, score_mask.WORDS), fake.TMA_ALIGN),
        cutlass.Int32(0),
        cutlass.Int32(0),
        cutlass.Float32(1.0),
        cutlass.Float32(0.0),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
