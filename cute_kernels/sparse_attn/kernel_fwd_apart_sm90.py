"""The forward of ``kernel_fwd_sm90`` for heads of 96, by three consumers with their products apart.

Layouts, order, masks, sinks, packs and roles are those of ``kernel_fwd_sm90``, and so are the bits.
What differs is when things happen:

Products     O has 48 registers of a thread, S 64 and P 32, of 160: O += P V of a block ends before
             S of the next one begins.  A consumer issues both in one turn, so that its softmax runs
             under the products of the other two.
V            of a block is given back in the turn of the next step, whichever list that is on: no
             consumer awaits V while it holds V (``patience`` in ``merge``).
Limits       SM90a only; bf16 and fp16; D = Dv = 96; the rest as there.
Measured     docs/status.md, docs/notes/attention_sm90.md.
"""

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from ..dsl import softmax
from . import kernel_fwd_sm90
from .config import ForwardConfig
from .device import merge
from .kernel_fwd_sm90 import ForwardSm90


class ForwardApartSm90(ForwardSm90):
    """One configuration of the kernel."""

    def __init__(self, config: ForwardConfig):
        super().__init__(config)
        assert config.apart and self.parts == 1

    @cute.jit
    def visit(self, operands, rings, of_rows, where, word, mask, c, inner):
        """As there: every block on the list, the first of ``word``."""
        (_, _, tOrP, tOrV), (k_ring, v_ring) = operands, rings
        acc_s, acc_o, _, row_sum, factor, shift, _ = of_rows
        consumer, *_, words, _ = where
        # S_0 = Q K_0ᵀ; m_0 = max t_0
        following = self.maxima(operands, k_ring, of_rows, where, word, mask, (c, inner), True)
        # P_0 = exp2(c (t_0 - m_0)); l_0 = Σ P_0
        softmax.exponentiate(acc_s, row_sum, factor, shift, c)
        self.round_weights(acc_s, tOrP)
        while word & merge.ENDS == 0:
            # O += P_{n-1} V_{n-1}, in the turn of the step behind it
            state = merge.state_of(word, self.stages)
            v_ring.consumer_wait(state)
            self.await_turn(consumer)
            self.add_values(acc_o, tOrP, tOrV, state.index)
            warpgroup.wait_group(0)
            v_ring.consumer_release(state)
            word = following
            if self.absent(word):
                state = merge.state_of(word, self.stages)
                k_ring.consumer_wait(state)
                word = self.give_on(k_ring, v_ring, consumer, state, words)
                while self.absent(word):
                    word = self.skip(k_ring, v_ring, consumer, word, words)
                self.await_turn(consumer)
            # S_n = Q K_nᵀ; m_n = max(m_{n-1}, max t_n); factor = exp2(c (m_{n-1} - m_n))
            following = self.maxima(operands, k_ring, of_rows, where, word, mask, (c, inner), False)
            # P_n = exp2(c (t_n - m_n)); l_n = l_{n-1} factor + Σ P_n; O *= factor
            softmax.exponentiate(acc_s, row_sum, factor, shift, c)
            softmax.rescale(acc_o, factor)
            self.round_weights(acc_s, tOrP)
        # O += P_last V_last
        state = merge.state_of(word, self.stages)
        v_ring.consumer_wait(state)
        self.add_values(acc_o, tOrP, tOrV, state.index)
        warpgroup.wait_group(0)
        v_ring.consumer_release(state)
        return word, following


def build(config: ForwardConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    return kernel_fwd_sm90.build(config, compile, ForwardApartSm90)
