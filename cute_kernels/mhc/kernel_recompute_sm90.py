"""Streams after each of several sites, on SM90: multilayer_recompute in one pass.

    y_j = (f + bias) post_j + Σ_i x_i res[i, j]     of the first site
    the rounded y of a site is the x of the next

Layout       x and each y [M, K] rows of streams (mhc/config.py); each f [M, C]; each post [M, n]
             and res [M, n²] fp32 with any row stride.
Order        i ascending, one fma each, one rounding a site: the bytes of expand_combine.
Work         a CTA takes a token, and then every P-th one, P being the size of the grid.  x is read
             once; streams stay in registers between sites.
Measured     docs/status.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda

from ..compile import fake
from .config import MOST_SITES, RecomputeConfig, vector_channels
from .device.arguments import ExpandTensors, FakeRows
from .device.vector import TokenCoefficients, Vector, load_token, rounded, to_fp32

#: (n, sites) -> CTAs of an SM that registers of coefficients, n (n + 1) a site, leave room for.
_BLOCKS = {(2, 4): 3, (4, 3): 2, (4, 4): 2}


class MhcRecomputeSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: RecomputeConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        channels = vector_channels(config.n, config.layout)
        self.vector = Vector(self.dtype, config.n, config.layout, channels)
        few = config.layout == "nc" or config.dtype == "fp32"
        # Vectors in flight.
        self.ahead = 1 if few else 4
        self.blocks = 2 if few else _BLOCKS.get((config.n, config.sites), 4)
        # Where registers are short, coefficients are loaded again for each vector.
        self.reload = (config.layout, config.n, config.sites) == ("nc", 4, 4)

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mF0: cute.Tensor | None,
        mBias0: cute.Tensor | None,
        mPost0: cute.Tensor | None,
        mRes0: cute.Tensor | None,
        mY0: cute.Tensor | None,
        mF1: cute.Tensor | None,
        mBias1: cute.Tensor | None,
        mPost1: cute.Tensor | None,
        mRes1: cute.Tensor | None,
        mY1: cute.Tensor | None,
        mF2: cute.Tensor | None,
        mBias2: cute.Tensor | None,
        mPost2: cute.Tensor | None,
        mRes2: cute.Tensor | None,
        mY2: cute.Tensor | None,
        mF3: cute.Tensor | None,
        mBias3: cute.Tensor | None,
        mPost3: cute.Tensor | None,
        mRes3: cute.Tensor | None,
        mY3: cute.Tensor | None,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            mX,
            ExpandTensors(mF0, mBias0, mPost0, mRes0, mY0),
            ExpandTensors(mF1, mBias1, mPost1, mRes1, mY1),
            ExpandTensors(mF2, mBias2, mPost2, mRes2, mY2),
            ExpandTensors(mF3, mBias3, mPost3, mRes3, mY3),
        ).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=self.blocks,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=10,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        first: ExpandTensors,
        second: ExpandTensors,
        third: ExpandTensors,
        fourth: ExpandTensors,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        sites = [first, second, third, fourth][: self.config.sites]
        m, k = mX.shape
        total, step = k // self.config.n, self.vector.channels
        batch = self.config.threads * self.ahead * step
        for row in cutlass.range(block, m, ctas, unroll=1):
            coefficients = [None] * self.config.sites
            if cutlass.const_expr(not self.reload):
                coefficients = [self.coefficients(site, row) for site in sites]
            limit = total - total % batch
            for c in cutlass.range(tidx * step, limit, batch, unroll=1):
                start = cutlass.Int64(c)
                channels = [start + a * self.config.threads * step for a in range(self.ahead)]
                self.vectors(mX, sites, coefficients, row, channels, total)
            for c in cutlass.range(
                limit + tidx * step, total, self.config.threads * step, unroll=1
            ):
                self.vectors(mX, sites, coefficients, row, [c], total)

    @cute.jit
    def coefficients(self, site: ExpandTensors, row: cutlass.Int32) -> TokenCoefficients:
        """Load the coefficients of a token at a site."""
        return load_token(self.config.n, row, None, site.mPost, site.mRes)

    @cute.jit
    def vectors(
        self,
        mX: cute.Tensor,
        sites: list[ExpandTensors],
        coefficients: list[TokenCoefficients | None],
        row: cutlass.Int32,
        channels: list[cutlass.Int64],
        total: cutlass.Int32,
    ):
        """Take the vectors of a token at ``channels`` through all sites: all loads first."""
        vector = self.vector
        # Computed by hand: rows begin at 64-bit offsets.  Of a row of [M, C], and of [M, K]:
        base = cutlass.Int64(row) * total
        x_base = base * self.config.n
        rXs = [vector.load(mX, x_base, c, total) for c in channels]
        rFs = [[vector.load_raw(site.mF, base, c, total) for site in sites] for c in channels]
        # One vector after the other: together they would take the registers of loads in flight.
        for c, rX, rF in zip(channels, rXs, rFs):
            self.through_sites(sites, coefficients, row, c, total, rX, rF)

    @cute.jit
    def through_sites(
        self,
        sites: list[ExpandTensors],
        coefficients: list[TokenCoefficients | None],
        row: cutlass.Int32,
        c: cutlass.Int64,
        total: cutlass.Int32,
        rX: cute.Tensor,
        rF: list[cute.Tensor],
    ):
        """Take one vector through all sites; store it behind each."""
        vector = self.vector
        x_base = cutlass.Int64(row) * total * self.config.n
        for site, by, f in zip(sites, coefficients, rF):
            if cutlass.const_expr(by is None):
                by = self.coefficients(site, row)
            bias = None
            if cutlass.const_expr(site.mBias is not None):
                bias = vector.load_channels(site.mBias, cutlass.Int64(0), c, total)
            # y_j = (f + bias) post_j + Σ_i x_i res[i, j]
            x = to_fp32(rX)
            y = vector.expanded(x, to_fp32(f), bias, by.post, by.res)
            rX = rounded(y, self.dtype)
            vector.store(rX, site.mY, x_base, c, total)


def build(config: RecomputeConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    rows = FakeRows(config.dtype, config.n)
    sites = [rows.expand(config.bias) for _ in range(config.sites)]
    sites += [(None,) * 5] * (MOST_SITES - config.sites)
    return compile(
        MhcRecomputeSm90(config),
        rows.streams(),
        *(tensor for site in sites for tensor in site),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
