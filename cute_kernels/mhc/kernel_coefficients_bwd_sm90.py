"""Gradients of a token's coefficients, on SM90: Sinkhorn-Knopp, then gates.

    dz = Sinkhorn's backward of dP (or dres itself)
    g_pre = dpre p (1 - p),  g_post = dpost post_scale p (1 - p),  g_res = dz
    dH = α g / r,  dms = -½ r⁻³ Σ_j g_j α_j H_j,  dα = Σ_m Σ_j g H / r,  dβ = Σ_m g

Layout       H [M, N or more], ms [M], dpre, dpost [M, n], dP [M, n²], logits [M, n²] with any row
             stride; dH [M, W], dms [M], dz [M, n²]; parts [⌈M / 64⌉, 3 + N] of dα and dβ; fp32.
Order        Sinkhorn runs forward once more, its divisors stay in shared memory, and its matrices
             come back by multiplying with them; L = dlog of each goes through L - y Σ L.
             Parts: the lanes of a warp, neighbours first, then its two warps.
Work         a thread for a token.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy, reduce
from .config import WIDTH, CoefficientsConfig, mappings
from .device import mix, unit

WARP, TOKENS = 32, 64


class MhcCoefficientsBackwardSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: CoefficientsConfig):
        self.config = config
        self.columns, self.width = mappings(config.n), WIDTH[config.n]
        self.parts = 3 + self.columns

    @cute.jit
    def __call__(
        self,
        mH: cute.Tensor | None,
        mMs: cute.Tensor | None,
        mAlpha: cute.Tensor | None,
        mBeta: cute.Tensor | None,
        mZ: cute.Tensor | None,
        mDpre: cute.Tensor | None,
        mDpost: cute.Tensor | None,
        mDres: cute.Tensor,
        mDh: cute.Tensor | None,
        mDms: cute.Tensor | None,
        mParts: cute.Tensor | None,
        mDz: cute.Tensor | None,
        numbers: tuple,
        iterations: cutlass.Int32,
        stream,
    ):
        m = mDres.shape[0]
        read = (mH, mMs, mAlpha, mBeta, mZ)
        self.kernel(
            read, (mDpre, mDpost, mDres), (mDh, mDms, mParts, mDz), numbers, m, iterations
        ).launch(
            grid=((m + TOKENS - 1) // TOKENS, 1, 1),
            block=(TOKENS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, read: tuple, given: tuple, made: tuple, numbers: tuple, m, iterations):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        mH, mMs, mAlpha, mBeta, mZ = read
        mDh, mDms, mParts, mDz = made
        n = self.config.n
        allocator = SmemAllocator()
        sDivisors = None
        if cutlass.const_expr(self.config.sinkhorn):
            layout = cute.make_ordered_layout(
                (max(self.config.iterations - 1, 1), 2, n, TOKENS), order=(3, 2, 1, 0)
            )
            sDivisors = allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        token = block * TOKENS + tidx
        inside = token < m
        # Those behind the last compute along, as sums over lanes need them, and count for nothing.
        row = cutlass.min(token, m - 1)
        gradient = unit.coefficients(given[2], row, n * n)
        if cutlass.const_expr(self.config.gate):
            h = unit.coefficients(mH, row, self.columns)
            ms = copy.aligned(mMs, cutlass.Int64(row), 1)[0]
            logits = mix.logits(h, ms, (mAlpha, mBeta), numbers[0], n)
            z = unit.piece(logits, 2 * n, n * n)
        else:
            z = unit.coefficients(mZ, row, n * n)
        if cutlass.const_expr(self.config.sinkhorn):
            self.undo(z, gradient, sDivisors, numbers[3], iterations)
        if cutlass.const_expr(self.config.gate):
            own = (unit.coefficients(given[0], row, n), unit.coefficients(given[1], row, n))
            read = (logits, h, ms, mAlpha)
            sums = self.ungate(read, (*own, gradient), numbers, (mDh, mDms), (token, m))
            self.reduce(sums, mParts, inside, allocator)
        elif inside:
            unit.store(mDz, token, gradient)

    @cute.jit
    def undo(self, z, gradient, sDivisors, epsilon, iterations):
        """dP in ``gradient`` becomes dz."""
        tidx, _, _ = cute.arch.thread_idx()
        n = self.config.n
        eps = epsilon if self.config.form == "epsilon" else None
        s, y = (cute.make_rmem_tensor(cute.make_layout(n * n), cutlass.Float32) for _ in range(2))
        divisors = cute.make_rmem_tensor(cute.make_layout(n), cutlass.Float32)
        mix.start(z, s, y, n, eps)
        for t in cutlass.range(iterations - 1, unroll=1):
            for side, axis in enumerate((mix.ROWS, mix.COLUMNS)):
                mix.normalise(y, divisors, n, axis, eps)
                for at in cutlass.range_constexpr(n):
                    sDivisors[t, side, at, tidx] = divisors[at]
        gradient.store(gradient.load() * y.load())
        for back in cutlass.range(iterations - 1, unroll=1):
            t = iterations - 2 - back
            for side, axis in ((1, mix.COLUMNS), (0, mix.ROWS)):
                mix.back(gradient, y, n, axis)
                mix.undo(y, [sDivisors[t, side, at, tidx] for at in range(n)], n, axis)
        mix.back(gradient, y, n, mix.COLUMNS)
        if cutlass.const_expr(eps is not None):
            # Q = s + eps: dlog s = dlog Q s / Q.
            for i in cutlass.range_constexpr(n * n):
                gradient[i] = gradient[i] * (s[i] / (s[i] + eps))
        mix.back(gradient, s, n, mix.ROWS)

    @cute.jit
    def ungate(self, read: tuple, given: tuple, numbers: tuple, made: tuple, place: tuple):
        """dH and dms are stored; what the token adds to dα and dβ comes back."""
        logits, h, ms, mAlpha = read
        mDh, mDms = made
        token, m = place
        n = self.config.n
        eps, _, post_scale, _ = numbers
        over = cutlass.Float32(1.0) / cute.math.sqrt(ms + eps)
        sums = cute.make_rmem_tensor(cute.make_layout(self.parts), cutlass.Float32)
        d_h = cute.make_rmem_tensor(cute.make_layout(self.width), cutlass.Float32)
        d_h.fill(0.0)
        d_ms = cutlass.Float32(0.0)
        for block in cutlass.range_constexpr(3):
            first, count = ((0, n), (n, n), (2 * n, n * n))[block]
            alpha = mAlpha[block]
            of_alpha = cutlass.Float32(0.0)
            for i in cutlass.range_constexpr(count):
                j = first + i
                if cutlass.const_expr(block == 2):
                    g = given[2][i]
                else:
                    # 1 - p is the gate of -z: a difference from 1 would lose what is left of it.
                    slope = mix.sigmoid(logits[j]) * mix.sigmoid(-logits[j])
                    if cutlass.const_expr(block == 1):
                        slope = slope * post_scale
                    g = given[block][i] * slope
                sums[3 + j] = g
                d_h[j] = (alpha * over) * g
                of_alpha = cute.math.fma(g, h[j], of_alpha)
            sums[block] = of_alpha * over
            d_ms = cute.math.fma(alpha, of_alpha, d_ms)
        if token < m:
            unit.store(mDh, token, d_h)
            factor = (cutlass.Float32(-0.5) * over) / (ms + eps)
            copy.aligned(mDms, cutlass.Int64(token), 1)[0] = factor * d_ms
        return sums

    @cute.jit
    def reduce(self, sums, mParts, inside, allocator):
        """Σ over the CTA's tokens."""
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        parts = self.parts
        layout = cute.make_ordered_layout((TOKENS // WARP, parts), order=(1, 0))
        sSums = allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        for v in cutlass.range_constexpr(parts):
            value = sums[v] if inside else cutlass.Float32(0.0)
            value = reduce.over_threads(value, WARP)
            if tidx % WARP == 0:
                sSums[tidx // WARP, v] = value
        cute.arch.sync_threads()
        if tidx < parts:
            total = reduce.over_lanes(sSums, tidx)
            copy.aligned(mParts, cutlass.Int64(block) * parts + tidx, 1)[0] = total


def build(config: CoefficientsConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    n = config.n
    m = fake.size()
    columns, width = mappings(n), WIDTH[n]
    gate = config.gate

    def made(there: bool, count: int):
        return fake.compact(cutlass.Float32, (m, count), 16) if there else None

    return compile(
        MhcCoefficientsBackwardSm90(config),
        fake.rows("fp32", m, fake.size()) if gate else None,
        fake.vector("fp32", m) if gate else None,
        fake.vector("fp32", 3) if gate else None,
        fake.vector("fp32", columns) if gate else None,
        None if gate else fake.rows("fp32", m, n * n),
        fake.rows("fp32", m, n) if gate else None,
        fake.rows("fp32", m, n) if gate else None,
        fake.rows("fp32", m, n * n),
        made(gate, width),
        fake.vector("fp32", m) if gate else None,
        fake.compact(cutlass.Float32, (fake.size(), 3 + columns), 4) if gate else None,
        made(not gate, n * n),
        tuple(cutlass.Float32(0.0) for _ in range(4)),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
