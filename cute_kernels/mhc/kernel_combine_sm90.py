"""Aggregate and expand_combine of a token, on SM90.

    out = Σ_i x_i pre_i
    y_j = (f + bias) post_j + Σ_i x_i res[i, j]

Layout       x, y [M, K] rows of streams (mhc/config.py); f, out [M, C]; pre, post [M, n] and
             res [M, n²] fp32 with any row stride.
Order        i ascending, one fma each, one rounding; no sum goes over channels or tokens.
Work         a CTA takes a token, and then every P-th one, P being the size of the grid.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda

from ..compile import fake
from .config import CombineConfig
from .device import unit
from .device.arguments import CollapseTensors, ExpandTensors, token_rows
from .device.unit import Vector


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of one token, in registers: ``pre`` of aggregate, or ``post`` and ``res``."""

    pre: cute.Tensor | None
    post: cute.Tensor | None
    res: cute.Tensor | None


class MhcCombineSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: CombineConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        channels = 8 // config.n if config.layout == "cn" else 8
        self.vector = Vector(self.dtype, config.n, config.layout, channels, config.wide)
        self.ahead = config.ahead

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
            min_blocks_per_mp=self.config.blocks,
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
        stride = self.config.threads * step
        batch = self.ahead if self.config.wide else 1
        for row in cutlass.range(block, m, ctas, unroll=1):
            coefficients = self.coefficients(collapse, expand, row)
            c = tidx * step
            # Whole batches of vectors, then single ones.
            while c + (batch - 1) * stride < total:
                channels = [cutlass.Int64(c) + a * stride for a in range(batch)]
                checked = not self.config.wide
                self.vectors(mX, collapse, expand, coefficients, row, channels, total, checked)
                c = c + batch * stride
            if cutlass.const_expr(batch > 1):
                while c < total:
                    one = [cutlass.Int64(c)]
                    self.vectors(mX, collapse, expand, coefficients, row, one, total, False)
                    c = c + stride

    @cute.jit
    def coefficients(
        self, collapse: CollapseTensors, expand: ExpandTensors, row: cutlass.Int32
    ) -> Coefficients:
        """Load the coefficients of a token."""
        n = self.config.n
        if cutlass.const_expr(self.config.expand):
            post = unit.token_values(expand.mPost, row, n, self.config.packed)
            res = unit.token_values(expand.mRes, row, n * n, self.config.packed)
            return Coefficients(None, post, res)
        pre = unit.token_values(collapse.mPre, row, n, self.config.packed)
        return Coefficients(pre, None, None)

    @cute.jit
    def vectors(
        self,
        mX: cute.Tensor,
        collapse: CollapseTensors,
        expand: ExpandTensors,
        coefficients: Coefficients,
        row: cutlass.Int32,
        channels: list[cutlass.Int64],
        total: cutlass.Int32,
        checked: cutlass.Constexpr[bool],
    ):
        """Combine the vectors of a token at ``channels``: all loads first."""
        vector = self.vector
        # Computed by hand: rows begin at 64-bit offsets.  Of a row of [M, C], and of [M, K]:
        base = cutlass.Int64(row) * total
        x_base = base * self.config.n
        rXs = [vector.load(mX, x_base, c, total, checked) for c in channels]
        if cutlass.const_expr(self.config.expand):
            # y_j = (f + bias) post_j + Σ_i x_i res[i, j]
            mF, mBias = expand.mF, expand.mBias
            fs = [vector.load_raw(mF, base, c, total, checked) for c in channels]
            biases = [None] * len(channels)
            if cutlass.const_expr(mBias is not None):
                zero = cutlass.Int64(0)
                biases = [vector.load_raw(mBias, zero, c, total, checked) for c in channels]
            post, res = coefficients.post, coefficients.res
            for c, rX, f, bias in zip(channels, rXs, fs, biases):
                bias = None if bias is None else unit.to_fp32(bias)
                y = unit.expanded(vector, unit.to_fp32(rX), unit.to_fp32(f), bias, post, res)
                y = unit.rounded(y, self.dtype)
                vector.store(y, expand.mY, x_base, c, total, checked)
        else:
            # out = Σ_i x_i pre_i
            for c, rX in zip(channels, rXs):
                out = unit.collapsed(vector, unit.to_fp32(rX), coefficients.pre)
                vector.store_channels(out, collapse.mOut, base, c, total, checked)


def build(config: CombineConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    n, element = config.n, fake.DTYPES[config.dtype]
    m, k, c = (fake.size() for _ in range(3))
    align = 16 if config.wide else element.width // 8
    x, out = ((m, k), (m, c))
    collapse, expand = (None, None), (None,) * 5

    def coefficients(columns: int):
        return token_rows(m, columns, config.packed, columns)

    if config.expand:
        bias = fake.compact(element, (c,), align) if config.bias else None
        tokens = (coefficients(n), coefficients(n * n))
        expand = (fake.compact(element, out, align), bias, *tokens, fake.compact(element, x, align))
    else:
        collapse = (coefficients(n), fake.compact(element, out, align))
    return compile(
        MhcCombineSm90(config),
        fake.compact(element, x, align),
        *collapse,
        *expand,
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
