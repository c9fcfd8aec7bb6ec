"""Aggregate and expand_combine of a token, on SM90: one of them, or both in one pass.

    out = Σ_i x_i pre_i
    y_j = (f + bias) post_j + Σ_i x_i res[i, j]
    both: y, and out = Σ_i y_i pre_i of the rounded y

Layout       x, y [M, K] rows of streams (mhc/config.py); f, out [M, C]; pre, post [M, n] and
             res [M, n²] fp32 with any row stride.
Order        i ascending, one fma each, one rounding; no sum goes over channels or tokens.
Work         a CTA takes a token, and then every P-th one, P being the size of the grid.
Measured     docs/status.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda

from ..compile import fake
from .config import CombineConfig, vector_channels
from .device.arguments import CollapseTensors, ExpandTensors, FakeRows
from .device.vector import TokenCoefficients, Vector, load_token, rounded, to_fp32


class MhcCombineSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: CombineConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        channels = vector_channels(config.n, config.layout)
        self.vector = Vector(self.dtype, config.n, config.layout, channels)
        # Vectors in flight; one of the layout "nc" is n times as long.
        self.ahead = config.ahead if config.layout == "cn" else 1
        self.collapse = config.collapse or not config.expand
        # Vectors of n = 2 have as many registers of f and bias as of x.
        few = config.layout == "nc" or config.dtype == "fp32" or (config.collapse and config.n == 2)
        self.blocks = 2 if few and config.expand else 4

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mPre: cute.Tensor | None,
        mOut: cute.Tensor | None,
        mF: cute.Tensor | None,
        mBias: cute.Tensor | None,
        mPost: cute.Tensor | None,
        mRes: cute.Tensor | None,
        mY: cute.Tensor | None,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        collapse = CollapseTensors(mPre, mOut)
        expand = ExpandTensors(mF, mBias, mPost, mRes, mY)
        self.kernel(mX, collapse, expand).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=self.blocks,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=10,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, collapse: CollapseTensors, expand: ExpandTensors):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        m, k = mX.shape
        total, step = k // self.config.n, self.vector.channels
        batch = self.config.threads * self.ahead * step
        for row in cutlass.range(block, m, ctas, unroll=1):
            n = self.config.n
            coefficients = load_token(n, row, collapse.mPre, expand.mPost, expand.mRes)
            limit = total - total % batch
            for c in cutlass.range(tidx * step, limit, batch, unroll=1):
                first = cutlass.Int64(c)
                channels = [first + a * self.config.threads * step for a in range(self.ahead)]
                self.vectors(mX, collapse, expand, coefficients, row, channels, total)
            for c in cutlass.range(
                limit + tidx * step, total, self.config.threads * step, unroll=1
            ):
                self.vectors(mX, collapse, expand, coefficients, row, [c], total)

    @cute.jit
    def vectors(
        self,
        mX: cute.Tensor,
        collapse: CollapseTensors,
        expand: ExpandTensors,
        coefficients: TokenCoefficients,
        row: cutlass.Int32,
        channels: list[cutlass.Int64],
        total: cutlass.Int32,
    ):
        """Combine the vectors of a token at ``channels``: all loads first."""
        vector = self.vector
        # Computed by hand: rows begin at 64-bit offsets.  Of a row of [M, C], and of [M, K]:
        base = cutlass.Int64(row) * total
        x_base = base * self.config.n
        rXs = [vector.load(mX, x_base, c, total) for c in channels]
        if cutlass.const_expr(self.config.expand):
            # y_j = (f + bias) post_j + Σ_i x_i res[i, j]
            mF, mBias = expand.mF, expand.mBias
            fs = [vector.load_channels(mF, base, c, total) for c in channels]
            biases = [None] * len(channels)
            if cutlass.const_expr(mBias is not None):
                zero = cutlass.Int64(0)
                biases = [vector.load_channels(mBias, zero, c, total) for c in channels]
            post, res = coefficients.post, coefficients.res
            for c, rX, f, bias in zip(channels, rXs, fs, biases):
                y = vector.expanded(to_fp32(rX), f, bias, post, res)
                y = rounded(y, self.dtype)
                vector.store(y, expand.mY, x_base, c, total)
                if cutlass.const_expr(self.collapse):
                    # out = Σ_i y_i pre_i, of the rounded y
                    out = vector.collapsed(to_fp32(y), coefficients.pre)
                    vector.store_channels(out, collapse.mOut, base, c)
        else:
            # out = Σ_i x_i pre_i
            for c, rX in zip(channels, rXs):
                out = vector.collapsed(to_fp32(rX), coefficients.pre)
                vector.store_channels(out, collapse.mOut, base, c)


def build(config: CombineConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    rows, collapse, expand = FakeRows(config.dtype, config.n), (None, None), (None,) * 5
    if config.expand:
        expand = rows.expand(config.bias)
    if config.collapse or not config.expand:
        collapse = rows.tokens(config.n), rows.channels()
    return compile(
        MhcCombineSm90(config),
        rows.streams(),
        *collapse,
        *expand,
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
