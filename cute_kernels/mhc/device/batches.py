"""Batches of WGMMA over stages of shared memory."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def sum_stages(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    tCrA: cute.Tensor,
    tCrB: cute.Tensor,
    pairs: cutlass.Constexpr[tuple[tuple[int, int], ...]],
    first: cutlass.Int32,
):
    """acc = Σ over pairs (a, b) of stages, in their order, of Σ_g A_g[first + a] B_g[b]ᵀ.

    One batch.
    """
    warpgroup.fence()
    for i, (a, b) in enumerate(pairs):
        for group in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, i + group > 0)
            tCrA_group = tCrA[None, None, group, first + a]
            cute.gemm(mma, acc, tCrA_group, tCrB[None, None, group, b], acc)
    warpgroup.commit_group()


@cute.jit
def add_stages(
    mma: cute.TiledMma,
    accs: list[cute.Tensor],
    tCrAs: list[cute.Tensor],
    tCrB: cute.Tensor,
    groups: tuple[cutlass.Int32, ...],
    stages: tuple[cutlass.Int32, ...],
):
    """acc_i += Σ over ``groups`` g and ``stages`` b of B, both in their order, of A_ig B_g[b]ᵀ.

    One batch.  ``mma`` must be set to accumulate.
    """
    warpgroup.fence()
    for group in groups:
        for acc, tCrA in zip(accs, tCrAs, strict=True):
            for b in stages:
                cute.gemm(mma, acc, tCrA[None, None, group], tCrB[None, None, group, b], acc)
    warpgroup.commit_group()
