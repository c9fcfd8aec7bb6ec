"""The forward of ``kernel_fwd_sm90`` for heads of 256, of which less fits on the chip.

Layouts, order, masks, sinks, packs and roles are those of ``kernel_fwd_sm90``, and so are the bits
of a given order of k16 groups.  What differs is when things happen:

Parts        A block of K comes in two halves of D, one of V in two halves of its keys, each with a
             stage of its own, released as soon as it is multiplied: whole blocks would leave room
             for one of each.
Products     O has 128 registers of a thread, S 64 and P 32: O += P V of a block ends before S of
             the next one begins.  A consumer issues both in one turn: its softmax runs under the
             products of the other.
Limits       SM90a only; bf16 and fp16; D = Dv = 256; the rest as there.
Measured     docs/status.md, docs/notes/attention_sm90.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass import pipeline
from cutlass.cute.nvgpu import warpgroup

from ..dsl import softmax
from . import kernel_fwd_sm90
from .config import ForwardConfig
from .device import merge
from .kernel_fwd_sm90 import ForwardSm90, word_of

PARTS = 2


class ForwardWideSm90(ForwardSm90):
    """One configuration of the kernel."""

    def __init__(self, config: ForwardConfig):
        super().__init__(config)
        assert (self.parts, self.consumers, self.head_dim) == (PARTS, 2, 256)

    def await_output(self, rings, behind, step: int):
        """A stage of V that the loading warp has left."""
        place = self.parts_at(behind & 1)[step]
        rings[2].consumer_wait(place)
        return place

    def parts_at(self, phase):
        """The places of both parts of a block, in one ring."""
        none = cutlass.Int32(0)
        return [pipeline.PipelineState(PARTS, none, cutlass.Int32(n), phase) for n in range(PARTS)]

    def places(self, word):
        """(those of K, those of V) of a step."""
        code = word >> merge.PLACE_SHIFT
        return self.parts_at(code // merge.PHASE & 1), self.parts_at(code & 1)

    @cute.jit
    def walk(self, operands, rings, of_rows, where, mask, c, inner):
        """Every block on the list, which both consumers share; returns the place behind them."""
        (tSrQ, tSrK, tOrP, tOrV), (k_ring, v_ring) = operands, rings
        acc_s, acc_o, row_max, row_sum, factor, shift, bits = of_rows
        consumer, lane, m, row, words, first = where
        k_ring.consumer_wait(self.parts_at(first // merge.PHASE & 1)[0])
        word = word_of(words, self.stages)
        # S_0 = Q K_0ᵀ
        of_k, _ = self.places(word)
        self.fetch(bits, word, words, 0, row, mask)
        following = word_of(words, 0)
        self.await_turn(consumer)
        self.scores_of_parts(acc_s, tSrQ, tSrK, k_ring, of_k)
        self.give_turn(consumer)
        self.release(k_ring, of_k)
        # t_0 = S_0 or tanh(S_0 scale / softcap), -inf where masked; m_0 = max t_0
        self.mask(acc_s, word, bits, row, lane, m, mask, inner)
        softmax.raise_max(acc_s, row_max, factor, shift, c)
        # P_0 = exp2(c (t_0 - m_0)); l_0 = Σ P_0
        softmax.exponentiate(acc_s, row_sum, factor, shift, c)
        self.round_weights(acc_s, tOrP)
        while word & merge.ENDS == 0:
            # O += P_{n-1} V_{n-1}
            _, of_v = self.places(word)
            v_ring.consumer_wait(of_v[0])
            self.await_turn(consumer)
            self.values_of_parts(acc_o, tOrP, tOrV, v_ring, of_v)
            self.release(v_ring, of_v)
            # S_n = Q K_nᵀ
            word = following
            of_k, _ = self.places(word)
            k_ring.consumer_wait(of_k[0])
            self.fetch(bits, word, words, 0, row, mask)
            following = word_of(words, 0)
            self.scores_of_parts(acc_s, tSrQ, tSrK, k_ring, of_k)
            self.give_turn(consumer)
            self.release(k_ring, of_k)
            # t_n as t_0; m_n = max(m_{n-1}, max t_n); factor = exp2(c (m_{n-1} - m_n))
            self.mask(acc_s, word, bits, row, lane, m, mask, inner)
            softmax.raise_max(acc_s, row_max, factor, shift, c)
            # P_n = exp2(c (t_n - m_n)); l_n = l_{n-1} factor + Σ P_n; O *= factor
            softmax.exponentiate(acc_s, row_sum, factor, shift, c)
            softmax.rescale(acc_o, factor)
            self.round_weights(acc_s, tOrP)
        # O += P_last V_last
        _, of_v = self.places(word)
        v_ring.consumer_wait(of_v[0])
        self.values_of_parts(acc_o, tOrP, tOrV, v_ring, of_v)
        self.release(v_ring, of_v)
        return word >> merge.PLACE_SHIFT & 1 ^ 1

    @cute.jit
    def scores_of_parts(self, acc_s, tSrQ, tSrK, ring, states):
        """S = Q Kᵀ of one block, issued: a batch for each half of D; the first is there."""
        mma = self.tiles.qk_mma()
        groups = cute.size(tSrK, mode=[2])
        for part in cutlass.range_constexpr(PARTS):
            if cutlass.const_expr(part > 0):
                ring.consumer_wait(states[part])
            warpgroup.fence()
            for group in cutlass.range_constexpr(groups):
                mma.set(warpgroup.Field.ACCUMULATE, part + group > 0)
                a = tSrQ[None, None, part * groups + group, 0]
                cute.gemm(mma, acc_s, a, tSrK[None, None, group, states[part].index], acc_s)
            warpgroup.commit_group()

    @cute.jit
    def values_of_parts(self, acc_o, tOrP, tOrV, ring, states):
        """O += P V of one block likewise: a batch for each half of its keys."""
        mma = self.tiles.pv_mma()
        mma.set(warpgroup.Field.ACCUMULATE, True)
        groups = cute.size(tOrV, mode=[2])
        for part in cutlass.range_constexpr(PARTS):
            if cutlass.const_expr(part > 0):
                ring.consumer_wait(states[part])
            warpgroup.fence()
            for group in cutlass.range_constexpr(groups):
                a = tOrP[None, None, part * groups + group]
                cute.gemm(mma, acc_o, a, tOrV[None, None, group, states[part].index], acc_o)
            warpgroup.commit_group()

    @cute.jit
    def release(self, ring, states):
        """Each part as soon as it is multiplied."""
        for part in cutlass.range_constexpr(PARTS):
            warpgroup.wait_group(PARTS - 1 - part)
            ring.consumer_release(states[part])

    @cute.jit
    def round_weights(self, acc_s, tOrP):
        """P in the input dtype: here, and not kept in fp32 until it is multiplied."""
        softmax.round_pairs(acc_s, cute.make_tensor(tOrP.iterator, acc_s.layout))


def build(config: ForwardConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    return kernel_fwd_sm90.build(config, compile, ForwardWideSm90)
