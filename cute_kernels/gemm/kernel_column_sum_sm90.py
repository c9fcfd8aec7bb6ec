"""s[n] = round(Σ_m X[m, n]), on SM90 (and any CUDA GPU): the gradient of a bias.

Layout       X [M, N], row-major, rows 16-byte aligned; s [N].
Order        lane l of ``lanes`` adds rows l, l + lanes, l + 2 lanes, ... ascending in fp32; then
             the lanes are added in order, 0 to lanes - 1; one rounding.  A function of M and N
             alone: the grid has one CTA per ``columns`` columns, whatever the GPU.
M, N tails   rows beyond M are not added; columns beyond N are not stored.
Measured     not timed; on an H200 tests/gemm/test_gpu.py passed (2026-11-22, commit aead934).
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy, reduce
from .config import ColumnSumConfig

#: Rows of a lane in flight before the first is added; the order does not depend on it.
UNROLL = 8


class ColumnSumSm90:
    """Column sums: one thread per (lane, pair of columns), one warp per lane."""

    def __init__(self, config: ColumnSumConfig):
        assert config.columns == 64, "a warp's 32 threads take two columns each"
        self.dtype = fake.DTYPES[config.dtype]
        self.config = config

    @cute.jit
    def __call__(self, mX: cute.Tensor, mS: cute.Tensor, stream: cuda.CUstream):
        self.kernel(mX, mS).launch(
            grid=(cute.ceil_div(mX.shape[1], self.config.columns), 1, 1),
            block=(32 * self.config.lanes, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mS: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rows, columns = mX.shape
        lanes = self.config.lanes
        lane = cute.arch.make_warp_uniform(tidx // 32)
        pair = tidx % 32
        column = block * self.config.columns + 2 * pair
        # A pair beyond N reads the last pair instead; its sum is not stored.
        source = cutlass.min(column, (columns - 1) // 2 * 2)

        # s_l[n] = Σ_i X[l + i · lanes, n], i ascending
        rSums = cute.make_rmem_tensor(cute.make_layout(2), cutlass.Float32)
        rSums.fill(0.0)
        count = (rows - lane + lanes - 1) // lanes

        def load_pair(row: cutlass.Int32) -> cute.TensorSSA:
            return copy.vector(mX, (row, source), 2).load().to(cutlass.Float32)

        reduce.down_rows(rSums, load_pair, lane, lanes, count, UNROLL)

        # s[n] = Σ_l s_l[n], l ascending
        layout = cute.make_ordered_layout((lanes, self.config.columns), order=(1, 0))
        sPartials = SmemAllocator().allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        sPartials[lane, 2 * pair] = rSums[0]
        sPartials[lane, 2 * pair + 1] = rSums[1]
        cute.arch.sync_threads()
        target = block * self.config.columns + tidx
        if tidx < self.config.columns and target < columns:
            mS[target] = reduce.over_lanes(sPartials, tidx).to(self.dtype)


def build(config: ColumnSumConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    m, n = fake.size(), fake.size()
    return compile(
        ColumnSumSm90(config),
        fake.matrix(config.dtype, m, n, "k"),
        fake.vector(config.dtype, n),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
