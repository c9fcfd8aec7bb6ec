"""aggregate and expand_combine of a token, on SM90.

    out = Σ_i x_i pre_i
    y_j = (f + bias) post_j + Σ_i x_i res[i, j]

Layout       x, y [M, K] rows of streams (mhc/config.py); f, out [M, C]; pre, post [M, n] and
             res [M, n²] fp32 with any row stride.
Order        i ascending, one fma each, one rounding; no sum goes over channels or tokens.
Work         a CTA for a token, which a larger M than CTAs walks on from.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute

from ..compile import fake
from .config import CombineConfig
from .device import unit
from .device.unit import Unit


class MhcCombineSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: CombineConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        channels = 8 // config.n if config.layout == "cn" else 8
        self.unit = Unit(self.dtype, config.n, config.layout, channels, config.wide)
        # A unit of the layout "nc" is n times as long.
        self.ahead = config.ahead if config.layout == "cn" else 1
        few = config.layout == "nc" or config.dtype == "fp32"
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
        stream,
    ):
        self.kernel(mX, (mPre, mOut), (mF, mBias, mPost, mRes, mY)).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=self.blocks,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=10,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, collapse: tuple, expand: tuple):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        m, k = mX.shape
        total, step = k // self.config.n, self.unit.channels
        batch = self.config.threads * self.ahead * step
        for row in cutlass.range(block, m, ctas, unroll=1):
            coefficients = self.coefficients(collapse, expand, row)
            tensors = (mX, collapse, expand, coefficients, row)
            limit = total - total % batch if self.config.wide else 0
            for c in cutlass.range(tidx * step, limit, batch, unroll=1):
                own = cutlass.Int64(c)
                places = [own + a * self.config.threads * step for a in range(self.ahead)]
                self.units(tensors, places, total, False)
            for c in cutlass.range(
                limit + tidx * step, total, self.config.threads * step, unroll=1
            ):
                self.units(tensors, [c], total, not self.config.wide)

    @cute.jit
    def coefficients(self, collapse: tuple, expand: tuple, row) -> tuple:
        """What a token has."""
        n = self.config.n
        if cutlass.const_expr(self.config.expand):
            return unit.coefficients(expand[2], row, n), unit.coefficients(expand[3], row, n * n)
        return (unit.coefficients(collapse[0], row, n),)

    @cute.jit
    def units(self, tensors: tuple, places: list, total, checked: cutlass.Constexpr):
        """A few units of a token: all loads first."""
        mX, collapse, expand, coefficients, row = tensors
        base = cutlass.Int64(row) * total
        wide = base * self.config.n
        raws = [self.unit.load(mX, wide, c, total, checked) for c in places]
        if cutlass.const_expr(self.config.expand):
            mF, mBias, _, _, mY = expand
            post, res = coefficients
            fs = [self.unit.load_channels(mF, base, c, total, checked) for c in places]
            biases = [None] * len(places)
            if cutlass.const_expr(mBias is not None):
                zero = cutlass.Int64(0)
                biases = [self.unit.load_channels(mBias, zero, c, total, checked) for c in places]
            for c, raw, f, bias in zip(places, raws, fs, biases):
                y = unit.expanded(self.unit, unit.widened(raw), f, bias, post, res)
                y = unit.narrowed(y, self.dtype)
                self.unit.store(y, mY, wide, c, total, checked)
        else:
            for c, raw in zip(places, raws):
                out = unit.collapsed(self.unit, unit.widened(raw), coefficients[0])
                self.unit.store_channels(out, collapse[1], base, c, total, checked)


def build(config: CombineConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    n, element = config.n, fake.DTYPES[config.dtype]
    m, k, c = (fake.size() for _ in range(3))
    align = 16 if config.wide else element.width // 8
    x, out = ((m, k), (m, c))
    collapse, expand = (None, None), (None,) * 5
    if config.expand:
        bias = fake.compact(element, (c,), align) if config.bias else None
        tokens = (fake.rows("fp32", m, n), fake.rows("fp32", m, n * n))
        expand = (fake.compact(element, out, align), bias, *tokens, fake.compact(element, x, align))
    else:
        collapse = (fake.rows("fp32", m, n), fake.compact(element, out, align))
    return compile(
        MhcCombineSm90(config),
        fake.compact(element, x, align),
        *collapse,
        *expand,
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
