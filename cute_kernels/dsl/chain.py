"""Products of one shared-memory stage, issued as one batch; k16 groups ascending."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup


def operands(tiled: cute.TiledMma, thread, sA: cute.Tensor, sB: cute.Tensor):
    """Shared-memory operands A and B of the warpgroup whose first thread is ``thread``."""
    part = tiled.get_slice(thread)
    return (
        tiled.make_fragment_A(part.partition_A(sA)),
        tiled.make_fragment_B(part.partition_B(sB)),
    )


@cute.jit
def start(tiled: cute.TiledMma, acc, tCrA, tCrB, a_stage, b_stage):
    """acc = Σ A_g B_gᵀ, both operands in shared memory; committed, not awaited."""
    warpgroup.fence()
    for group in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
        tiled.set(warpgroup.Field.ACCUMULATE, group > 0)
        a, b = tCrA[None, None, group, a_stage], tCrB[None, None, group, b_stage]
        cute.gemm(tiled, acc, a, b, acc)
    warpgroup.commit_group()


@cute.jit
def extend(tiled: cute.TiledMma, acc, rA, tCrB, stage):
    """acc += Σ A_g B_gᵀ, A in registers; committed, not awaited."""
    tiled.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for group in cutlass.range_constexpr(cute.size(rA, mode=[2])):
        cute.gemm(tiled, acc, rA[None, None, group], tCrB[None, None, group, stage], acc)
    warpgroup.commit_group()
