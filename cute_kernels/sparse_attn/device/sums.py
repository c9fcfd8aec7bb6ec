"""Products that are added to a sum which is in flight from one iteration of a loop to the next."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def extend(mma: cute.TiledMma, acc, rA, tCrB, stage, begun):
    """acc = Σ A_g B_gᵀ, and acc before it if ``begun``; A in registers, one batch as of `dsl.mma`.

    Zeros that are written to it ahead of the loop make ptxas await each product by itself (C7514).
    """
    warpgroup.fence()
    for group in cutlass.range_constexpr(cute.size(rA, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, begun if group == 0 else True)
        cute.gemm(mma, acc, rA[None, None, group], tCrB[None, None, group, stage], acc)
    warpgroup.commit_group()
