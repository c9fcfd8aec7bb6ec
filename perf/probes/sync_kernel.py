"""A bare chain of ``mma.sync.m16n8k16``, and 2^x as CuTe kernels have it.

Formula:  D[M, N] = C + sum_k A[M, K] * B[N, K], as wgmma_kernel.py, ascending k16 groups.

Limits: one warp per output tile of 16 x 8, operands from global memory; M a multiple of 16, N of 8.
It is for reading bits.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.mhc.device import matrix

from . import wgmma_kernel

_GROUP_K, _COLUMNS = wgmma_kernel.GROUP_K, 8
_THREADS = 256


class SyncChain:
    """Host function and kernel of the chain."""

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor | None,
        d: cute.Tensor,
        stream: cuda.CUstream,
    ):
        grid = [cute.size(d, mode=[0]) // matrix.ROWS, cute.size(d, mode=[1]) // _COLUMNS, 1]
        self.kernel(a, b, c, d).launch(grid=grid, block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        gA_mk: cute.Tensor,
        gB_nk: cute.Tensor,
        gC_mn: cute.Tensor | None,
        gD_mn: cute.Tensor,
    ):
        tile_m, tile_n, _ = cute.arch.block_idx()
        lane, _, _ = cute.arch.thread_idx()
        row, pair = lane // 4, lane % 4
        gA = cute.local_tile(
            cute.recast_tensor(gA_mk, cutlass.Int32), (matrix.ROWS, _GROUP_K // 2), (tile_m, None)
        )
        gB = cute.local_tile(
            cute.recast_tensor(gB_nk, cutlass.Int32), (_COLUMNS, _GROUP_K // 2), (tile_n, None)
        )
        first_m, first_n = tile_m * matrix.ROWS + row, tile_n * _COLUMNS + 2 * pair
        acc = cute.make_rmem_tensor((matrix.SUMS,), cutlass.Float32)
        acc.fill(0.0)
        if cutlass.const_expr(gC_mn is not None):
            for i in cutlass.range_constexpr(matrix.SUMS):
                acc[i] = gC_mn[first_m + i // 2 * 8, first_n + i % 2]
        for group in range(cute.size(gA, mode=[2])):
            rA = (
                gA[row, pair, group],
                gA[row + 8, pair, group],
                gA[row, pair + 4, group],
                gA[row + 8, pair + 4, group],
            )
            rB = (gB[row, pair, group], gB[row, pair + 4, group])
            matrix.multiply(acc, 0, rA, rB)
        for i in cutlass.range_constexpr(matrix.SUMS):
            gD_mn[first_m + i // 2 * 8, first_n + i % 2] = acc[i]


def build(*, with_c: bool = False, compiler=None):
    """Compiles the chain; the function that it returns is `wgmma_kernel.build`'s, without swap."""
    compiler = compiler or cute.compile
    options = {} if compiler is not cute.compile else {"options": "--enable-tvm-ffi"}
    compiled = compiler(SyncChain(), *wgmma_kernel.signature(with_c), **options)

    def run(a, b, d, c=None):
        if a.shape[0] % matrix.ROWS or b.shape[0] % _COLUMNS:
            raise ValueError(f"expected M a multiple of 16, N of 8, got {a.shape[0]}, {b.shape[0]}")
        compiled(a, b, c, d)

    return run


class Exp2:
    """y = 2^x of fp32 vectors, one element a thread."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, y).launch(
            grid=[cute.ceil_div(cute.size(x), _THREADS), 1, 1],
            block=[_THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, gX: cute.Tensor, gY: cute.Tensor):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        i = block * _THREADS + thread
        if i < cute.size(gX):
            gY[i] = cute.math.exp2(gX[i], fastmath=True)


def build_exp2(compiler=None):
    """Compiles `Exp2`: run(x, y) of fp32 vectors of one length."""
    compiler = compiler or cute.compile
    options = {} if compiler is not cute.compile else {"options": "--enable-tvm-ffi"}
    size = cute.sym_int()
    vector = make_fake_tensor(cutlass.Float32, (size,), stride=(1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return compiler(Exp2(), vector, vector, stream, **options)
