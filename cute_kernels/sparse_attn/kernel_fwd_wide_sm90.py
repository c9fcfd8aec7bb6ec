"""Attention forward for heads of 256 on SM90: K and V in halves, QK and PV not overlapped.

Layouts, order, masks, sinks, varlen batches and roles are those of ``kernel_fwd_sm90``, and so are
the bits of a given order of k16 groups.  The schedule of a consumer differs:

Parts        A block of K comes in two halves of D, one of V in two halves of its keys, each with a
             stage of its own, released as soon as it is multiplied: of whole blocks shared memory
             would hold one each.
Products     O has 128 registers of a thread, S 64 and P 32: O += P V of a block ends before S of
             the next one begins.  A consumer issues both in one turn: its softmax runs under the
             products of the other.
Limits       SM90a only; bf16 and fp16; D = Dv = 256; the rest as there.
Measured     docs/status.md, docs/notes/attention_sm90.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from ..dsl import softmax
from . import kernel_fwd_sm90
from .config import ForwardConfig
from .device import element_mask, merge
from .device.element_mask import ElementRule, ListCoord
from .device.forward_loads import Rings
from .device.forward_state import Operands, Registers, Scales
from .kernel_fwd_sm90 import ForwardSm90, word_of

PARTS = 2
#: Ring positions of both halves of a block.
Parts = tuple[PipelineState, PipelineState]


class ForwardWideSm90(ForwardSm90):
    """One configuration of the kernel."""

    def __init__(self, config: ForwardConfig):
        super().__init__(config)
        assert (self.parts, self.consumers, self.head_dim) == (PARTS, 2, 256)

    def await_output(self, rings: Rings, after: cutlass.Int32, step: int) -> PipelineState:
        """Await a stage of V that the producer has left."""
        stage = self.parts_at(after & 1)[step]
        rings.v.consumer_wait(stage)
        return stage

    def parts_at(self, phase: cutlass.Int32) -> Parts:
        """Return the ring positions of both halves of a block, in one ring."""
        none = cutlass.Int32(0)
        return tuple(PipelineState(PARTS, none, cutlass.Int32(n), phase) for n in range(PARTS))

    def parts_of(self, word: cutlass.Int32) -> tuple[Parts, Parts]:
        """Return the ring positions of K and of V of a step."""
        code = word >> merge.PLACE_SHIFT
        return self.parts_at(code // merge.PHASE & 1), self.parts_at(code & 1)

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
        """Visit every block on the list, which both consumers share.

        Returns the ring position after them.
        """
        tSrQ, tSrK, tOrP, tOrV = operands.tSrQ, operands.tSrK, operands.tOrP, operands.tOrV
        acc_s, acc_o, row_max = registers.acc_s, registers.acc_o, registers.row_max
        row_sum, factor, shift = registers.row_sum, registers.factor, registers.shift
        bits, consumer, words, c = registers.bits, coord.consumer, coord.words, scales.c
        form = self.config.form
        rings.k.consumer_wait(self.parts_at(coord.first_step // merge.PHASE & 1)[0])
        word = word_of(words, self.stages)
        # S_0 = Q K_0ᵀ
        k_parts, _ = self.parts_of(word)
        element_mask.fetch(bits, form, word, coord, 0, rule)
        following = word_of(words, 0)
        self.await_turn(consumer)
        self.scores_of_parts(acc_s, tSrQ, tSrK, rings.k, k_parts)
        self.give_turn(consumer)
        self.release(rings.k, k_parts)
        # t_0 = S_0 or tanh(S_0 scale / softcap), -inf where masked; m_0 = max t_0
        self.mask(acc_s, word, bits, coord, rule, scales)
        softmax.raise_max(acc_s, row_max, factor, shift, c)
        # P_0 = exp2(c (t_0 - m_0)); l_0 = Σ P_0
        softmax.exponentiate(acc_s, row_sum, factor, shift, c)
        self.round_weights(acc_s, tOrP)
        while word & merge.ENDS == 0:
            # O += P_{n-1} V_{n-1}
            _, v_parts = self.parts_of(word)
            rings.v.consumer_wait(v_parts[0])
            self.await_turn(consumer)
            self.values_of_parts(acc_o, tOrP, tOrV, rings.v, v_parts)
            self.release(rings.v, v_parts)
            # S_n = Q K_nᵀ
            word = following
            k_parts, _ = self.parts_of(word)
            rings.k.consumer_wait(k_parts[0])
            element_mask.fetch(bits, form, word, coord, 0, rule)
            following = word_of(words, 0)
            self.scores_of_parts(acc_s, tSrQ, tSrK, rings.k, k_parts)
            self.give_turn(consumer)
            self.release(rings.k, k_parts)
            # t_n as t_0; m_n = max(m_{n-1}, max t_n); factor = exp2(c (m_{n-1} - m_n))
            self.mask(acc_s, word, bits, coord, rule, scales)
            softmax.raise_max(acc_s, row_max, factor, shift, c)
            # P_n = exp2(c (t_n - m_n)); l_n = l_{n-1} factor + Σ P_n; O *= factor
            softmax.exponentiate(acc_s, row_sum, factor, shift, c)
            softmax.rescale(acc_o, factor)
            self.round_weights(acc_s, tOrP)
        # O += P_last V_last
        _, v_parts = self.parts_of(word)
        rings.v.consumer_wait(v_parts[0])
        self.values_of_parts(acc_o, tOrP, tOrV, rings.v, v_parts)
        self.release(rings.v, v_parts)
        return word >> merge.PLACE_SHIFT & 1 ^ 1

    @cute.jit
    def scores_of_parts(
        self,
        acc_s: cute.Tensor,
        tSrQ: cute.Tensor,
        tSrK: cute.Tensor,
        ring: PipelineTmaAsync,
        states: Parts,
    ):
        """Issue S = Q Kᵀ of one block, a batch for each half of D; the first half has come."""
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
    def values_of_parts(
        self,
        acc_o: cute.Tensor,
        tOrP: cute.Tensor,
        tOrV: cute.Tensor,
        ring: PipelineTmaAsync,
        states: Parts,
    ):
        """Issue O += P V of one block, a batch for each half of its keys; the first has come."""
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
    def release(self, ring: PipelineTmaAsync, states: Parts):
        """Release each half as soon as it is multiplied."""
        for part in cutlass.range_constexpr(PARTS):
            warpgroup.wait_group(PARTS - 1 - part)
            ring.consumer_release(states[part])

    @cute.jit
    def round_weights(self, acc_s: cute.Tensor, tOrP: cute.Tensor):
        """Round P to the input dtype here: fp32 P is not kept until it is multiplied."""
        softmax.round_pairs(acc_s, cute.make_tensor(tOrP.iterator, acc_s.layout))


def build(config: ForwardConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; no GPU needed."""
    return kernel_fwd_sm90.build(config, compile, ForwardWideSm90)
