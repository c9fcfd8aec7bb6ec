"""WGMMA: the tiled instruction, and the one place where K is walked.

What is issued here is committed as one batch and not awaited.
"""

import cutlass
from cutlass import cute
from cutlass.utils import hopper_helpers

from .smem import major_of

WARPGROUP = 128
K_GROUP = 16


def tiled_mma(dtype, a_major: str, b_major: str, warpgroups: int, n: int) -> cute.TiledMma:
    """``wgmma.m64n{n}k16`` with fp32 accumulators, ``warpgroups`` of them stacked along M."""
    return hopper_helpers.make_trivial_tiled_mma(
        dtype,
        dtype,
        major_of(a_major).sm90_mma_major_mode(),
        major_of(b_major).sm90_mma_major_mode(),
        cutlass.Float32,
        (warpgroups, 1, 1),
        (64, n),
    )


@cute.jit
def add_block(mma: cute.TiledMma, acc: cute.Tensor, tCrA: cute.Tensor, tCrB: cute.Tensor, stage):
    """acc += Σ A_g B_gᵀ over every group g of one stage, ascending, as one committed batch."""
    cute.nvgpu.warpgroup.fence()
    for group in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
        at = (None, None, group, stage)
        cute.gemm(mma, acc, tCrA[at], tCrB[at], acc)
    cute.nvgpu.warpgroup.commit_group()


@cute.jit
def add_groups(
    mma: cute.TiledMma, acc: cute.Tensor, tCrA: cute.Tensor, tCrB: cute.Tensor, stage, groups
):
    """acc += Σ A_g B_gᵀ over the first ``groups`` groups of one stage, ascending.

    For the K tail: a group that lies wholly beyond K is not multiplied.  Adding its zeros could
    turn an accumulator of -0 into +0, and a cut at a multiple of 16 would then show.
    """
    for group in cutlass.range(groups, unroll=1):
        at = (None, None, group, stage)
        cute.nvgpu.warpgroup.fence()
        cute.gemm(mma, acc, tCrA[at], tCrB[at], acc)
        cute.nvgpu.warpgroup.commit_group()


def operands(tiled: cute.TiledMma, thread, sA: cute.Tensor, sB: cute.Tensor):
    """Shared-memory operands A and B of the warpgroup whose first thread is ``thread``."""
    part = tiled.get_slice(thread)
    return (
        tiled.make_fragment_A(part.partition_A(sA)),
        tiled.make_fragment_B(part.partition_B(sB)),
    )


@cute.jit
def start(mma: cute.TiledMma, acc, tCrA, tCrB, a_stage, b_stage):
    """acc = Σ A_g B_gᵀ, both operands in shared memory, k16 groups ascending; one batch."""
    cute.nvgpu.warpgroup.fence()
    for group in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, group > 0)
        a, b = tCrA[None, None, group, a_stage], tCrB[None, None, group, b_stage]
        cute.gemm(mma, acc, a, b, acc)
    cute.nvgpu.warpgroup.commit_group()


@cute.jit
def extend(mma: cute.TiledMma, acc, rA, tCrB, stage):
    """acc += Σ A_g B_gᵀ, A in registers, k16 groups ascending; one batch."""
    mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
    cute.nvgpu.warpgroup.fence()
    for group in cutlass.range_constexpr(cute.size(rA, mode=[2])):
        cute.gemm(mma, acc, rA[None, None, group], tCrB[None, None, group, stage], acc)
    cute.nvgpu.warpgroup.commit_group()
