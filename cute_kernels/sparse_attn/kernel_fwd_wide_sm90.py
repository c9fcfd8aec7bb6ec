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
from .device.block_union import PHASE, Step, next_step
from .device.forward_state import Rings
from .kernel_fwd_sm90 import Context, ForwardSm90

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

    def parts_of(self, step: Step) -> tuple[Parts, Parts]:
        """Return the ring positions of K and of V of a step."""
        code = step.ring_code
        return self.parts_at(code // PHASE & 1), self.parts_at(code & 1)

    @cute.jit
    def mainloop(self, ctx: Context):
        """Attend to every block on the list, which both consumers share; returns V's next phase."""
        rings, c = ctx.rings, ctx.c
        rings.k.consumer_wait(self.parts_at(ctx.first_step // PHASE & 1)[0])
        step = next_step(ctx.mask.steps, self.stages)
        # S_0 = Q K_0ᵀ
        k_parts, _ = self.parts_of(step)
        ctx.mask.load_bits(step, 0)
        following = next_step(ctx.mask.steps, 0)
        self.warp_scheduler_sync(ctx.consumer)
        self.qk_parts(ctx, k_parts)
        self.warp_scheduler_arrive(ctx.consumer)
        self.release(rings.k, k_parts)
        # t_0 = S_0 or tanh(S_0 scale / softcap), -inf where masked; m_0 = max t_0
        self.mask_scores(ctx, step)
        softmax.raise_max(ctx.tSrS, ctx.row_max, ctx.factor, ctx.shift, c)
        # P_0 = exp2(c (t_0 - m_0)); l_0 = Σ P_0
        softmax.exponentiate(ctx.tSrS, ctx.row_sum, ctx.factor, ctx.shift, c)
        self.round_p(ctx)
        while step.goes_on:
            # O += P_{n-1} V_{n-1}
            _, v_parts = self.parts_of(step)
            rings.v.consumer_wait(v_parts[0])
            self.warp_scheduler_sync(ctx.consumer)
            self.pv_parts(ctx, v_parts)
            self.release(rings.v, v_parts)
            # S_n = Q K_nᵀ
            step = following
            k_parts, _ = self.parts_of(step)
            rings.k.consumer_wait(k_parts[0])
            ctx.mask.load_bits(step, 0)
            following = next_step(ctx.mask.steps, 0)
            self.qk_parts(ctx, k_parts)
            self.warp_scheduler_arrive(ctx.consumer)
            self.release(rings.k, k_parts)
            # t_n as t_0; m_n = max(m_{n-1}, max t_n); factor = exp2(c (m_{n-1} - m_n))
            self.mask_scores(ctx, step)
            softmax.raise_max(ctx.tSrS, ctx.row_max, ctx.factor, ctx.shift, c)
            # P_n = exp2(c (t_n - m_n)); l_n = l_{n-1} factor + Σ P_n; O *= factor
            softmax.exponentiate(ctx.tSrS, ctx.row_sum, ctx.factor, ctx.shift, c)
            softmax.rescale(ctx.tOrO, ctx.factor)
            self.round_p(ctx)
        # O += P_last V_last
        _, v_parts = self.parts_of(step)
        rings.v.consumer_wait(v_parts[0])
        self.pv_parts(ctx, v_parts)
        self.release(rings.v, v_parts)
        return step.ring_code & 1 ^ 1

    @cute.jit
    def qk_parts(self, ctx: Context, states: Parts):
        """Issue S = Q Kᵀ of one block, a batch for each half of D; the first half has come."""
        mma = self.tiles.qk_mma()
        groups = cute.size(ctx.tSrK, mode=[2])
        for part in cutlass.range_constexpr(PARTS):
            if cutlass.const_expr(part > 0):
                ctx.rings.k.consumer_wait(states[part])
            warpgroup.fence()
            for group in cutlass.range_constexpr(groups):
                mma.set(warpgroup.Field.ACCUMULATE, part + group > 0)
                a = ctx.tSrQ[None, None, part * groups + group, 0]
                b = ctx.tSrK[None, None, group, states[part].index]
                cute.gemm(mma, ctx.tSrS, a, b, ctx.tSrS)
            warpgroup.commit_group()

    @cute.jit
    def pv_parts(self, ctx: Context, states: Parts):
        """Issue O += P V of one block, a batch for each half of its keys; the first has come."""
        mma = self.tiles.pv_mma()
        mma.set(warpgroup.Field.ACCUMULATE, True)
        groups = cute.size(ctx.tOrV, mode=[2])
        for part in cutlass.range_constexpr(PARTS):
            if cutlass.const_expr(part > 0):
                ctx.rings.v.consumer_wait(states[part])
            warpgroup.fence()
            for group in cutlass.range_constexpr(groups):
                a = ctx.tOrP[None, None, part * groups + group]
                b = ctx.tOrV[None, None, group, states[part].index]
                cute.gemm(mma, ctx.tOrO, a, b, ctx.tOrO)
            warpgroup.commit_group()

    @cute.jit
    def release(self, ring: PipelineTmaAsync, states: Parts):
        """Release each half as soon as it is multiplied."""
        for part in cutlass.range_constexpr(PARTS):
            warpgroup.wait_group(PARTS - 1 - part)
            ring.consumer_release(states[part])


def build(config: ForwardConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; no GPU needed."""
    return kernel_fwd_sm90.build(config, compile, ForwardWideSm90)
