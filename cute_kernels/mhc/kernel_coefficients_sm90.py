"""A token's coefficients from its projection, on SM90: sums of chunks, gates, Sinkhorn-Knopp.

    H = Σ_s sums[s],  ms = Σ_s squares[s] / K
    z = α H / √(ms + ε) + β;  pre = σ(z) + pre_eps;  post = post_scale σ(z);  res = z
    P = Sinkhorn of res

Layout       sums [S, M, N], squares [S, M], H [M, W], pre, post [M, n], res [M, n²], fp32.
Order        chunks ascending; of Sinkhorn see mhc/device/mix.py.
Work         eight threads of a token add its chunks, four columns each; then a thread has a token.
             One kernel for each part alone, and one for all: the same functions, the same bits.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy
from .config import WIDTH, CoefficientsConfig, mappings
from .device import mix, unit

#: Tokens of a CTA, and threads of a token while chunks are added.
TOKENS, QUADS = 32, 8


class MhcCoefficientsSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

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
        numbers: tuple,
        size: cutlass.Int32,
        iterations: cutlass.Int32,
        stream,
    ):
        if cutlass.const_expr(mH is not None):
            m = mH.shape[0]
        else:
            m = mZ.shape[0]
        tensors = (mH, mMs, mAlpha, mBeta, mPre, mPost, mZ, mRes)
        self.kernel(mSums, mSquares, tensors, numbers, m, size, iterations).launch(
            grid=((m + self.tokens - 1) // self.tokens, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mSums, mSquares, tensors: tuple, numbers: tuple, m, size, iterations):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        mH, mMs, mAlpha, mBeta, mPre, mPost, mZ, mRes = tensors
        n = self.config.n
        token = block * self.tokens + tidx
        if cutlass.const_expr(self.config.source == "chunks"):
            # A column more than there are: threads of a warp read different banks.
            layout = cute.make_ordered_layout((TOKENS, self.columns + 1), order=(1, 0))
            sH = SmemAllocator().allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
            self.add(mSums, mSquares, mH, mMs, sH, block * TOKENS, size)
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
                        h.store(unit.coefficients(mH, token, self.columns).load())
                        ms = copy.aligned(mMs, cutlass.Int64(token), 1)[0]
                    self.gate(h, ms, (mAlpha, mBeta), numbers, (mPre, mPost), z, token)
                else:
                    z.store(unit.coefficients(mZ, token, n * n).load())
                if cutlass.const_expr(self.config.sinkhorn):
                    self.sinkhorn(z, numbers[3], iterations)
                unit.store(mRes, token, z)

    @cute.jit
    def add(self, mSums, mSquares, mH, mMs, sH, first, size):
        """Chunks ascending: H and ms of the CTA's tokens, in global and in shared memory."""
        tidx, _, _ = cute.arch.thread_idx()
        own, quad = tidx // QUADS, tidx % QUADS
        token = first + own
        chunks, m, columns = mSums.shape
        if token < m:
            if quad < self.columns // 4:
                total = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Float32)
                at = cutlass.Int64(token) * columns + 4 * quad
                step = cutlass.Int64(m) * columns
                total.store(copy.aligned(mSums, at, 4).load())
                for s in cutlass.range(1, chunks, unroll=4):
                    total.store(total.load() + copy.aligned(mSums, at + s * step, 4).load())
                for i in cutlass.range_constexpr(4):
                    sH[own, 4 * quad + i] = total[i]
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
                at = cutlass.Int64(token)
                squares = copy.aligned(mSquares, at, 1)[0]
                for s in cutlass.range(1, chunks, unroll=4):
                    own_chunk = copy.aligned(mSquares, at + cutlass.Int64(s) * m, 1)[0]
                    squares = squares + own_chunk
                ms = squares / size.to(cutlass.Float32)
                sH[own, self.columns] = ms
                copy.aligned(mMs, at, 1)[0] = ms

    @cute.jit
    def gate(self, h, ms, weights: tuple, numbers: tuple, made: tuple, z, token):
        """pre and post are stored, the logits of res are ``z``."""
        n = self.config.n
        pre, post = (cute.make_rmem_tensor(cute.make_layout(n), cutlass.Float32) for _ in range(2))
        eps, pre_eps, post_scale, _ = numbers
        logits = mix.logits(h, ms, weights, eps, n)
        for i in cutlass.range_constexpr(n):
            pre[i] = mix.sigmoid(logits[i]) + pre_eps
            post[i] = mix.sigmoid(logits[n + i]) * post_scale
        for i in cutlass.range_constexpr(n * n):
            z[i] = logits[2 * n + i]
        unit.store(made[0], token, pre)
        unit.store(made[1], token, post)

    @cute.jit
    def sinkhorn(self, z, epsilon, iterations):
        """P in place of its logits."""
        n = self.config.n
        eps = epsilon if self.config.form == "epsilon" else None
        s, y = (cute.make_rmem_tensor(cute.make_layout(n * n), cutlass.Float32) for _ in range(2))
        divisors = cute.make_rmem_tensor(cute.make_layout(n), cutlass.Float32)
        mix.start(z, s, y, n, eps)
        for _ in cutlass.range(iterations - 1, unroll=1):
            mix.normalise(y, divisors, n, mix.ROWS, eps)
            mix.normalise(y, divisors, n, mix.COLUMNS, eps)
        z.store(y.load())


def build(config: CoefficientsConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    n = config.n
    m, chunks = fake.size(), fake.size()
    columns, width = mappings(n), WIDTH[n]

    def vector(there: bool, length):
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
