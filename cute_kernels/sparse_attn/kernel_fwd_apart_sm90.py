"""Attention forward for heads of 96 on SM90: three consumers, QK and PV not overlapped.

Layouts, order, masks, sinks, varlen batches and roles are those of ``kernel_fwd_sm90``, and so are
the bits.  The schedule of a consumer differs:

Products     O has 48 registers of a thread, S 64 and P 32, of 160: O += P V of a block ends before
             S of the next one begins.  A consumer issues both in one turn, so that its softmax runs
             under the products of the other two.
V            of a block is released in the turn of the next step, whichever list that is on: no
             consumer awaits V while it holds V (``max_skipped_steps`` in ``merge``).
Limits       SM90a only; bf16 and fp16; D = Dv = 96; the rest as there.
Measured     docs/status.md, docs/notes/attention_sm90.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from ..dsl import softmax
from . import kernel_fwd_sm90
from .config import ForwardConfig
from .device import merge
from .device.element_mask import ElementRule, ListCoord
from .device.forward_loads import Rings
from .device.forward_state import Operands, Registers, Scales
from .kernel_fwd_sm90 import ForwardSm90


class ForwardApartSm90(ForwardSm90):
    """One configuration of the kernel."""

    def __init__(self, config: ForwardConfig):
        super().__init__(config)
        assert config.no_overlap and self.parts == 1

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
        """Visit every block on the list, the first of ``word``.  Returns (last word, next word)."""
        tOrP, tOrV, consumer, c = operands.tOrP, operands.tOrV, coord.consumer, scales.c
        acc_s, acc_o, row_sum = registers.acc_s, registers.acc_o, registers.row_sum
        factor, shift = registers.factor, registers.shift
        # S_0 = Q K_0ᵀ; m_0 = max t_0
        following = self.maxima(operands, rings.k, registers, coord, word, rule, scales, True)
        # P_0 = exp2(c (t_0 - m_0)); l_0 = Σ P_0
        softmax.exponentiate(acc_s, row_sum, factor, shift, c)
        self.round_weights(acc_s, tOrP)
        while word & merge.ENDS == 0:
            # O += P_{n-1} V_{n-1}, in the turn of the step after it
            state = merge.state_of(word, self.stages)
            rings.v.consumer_wait(state)
            self.await_turn(consumer)
            self.add_values(acc_o, tOrP, tOrV, state.index)
            warpgroup.wait_group(0)
            rings.v.consumer_release(state)
            word = following
            if self.absent(word):
                state = merge.state_of(word, self.stages)
                rings.k.consumer_wait(state)
                word = self.give_on(rings, coord, state)
                while self.absent(word):
                    word = self.skip(rings, coord, word)
                self.await_turn(consumer)
            # S_n = Q K_nᵀ; m_n = max(m_{n-1}, max t_n); factor = exp2(c (m_{n-1} - m_n))
            following = self.maxima(operands, rings.k, registers, coord, word, rule, scales, False)
            # P_n = exp2(c (t_n - m_n)); l_n = l_{n-1} factor + Σ P_n; O *= factor
            softmax.exponentiate(acc_s, row_sum, factor, shift, c)
            softmax.rescale(acc_o, factor)
            self.round_weights(acc_s, tOrP)
        # O += P_last V_last
        state = merge.state_of(word, self.stages)
        rings.v.consumer_wait(state)
        self.add_values(acc_o, tOrP, tOrV, state.index)
        warpgroup.wait_group(0)
        rings.v.consumer_release(state)
        return word, following


def build(config: ForwardConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; no GPU needed."""
    return kernel_fwd_sm90.build(config, compile, ForwardApartSm90)
