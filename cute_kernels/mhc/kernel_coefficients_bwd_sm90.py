"""Gradients of a token's coefficients, on SM90: Sinkhorn-Knopp, then gates.

    dz = Sinkhorn's backward of dP (or dres itself)
    g_pre = dpre p (1 - p),  g_post = dpost post_scale p (1 - p),  g_res = dz
    dH = α g / r,  dms = -½ r⁻³ Σ_j g_j α_j H_j,  dα = Σ_m Σ_j g H / r,  dβ = Σ_m g

Layout       H [M, N or more], ms [M], dpre, dpost [M, n], dP [M, n²], logits [M, n²] with any row
             stride; dH [M, W], dms [M], dz [M, n²]; parts [⌈M / 64⌉, 3 + N] of dα and dβ; fp32.
Order        Sinkhorn is recomputed, with its divisors in shared memory; its backward recovers each
             matrix y by multiplying with them, and L = dlog y becomes L - y Σ L.
             Parts: lanes of a warp, neighbours first, then the two warps.
Work         a thread for a token.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy, reduce
from .config import WIDTH, CoefficientsConfig, mappings
from .device import mix
from .device.arguments import Scalars
from .device.vector import load_coefficients, store_compact, subview

WARP, TOKENS = 32, 64


@dataclass(frozen=True)
class Tensors:
    """Global tensors, fp32; None for those that a configuration does not use.

    mH: [M, N or more].  mMs: [M].  mAlpha: [3].  mBeta: [N].  mZ: [M, n²], logits.
    mDpre, mDpost: [M, n].  mDres: [M, n²].  Computed are mDh: [M, W], mDms: [M], mDz: [M, n²] and
    mParts: [⌈M / 64⌉, 3 + N], partial sums of dα and dβ.
    """

    mH: cute.Tensor | None
    mMs: cute.Tensor | None
    mAlpha: cute.Tensor | None
    mBeta: cute.Tensor | None
    mZ: cute.Tensor | None
    mDpre: cute.Tensor | None
    mDpost: cute.Tensor | None
    mDres: cute.Tensor
    mDh: cute.Tensor | None
    mDms: cute.Tensor | None
    mParts: cute.Tensor | None
    mDz: cute.Tensor | None


@dataclass(frozen=True)
class Token:
    """Forward values and incoming gradients of this thread's token, in registers."""

    logits: cute.Tensor
    h: cute.Tensor
    ms: cutlass.Float32
    d_pre: cute.Tensor
    d_post: cute.Tensor
    d_res: cute.Tensor


class MhcCoefficientsBackwardSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

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
        scalars: tuple[cutlass.Float32, cutlass.Float32, cutlass.Float32, cutlass.Float32],
        iterations: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        m = mDres.shape[0]
        inputs = (mH, mMs, mAlpha, mBeta, mZ, mDpre, mDpost, mDres)
        tensors = Tensors(*inputs, mDh, mDms, mParts, mDz)
        self.kernel(tensors, Scalars(*scalars), m, iterations).launch(
            grid=((m + TOKENS - 1) // TOKENS, 1, 1),
            block=(TOKENS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tensors: Tensors,
        scalars: Scalars,
        m: cutlass.Int32,
        iterations: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
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
        # Threads beyond the last token take part in the sums over lanes, with zeros.
        row = cutlass.min(token, m - 1)
        gradient = load_coefficients(tensors.mDres, row, n * n)
        if cutlass.const_expr(self.config.gate):
            h = load_coefficients(tensors.mH, row, self.columns)
            ms = copy.aligned(tensors.mMs, cutlass.Int64(row), 1)[0]
            logits = mix.logits(h, ms, tensors.mAlpha, tensors.mBeta, scalars.eps, n)
            z = subview(logits, 2 * n, n * n)
        else:
            z = load_coefficients(tensors.mZ, row, n * n)
        if cutlass.const_expr(self.config.sinkhorn):
            self.sinkhorn_backward(z, gradient, sDivisors, scalars.sinkhorn_eps, iterations)
        if cutlass.const_expr(self.config.gate):
            d_pre = load_coefficients(tensors.mDpre, row, n)
            d_post = load_coefficients(tensors.mDpost, row, n)
            values = Token(logits, h, ms, d_pre, d_post, gradient)
            sums = self.gate_backward(values, tensors.mAlpha, scalars, tensors, token, m)
            self.reduce(sums, tensors.mParts, inside, allocator)
        elif inside:
            store_compact(tensors.mDz, token, gradient)

    @cute.jit
    def sinkhorn_backward(
        self,
        z: cute.Tensor,
        gradient: cute.Tensor,
        sDivisors: cute.Tensor,
        epsilon: cutlass.Float32,
        iterations: cutlass.Int32,
    ):
        """Replace dP in ``gradient`` by dz.

        ``sDivisors``: [iteration, rows or columns, index, token].
        """
        tidx, _, _ = cute.arch.thread_idx()
        n = self.config.n
        eps = epsilon if self.config.form == "epsilon" else None
        s, y = (cute.make_rmem_tensor(cute.make_layout(n * n), cutlass.Float32) for _ in range(2))
        divisors = cute.make_rmem_tensor(cute.make_layout(n), cutlass.Float32)
        mix.start(z, s, y, n, eps)
        for t in cutlass.range(iterations - 1, unroll=1):
            for side, axis in enumerate((mix.ROWS, mix.COLUMNS)):
                mix.normalise(y, divisors, n, axis, eps)
                for index in cutlass.range_constexpr(n):
                    sDivisors[t, side, index, tidx] = divisors[index]
        # L = dlog y = dP P
        gradient.store(gradient.load() * y.load())
        for back in cutlass.range(iterations - 1, unroll=1):
            t = iterations - 2 - back
            for side, axis in ((1, mix.COLUMNS), (0, mix.ROWS)):
                # L = L - y Σ L; then y before this normalisation
                mix.back(gradient, y, n, axis)
                mix.undo(y, [sDivisors[t, side, index, tidx] for index in range(n)], n, axis)
        mix.back(gradient, y, n, mix.COLUMNS)
        if cutlass.const_expr(eps is not None):
            # Q = s + eps: dlog s = dlog Q s / Q.
            for i in cutlass.range_constexpr(n * n):
                gradient[i] = gradient[i] * (s[i] / (s[i] + eps))
        mix.back(gradient, s, n, mix.ROWS)

    @cute.jit
    def gate_backward(
        self,
        values: Token,
        mAlpha: cute.Tensor,
        scalars: Scalars,
        tensors: Tensors,
        token: cutlass.Int32,
        m: cutlass.Int32,
    ) -> cute.Tensor:
        """Store dH = α g / r and dms = -½ r⁻³ Σ_j g_j α_j H_j; return the token's dα and dβ."""
        logits, h, ms = values.logits, values.h, values.ms
        n = self.config.n
        over = cutlass.Float32(1.0) / cute.math.sqrt(ms + scalars.eps)
        sums = cute.make_rmem_tensor(cute.make_layout(self.parts), cutlass.Float32)
        d_h = cute.make_rmem_tensor(cute.make_layout(self.width), cutlass.Float32)
        d_h.fill(0.0)
        d_ms = cutlass.Float32(0.0)
        for block in cutlass.range_constexpr(3):
            first, count = ((0, n), (n, n), (2 * n, n * n))[block]
            alpha = mAlpha[block]
            # Σ_j g_j H_j of this block
            dot = cutlass.Float32(0.0)
            for i in cutlass.range_constexpr(count):
                j = first + i
                if cutlass.const_expr(block == 2):
                    g = values.d_res[i]
                else:
                    # 1 - p = σ(-z): the difference from 1 would cancel.
                    slope = mix.sigmoid(logits[j]) * mix.sigmoid(-logits[j])
                    if cutlass.const_expr(block == 1):
                        slope = slope * scalars.post_scale
                    g = (values.d_pre, values.d_post)[block][i] * slope
                sums[3 + j] = g
                d_h[j] = (alpha * over) * g
                dot = cute.math.fma(g, h[j], dot)
            sums[block] = dot * over
            d_ms = cute.math.fma(alpha, dot, d_ms)
        if token < m:
            store_compact(tensors.mDh, token, d_h)
            factor = (cutlass.Float32(-0.5) * over) / (ms + scalars.eps)
            copy.aligned(tensors.mDms, cutlass.Int64(token), 1)[0] = factor * d_ms
        return sums

    @cute.jit
    def reduce(
        self,
        sums: cute.Tensor,
        mParts: cute.Tensor,
        inside: cutlass.Boolean,
        allocator: SmemAllocator,
    ):
        """mParts[CTA] = Σ over the CTA's tokens of ``sums``."""
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


def build(config: CoefficientsConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
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
