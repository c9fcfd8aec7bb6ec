"""A small CuTe kernel with operand A in registers, right and with the fault that R8 is for.

The faulty one loads A's next fragment before the wait for the product that reads the last one, and
copies it to the operand's registers after the wait: in the source nothing is overwritten early, but
the compiler loads to the operand's registers directly.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

M, N, STEPS = 64, 16, 8
K = 16 * STEPS
#: When a step's fragment of A is loaded: the defect is "before the wait".
WHEN = ("after the wait", "before the wait")


class Reloading:
    """C = A Bᵀ in bf16, a warpgroup, a loop over steps of 16; A as fragments [step, thread, 4]."""

    def __init__(self, when: str):
        assert when in WHEN
        self.when = when

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        dtype, k = cutlass.BFloat16, OperandMajorMode.K
        source = warpgroup.OperandSource.RMEM
        mma = sm90.make_trivial_tiled_mma(
            dtype, dtype, k, k, cutlass.Float32, (1, 1, 1), (M, N), source
        )
        layout_b = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (M, N, 16), dtype, STEPS)
        self.kernel(mma, a, b, c, layout_b).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        layout_b: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        sB = smem.allocate_tensor(cutlass.BFloat16, layout_b.outer, 1024, swizzle=layout_b.inner)
        if thread < N:
            for step in cutlass.range_constexpr(STEPS):
                for k in cutlass.range_constexpr(16):
                    sB[thread, k, step] = b[thread, 16 * step + k]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        part = mma.get_slice(thread)
        tCrB = mma.make_fragment_B(part.partition_B(sB))
        rA = mma.make_fragment_A(part.partition_shape_A((M, 16)))
        words = cute.recast_tensor(rA, cutlass.Int32)
        tCgC = part.partition_C(c)
        acc = cute.make_rmem_tensor(tCgC.shape, cutlass.Float32)
        acc.fill(0.0)
        loaded = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Int32)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for step in cutlass.range(STEPS, unroll=1):
            if cutlass.const_expr(self.when == "after the wait"):
                warpgroup.wait_group(0)
            loaded.store(a[step, thread, None].load())
            if cutlass.const_expr(self.when == "before the wait"):
                warpgroup.wait_group(0)
            for i in cutlass.range_constexpr(4):
                words[i] = loaded[i]
            warpgroup.fence()
            cute.gemm(mma, acc, rA[None, None, 0], tCrB[None, None, 0, step], acc)
            warpgroup.commit_group()
        warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(acc)):
            tCgC[i] = acc[i]


def compile_reloading(when: str, compile=cute.compile, **stream):
    """Compile once; ``stream``: options of the fake stream."""

    def compact(dtype, *shape):
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return make_fake_tensor(dtype, shape, stride, assumed_align=16)

    return compile(
        Reloading(when),
        compact(cutlass.Int32, STEPS, 128, 4),
        compact(cutlass.BFloat16, N, K),
        compact(cutlass.Float32, M, N),
        make_fake_stream(**stream),
    )
