"""Attention forward for heads of 96 on SM90: three consumers, QK and PV not overlapped.

Layouts, order, masks, sinks, varlen batches and roles are those of ``kernel_fwd_sm90``, and so are
the bits.  The schedule of a consumer differs:

Products     O has 48 registers of a thread, S 64 and P 32, of 160: O += P V of a block ends before
             S of the next one begins.  A consumer issues both in one turn, so that its softmax runs
             under the products of the other two.
V            of a block is released in the turn of the next step, whichever list that is on: no
             consumer awaits V while it holds V (``max_skipped_steps`` in ``block_union``).
Limits       SM90a only; bf16 and fp16; D = Dv = 96; the rest as there.
Measured     docs/status.md, docs/notes/attention_sm90.md.
"""

from collections.abc import Callable

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from ..dsl import softmax
from . import kernel_fwd_sm90
from .config import ForwardConfig
from .device.block_union import Step
from .kernel_fwd_sm90 import Context, ForwardSm90


class ForwardNoOverlapSm90(ForwardSm90):
    """One configuration of the kernel."""

    def __init__(self, config: ForwardConfig):
        super().__init__(config)
        assert config.no_overlap and self.parts == 1

    @cute.jit
    def kv_loop(self, ctx: Context, step: Step):
        """Attend to the list's blocks, from ``step`` on; returns the last step and the next."""
        rings, c = ctx.rings, ctx.c
        # S_0 = Q K_0ᵀ; m_0 = max t_0
        following = self.qk_block(ctx, step, True)
        # P_0 = exp2(c (t_0 - m_0)); l_0 = Σ P_0
        softmax.exponentiate(ctx.tSrS, ctx.row_sum, ctx.factor, ctx.shift, c)
        self.round_p(ctx)
        while step.goes_on:
            # O += P_{n-1} V_{n-1}, in the turn of the step after it
            state = step.state(self.stages)
            rings.v.consumer_wait(state)
            self.warp_scheduler_sync(ctx.consumer)
            self.pv(ctx, state.index)
            warpgroup.wait_group(0)
            rings.v.consumer_release(state)
            step = following
            if self.is_absent(step):
                state = step.state(self.stages)
                rings.k.consumer_wait(state)
                step = self.finish_skip(ctx, state)
                while self.is_absent(step):
                    step = self.skip_block(ctx, step)
                self.warp_scheduler_sync(ctx.consumer)
            # S_n = Q K_nᵀ; m_n = max(m_{n-1}, max t_n); factor = exp2(c (m_{n-1} - m_n))
            following = self.qk_block(ctx, step, False)
            # P_n = exp2(c (t_n - m_n)); l_n = l_{n-1} factor + Σ P_n; O *= factor
            softmax.exponentiate(ctx.tSrS, ctx.row_sum, ctx.factor, ctx.shift, c)
            softmax.rescale(ctx.tOrO, ctx.factor)
            self.round_p(ctx)
        # O += P_last V_last
        state = step.state(self.stages)
        rings.v.consumer_wait(state)
        self.pv(ctx, state.index)
        warpgroup.wait_group(0)
        rings.v.consumer_release(state)
        return step, following


def build(config: ForwardConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; no GPU needed."""
    return kernel_fwd_sm90.build(config, compile, ForwardNoOverlapSm90)
