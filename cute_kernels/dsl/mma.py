"""WGMMA: the tiled instruction and the loops over its K groups, the only ones of the library.

Every function but ``operands`` commits what it issues as one batch (``add_groups``: a batch a
group) and does not wait for it.
"""

import cutlass
from cutlass import cute
from cutlass.utils import hopper_helpers

from .smem import major_of

WARPGROUP = 128
K_GROUP = 16


def tiled_mma(
    dtype: type[cutlass.Numeric], a_major: str, b_major: str, warpgroups: int, n: int
) -> cute.TiledMma:
    """Return ``wgmma.m64n{n}k16`` with fp32 accumulators, ``warpgroups`` of them along M."""
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
def add_block(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    tCrA: cute.Tensor,
    tCrB: cute.Tensor,
    stage: cutlass.Int32,
):
    """acc += Σ_g A_g B_gᵀ over all groups g of one stage, ascending; one batch."""
    cute.nvgpu.warpgroup.fence()
    for group in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
        coord = (None, None, group, stage)
        cute.gemm(mma, acc, tCrA[coord], tCrB[coord], acc)
    cute.nvgpu.warpgroup.commit_group()


@cute.jit
def add_groups(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    tCrA: cute.Tensor,
    tCrB: cute.Tensor,
    stage: cutlass.Int32,
    groups: cutlass.Int32,
):
    """acc += Σ_g A_g B_gᵀ over the first ``groups`` groups of one stage, ascending.

    For the K tail: a group that lies wholly beyond K is not multiplied.  Adding its zeros could
    turn an accumulator of -0 into +0, and a cut at a multiple of 16 would then show.
    """
    for group in cutlass.range(groups, unroll=1):
        coord = (None, None, group, stage)
        cute.nvgpu.warpgroup.fence()
        cute.gemm(mma, acc, tCrA[coord], tCrB[coord], acc)
        cute.nvgpu.warpgroup.commit_group()


def operands(
    tiled: cute.TiledMma, thread: cutlass.Int32, sA: cute.Tensor, sB: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """(tCrA, tCrB): shared-memory operands of the warpgroup whose first thread is ``thread``."""
    thr_mma = tiled.get_slice(thread)
    return (
        tiled.make_fragment_A(thr_mma.partition_A(sA)),
        tiled.make_fragment_B(thr_mma.partition_B(sB)),
    )


@cute.jit
def start(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    tCrA: cute.Tensor,
    tCrB: cute.Tensor,
    a_stage: cutlass.Int32,
    b_stage: cutlass.Int32,
):
    """acc = Σ_g A_g B_gᵀ, both operands in shared memory, groups ascending; one batch."""
    cute.nvgpu.warpgroup.fence()
    for group in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, group > 0)
        tCrA_group, tCrB_group = tCrA[None, None, group, a_stage], tCrB[None, None, group, b_stage]
        cute.gemm(mma, acc, tCrA_group, tCrB_group, acc)
    cute.nvgpu.warpgroup.commit_group()


@cute.jit
def extend(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    rA: cute.Tensor,
    tCrB: cute.Tensor,
    stage: cutlass.Int32,
):
    """acc += Σ_g A_g B_gᵀ, A in registers, groups ascending; one batch."""
    mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
    cute.nvgpu.warpgroup.fence()
    for group in cutlass.range_constexpr(cute.size(rA, mode=[2])):
        cute.gemm(mma, acc, rA[None, None, group], tCrB[None, None, group, stage], acc)
    cute.nvgpu.warpgroup.commit_group()
