"""Coefficients of a token from its projection, on SM90: sum of chunks, gates, Sinkhorn-Knopp.

    H = Σ_s sums[s],  ms = Σ_s squares[s] / K
    z = α H / √(ms + ε) + β;  pre = σ(z) + pre_eps;  post = post_scale σ(z);  res = z
    P = Sinkhorn of res

Layout       sums [S, M, N], squares [S, M], H [M, W], pre, post [M, n], res [M, n²], fp32.
Order        chunks ascending; Sinkhorn: mhc/device/mix.py.
Work         eight threads add the chunks of a token, four columns each; then one thread computes a
             token's coefficients.  One kernel for each step, and one for all steps: the same
             functions, the same bits.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy
from .config import WIDTH, CoefficientsConfig, mappings
from .device import mix
from .device.arguments import Scalars
from .device.vector import load_coefficients, store_compact

#: Tokens of a CTA, and threads of a token while chunks are added.
TOKENS, QUADS = 32, 8


@dataclass(frozen=True)
class Tensors:
    """Global tensors, fp32; None for those that a configuration does not use.

    mSums: [S, M, N] and mSquares: [S, M], sums of chunks.  mH: [M, W].  mMs: [M].
    mAlpha: [3].  mBeta: [N].  mPre, mPost: [M, n].  mZ: [M, n²], logits.  mRes: [M, n²].
    """

    mSums: cute.Tensor | None
    mSquares: cute.Tensor | None
    mH: cute.Tensor | None
    mMs: cute.Tensor | None
    mAlpha: cute.Tensor | None
    mBeta: cute.Tensor | None
    mPre: cute.Tensor | None
    mPost: cute.Tensor | None
    mZ: cute.Tensor | None
    mRes: cute.Tensor | None


class MhcCoefficientsSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: CoefficientsConfig):
        self.config = config
        self.columns, self.width = mappings(config.n), WIDTH[config.n]
        self.threads = TOKENS * QUADS if config.source == "chunks" else 2 * TOKENS
        self.tokens = TOKENS if config.source == "chunks" else 2 * TOKENS

    @cute.jit
    def __call__(
        self,
        mSums: cute.Tensor | None,
        mSquares: cute.Tensor | None,
        mH: cute.Tensor | None,
        mMs: cute.Tensor | None,
        mAlpha: cute.Tensor | None,
        mBeta: cute.Tensor | None,
        mPre: cute.Tensor | None,
        mPost: cute.Tensor | None,
        mZ: cute.Tensor | None,
        mRes: cute.Tensor | None,
        scalars: tuple[cutlass.Float32, cutlass.Float32, cutlass.Float32, cutlass.Float32],
        size: cutlass.Int32,
        iterations: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        if cutlass.const_expr(mH is not None):
            m = mH.shape[0]
        else:
            m = mZ.shape[0]
        tensors = Tensors(mSums, mSquares, mH, mMs, mAlpha, mBeta, mPre, mPost, mZ, mRes)
        self.kernel(tensors, Scalars(*scalars), m, size, iterations).launch(
            grid=((m + self.tokens - 1) // self.tokens, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tensors: Tensors,
        scalars: Scalars,
        m: cutlass.Int32,
        size: cutlass.Int32,
        iterations: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        n = self.config.n
        token = block * self.tokens + tidx
        if cutlass.const_expr(self.config.source == "chunks"):
            # One column of padding: threads of a warp read different banks.
            layout = cute.make_ordered_layout((TOKENS, self.columns + 1), order=(1, 0))
            sH = SmemAllocator().allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
            self.add_chunks(tensors, sH, block * TOKENS, size)
            cute.arch.sync_threads()
        if cutlass.const_expr(self.config.gate or self.config.sinkhorn):
            if (tidx < self.tokens) & (token < m):
                z = cute.make_rmem_tensor(cute.make_layout(n * n), cutlass.Float32)
                if cutlass.const_expr(self.config.gate):
                    h = cute.make_rmem_tensor(cute.make_layout(self.columns), cutlass.Float32)
                    if cutlass.const_expr(self.config.source == "chunks"):
                        for j in cutlass.range_constexpr(self.columns):
                            h[j] = sH[tidx, j]
                        ms = sH[tidx, self.columns]
                    else:
                        h.store(load_coefficients(tensors.mH, token, self.columns).load())
                        ms = copy.aligned(tensors.mMs, cutlass.Int64(token), 1)[0]
                    self.gate(tensors, scalars, h, ms, z, token)
                else:
                    z.store(load_coefficients(tensors.mZ, token, n * n).load())
                if cutlass.const_expr(self.config.sinkhorn):
                    self.sinkhorn(z, scalars.sinkhorn_eps, iterations)
                store_compact(tensors.mRes, token, z)

    @cute.jit
    def add_chunks(
        self, tensors: Tensors, sH: cute.Tensor, first: cutlass.Int32, size: cutlass.Int32
    ):
        """H = Σ_s sums[s], ms = Σ_s squares[s] / K, s ascending, of the CTA's tokens.

        Both are stored to global memory and to ``sH`` [token, column], ms in the last column.
        """
        tidx, _, _ = cute.arch.thread_idx()
        row, quad = tidx // QUADS, tidx % QUADS
        token = first + row
        mSums, mSquares, mH, mMs = tensors.mSums, tensors.mSquares, tensors.mH, tensors.mMs
        chunks, m, columns = mSums.shape
        if token < m:
            if quad < self.columns // 4:
                total = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Float32)
                # Computed by hand: 64-bit offsets, with one address for all chunks.
                offset = cutlass.Int64(token) * columns + 4 * quad
                step = cutlass.Int64(m) * columns
                total.store(copy.aligned(mSums, offset, 4).load())
                for s in cutlass.range(1, chunks, unroll=4):
                    total.store(total.load() + copy.aligned(mSums, offset + s * step, 4).load())
                for i in cutlass.range_constexpr(4):
                    sH[row, 4 * quad + i] = total[i]
                copy.aligned(mH, cutlass.Int64(token) * self.width + 4 * quad, 4).store(
                    total.load()
                )
            elif 4 * quad < self.width:
                zeros = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Float32)
                zeros.fill(0.0)
                copy.aligned(mH, cutlass.Int64(token) * self.width + 4 * quad, 4).store(
                    zeros.load()
                )
            if quad == QUADS - 1:
                offset = cutlass.Int64(token)
                squares = copy.aligned(mSquares, offset, 1)[0]
                for s in cutlass.range(1, chunks, unroll=4):
                    chunk_squares = copy.aligned(mSquares, offset + cutlass.Int64(s) * m, 1)[0]
                    squares = squares + chunk_squares
                ms = squares / size.to(cutlass.Float32)
                sH[row, self.columns] = ms
                copy.aligned(mMs, offset, 1)[0] = ms

    @cute.jit
    def gate(
        self,
        tensors: Tensors,
        scalars: Scalars,
        h: cute.Tensor,
        ms: cutlass.Float32,
        z: cute.Tensor,
        token: cutlass.Int32,
    ):
        """Store pre = σ(z) + pre_eps and post = post_scale σ(z); write the logits of res to z."""
        n = self.config.n
        pre, post = (cute.make_rmem_tensor(cute.make_layout(n), cutlass.Float32) for _ in range(2))
        logits = mix.logits(h, ms, tensors.mAlpha, tensors.mBeta, scalars.eps, n)
        for i in cutlass.range_constexpr(n):
            pre[i] = mix.sigmoid(logits[i]) + scalars.pre_eps
            post[i] = mix.sigmoid(logits[n + i]) * scalars.post_scale
        for i in cutlass.range_constexpr(n * n):
            z[i] = logits[2 * n + i]
        store_compact(tensors.mPre, token, pre)
        store_compact(tensors.mPost, token, post)

    @cute.jit
    def sinkhorn(self, z: cute.Tensor, epsilon: cutlass.Float32, iterations: cutlass.Int32):
        """Replace the logits z by P = Sinkhorn-Knopp of z."""
        n = self.config.n
        eps = epsilon if self.config.form == "epsilon" else None
        s, y = (cute.make_rmem_tensor(cute.make_layout(n * n), cutlass.Float32) for _ in range(2))
        divisors = cute.make_rmem_tensor(cute.make_layout(n), cutlass.Float32)
        mix.start(z, s, y, n, eps)
        for _ in cutlass.range(iterations - 1, unroll=1):
            mix.normalise(y, divisors, n, mix.ROWS, eps)
            mix.normalise(y, divisors, n, mix.COLUMNS, eps)
        z.store(y.load())


def build(config: CoefficientsConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    n = config.n
    m, chunks = fake.size(), fake.size()
    columns, width = mappings(n), WIDTH[n]

    def vector(there: bool, length: int | cute.SymInt):
        return fake.vector("fp32", length) if there else None

    def made(there: bool, count: int):
        return fake.compact(cutlass.Float32, (m, count), 16) if there else None

    of_chunks, of_h = config.source == "chunks", config.source == "h"
    h = made(of_chunks, width)
    if of_h:
        h = fake.rows("fp32", m, fake.size())
    return compile(
        MhcCoefficientsSm90(config),
        fake.compact(cutlass.Float32, (chunks, m, columns), 16) if of_chunks else None,
        fake.compact(cutlass.Float32, (chunks, m), 4) if of_chunks else None,
        h,
        vector(of_chunks or of_h, m),
        vector(config.gate, 3),
        vector(config.gate, columns),
        made(config.gate, n),
        made(config.gate, n),
        fake.rows("fp32", m, n * n) if config.source == "z" else None,
        made(config.gate or config.sinkhorn, n * n),
        tuple(cutlass.Float32(0.0) for _ in range(4)),
        *(cutlass.Int32(1) for _ in range(2)),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
