"""Backward sums over channels of a token, in one pass over its streams and gradients, on SM90.

    df = Σ_j dy_j post_j;  dpost_j = Σ_c dy_j (f + bias);  dbias = Σ_m df (unrounded)
    dres[i, j] = Σ_c x_i dy_j;  dpre_i = Σ_c x_i dout
    dx_i = Σ_j dy_j res[i, j] + dout pre_i

Layout       x, dy, dx [M, K] rows of streams (mhc/config.py); f, df, dout [M, C]; coefficients and
             their gradients fp32; partial sums of dbias fp32 [⌈M / tokens⌉, C].
Order        sums over channels: a thread adds its vectors, ascending, one fma an element; then
             lanes, neighbours first; then warps, ascending.  A function of (n, C).
             dbias: the tokens of a CTA, ascending.
Work         a CTA for a token; with a bias for ``tokens`` neighbours, whose dbias stays in shared
             memory.
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
from .config import ReduceConfig, vector_channels
from .device.arguments import FakeRows
from .device.vector import TokenCoefficients, Vector, load_token, rounded, subview, to_fp32

WARP = 32


@dataclass(frozen=True)
class Tensors:
    """Global tensors; None for those that a configuration does not use.

    mX, mDy, mDx: [M, K].  mDout, mF, mDf: [M, C].  mBias: [C].  fp32 are coefficients and sums:
    mPost, mPre, mDpost, mDpre [M, n], mRes, mDres [M, n²], mDbias [blocks, C].
    """

    mX: cute.Tensor | None
    mDy: cute.Tensor | None
    mDout: cute.Tensor | None
    mF: cute.Tensor | None
    mBias: cute.Tensor | None
    mPost: cute.Tensor | None
    mRes: cute.Tensor | None
    mPre: cute.Tensor | None
    mDf: cute.Tensor | None
    mDx: cute.Tensor | None
    mDpost: cute.Tensor | None
    mDres: cute.Tensor | None
    mDpre: cute.Tensor | None
    mDbias: cute.Tensor | None


@dataclass(frozen=True)
class Token:
    """Coefficients and running sums of one token, in registers; ``row`` is its index."""

    row: cutlass.Int32
    by: TokenCoefficients
    acc: cute.Tensor


class MhcReduceSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ReduceConfig):
        self.config = config
        n = config.n
        self.dtype = fake.DTYPES[config.dtype]
        channels = vector_channels(n, config.layout)
        self.vector = Vector(self.dtype, n, config.layout, channels)
        self.tokens = config.tokens if config.bias else 1
        self.warps = config.threads // WARP
        # Vectors in flight; one of the layout "nc" is n times as long.
        self.ahead = 2 if config.layout == "cn" else 1
        # First of each gradient's sums, and their number.
        self.post_offset = 0
        self.res_offset = n if config.f else 0
        self.pre_offset = self.res_offset + (n * n if config.x and config.dy else 0)
        self.sums = self.pre_offset + (n if config.x and config.d_out else 0)

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor | None,
        mDy: cute.Tensor | None,
        mDout: cute.Tensor | None,
        mF: cute.Tensor | None,
        mBias: cute.Tensor | None,
        mPost: cute.Tensor | None,
        mRes: cute.Tensor | None,
        mPre: cute.Tensor | None,
        mDf: cute.Tensor | None,
        mDx: cute.Tensor | None,
        mDpost: cute.Tensor | None,
        mDres: cute.Tensor | None,
        mDpre: cute.Tensor | None,
        mDbias: cute.Tensor | None,
        rows: cutlass.Int32,
        channels: cutlass.Int32,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        inputs = (mX, mDy, mDout, mF, mBias, mPost, mRes, mPre)
        tensors = Tensors(*inputs, mDf, mDx, mDpost, mDres, mDpre, mDbias)
        shared = channels * 4 if self.config.bias else 0
        self.kernel(tensors, rows, channels).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            smem=shared + self.warps * max(self.sums, 1) * 4 + 16,
            min_blocks_per_mp=self.config.blocks,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=50,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tensors: Tensors,
        m: cutlass.Int32,
        total: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        allocator = SmemAllocator()
        sums_layout = cute.make_ordered_layout((self.warps, max(self.sums, 1)), order=(1, 0))
        sSums = allocator.allocate_tensor(cutlass.Float32, sums_layout, byte_alignment=16)
        sDbias = None
        if cutlass.const_expr(self.config.bias):
            # Computed by hand: the size of dbias is dynamic, and the allocator takes static ones.
            pointer = cute.arch.get_dyn_smem(cutlass.Float32, alignment=16)
            sDbias = cute.make_tensor(pointer + cute.size(sums_layout), cute.make_layout(total))
        blocks = (m + self.tokens - 1) // self.tokens
        for index in cutlass.range(block, blocks, ctas, unroll=1):
            if cutlass.const_expr(self.config.bias):
                for c in cutlass.range(tidx, total, self.config.threads, unroll=1):
                    sDbias[c] = cutlass.Float32(0.0)
                cute.arch.sync_threads()
            last = cutlass.min((index + 1) * self.tokens, m)
            for row in cutlass.range(index * self.tokens, last, unroll=1):
                self.token(tensors, sSums, sDbias, row, total)
            if cutlass.const_expr(self.config.bias):
                cute.arch.sync_threads()
                base = cutlass.Int64(index) * total
                for c in cutlass.range(tidx, total, self.config.threads, unroll=1):
                    copy.aligned(tensors.mDbias, base + c, 1)[0] = sDbias[c]

    @cute.jit
    def token(
        self,
        tensors: Tensors,
        sSums: cute.Tensor,
        sDbias: cute.Tensor | None,
        row: cutlass.Int32,
        total: cutlass.Int32,
    ):
        """Compute all gradients of one token."""
        tidx, _, _ = cute.arch.thread_idx()
        by = load_token(self.config.n, row, tensors.mPre, tensors.mPost, tensors.mRes)
        acc = cute.make_rmem_tensor(cute.make_layout(max(self.sums, 1)), cutlass.Float32)
        acc.fill(0.0)
        token = Token(row, by, acc)
        step = self.vector.channels
        stride = self.config.threads * step
        batch = self.ahead * stride
        limit = total - total % batch
        for c in cutlass.range(tidx * step, limit, batch, unroll=1):
            first = cutlass.Int64(c)
            channels = [first + a * stride for a in range(self.ahead)]
            self.vectors(tensors, token, sDbias, channels, total)
        for c in cutlass.range(limit + tidx * step, total, stride, unroll=1):
            self.vectors(tensors, token, sDbias, [c], total)
        if cutlass.const_expr(self.sums > 0):
            self.reduce(acc, sSums, tensors, row)

    @cute.jit
    def vectors(
        self,
        tensors: Tensors,
        token: Token,
        sDbias: cute.Tensor | None,
        channels: list[cutlass.Int64],
        total: cutlass.Int32,
    ):
        """Add the vectors of a token at ``channels`` to its sums, and store df and dx of them.

        All loads come first.
        """
        mX, mDy, mDout = tensors.mX, tensors.mDy, tensors.mDout
        mF, mBias = tensors.mF, tensors.mBias
        # Computed by hand: rows begin at 64-bit offsets.
        base = cutlass.Int64(token.row) * total
        x_base, zero = base * self.config.n, cutlass.Int64(0)
        loads = []
        for c in channels:
            x = dy = d_out = f = bias = None
            if cutlass.const_expr(mX is not None):
                x = self.vector.load(mX, x_base, c, total)
            if cutlass.const_expr(mDy is not None):
                dy = self.vector.load(mDy, x_base, c, total)
            if cutlass.const_expr(mDout is not None):
                d_out = self.vector.load_channels(mDout, base, c, total)
            if cutlass.const_expr(mF is not None):
                f = self.vector.load_channels(mF, base, c, total)
            if cutlass.const_expr(mBias is not None):
                bias = self.vector.load_channels(mBias, zero, c, total)
            loads.append((c, x, dy, d_out, f, bias))
        for c, x, dy, d_out, f, bias in loads:
            x = None if x is None else to_fp32(x)
            dy = None if dy is None else to_fp32(dy)
            self.add(token.acc, x, dy, d_out, f, bias)
            self.store_gradients(token, tensors, sDbias, c, total, dy, d_out)

    @cute.jit
    def add(
        self,
        acc: cute.Tensor,
        x: cute.Tensor | None,
        dy: cute.Tensor | None,
        d_out: cute.Tensor | None,
        f: cute.Tensor | None,
        bias: cute.Tensor | None,
    ):
        """Add one vector to the sums over channels, channel by channel."""
        n = self.config.n
        position = self.vector.position
        for e in cutlass.range_constexpr(self.vector.channels):
            # dpost_j += dy_j (f + bias)
            if cutlass.const_expr(f is not None):
                f_plus_bias = f[e]
                if cutlass.const_expr(bias is not None):
                    f_plus_bias = f_plus_bias + bias[e]
                for j in cutlass.range_constexpr(n):
                    v = self.post_offset + j
                    acc[v] = cute.math.fma(dy[position(j, e)], f_plus_bias, acc[v])
            for i in cutlass.range_constexpr(n):
                # dres[i, j] += x_i dy_j
                if cutlass.const_expr(x is not None and dy is not None):
                    for j in cutlass.range_constexpr(n):
                        v = self.res_offset + i * n + j
                        dy_j = dy[position(j, e)]
                        acc[v] = cute.math.fma(x[position(i, e)], dy_j, acc[v])
                # dpre_i += x_i dout
                if cutlass.const_expr(x is not None and d_out is not None):
                    v = self.pre_offset + i
                    acc[v] = cute.math.fma(x[position(i, e)], d_out[e], acc[v])

    @cute.jit
    def store_gradients(
        self,
        token: Token,
        tensors: Tensors,
        sDbias: cute.Tensor | None,
        c: cutlass.Int64,
        total: cutlass.Int32,
        dy: cute.Tensor | None,
        d_out: cute.Tensor | None,
    ):
        """Store df and dx of one vector, and add df to dbias."""
        vector, base = self.vector, cutlass.Int64(token.row) * total
        if cutlass.const_expr(self.config.f):
            # df = Σ_j dy_j post_j
            df = vector.collapsed(dy, token.by.post)
            vector.store_channels(df, tensors.mDf, base, c)
            if cutlass.const_expr(sDbias is not None):
                self.add_bias(sDbias, df, c)
        if cutlass.const_expr(self.config.dx):
            # dx_i = Σ_j dy_j res[i, j] + dout pre_i
            dx = vector.input_gradient(None, dy, d_out, token.by.res, token.by.pre)
            rDx = rounded(dx, self.dtype)
            vector.store(rDx, tensors.mDx, base * self.config.n, c, total)

    @cute.jit
    def add_bias(
        self,
        sDbias: cute.Tensor,
        df: cute.Tensor,
        c: cutlass.Int64,
    ):
        """dbias += df of one vector, whose channels no other thread has."""
        # Vector accesses: threads of a warp read different banks.
        width = min(self.vector.channels, 4)
        for a in cutlass.range_constexpr(self.vector.channels // width):
            pointer = cute.make_ptr(
                cutlass.Float32,
                (sDbias.iterator + (c + a * width)).toint(),
                cute.AddressSpace.smem,
                assumed_align=width * 4,
            )
            sAccess = cute.make_tensor(pointer, cute.make_layout(width))
            sAccess.store(sAccess.load() + subview(df, a * width, width).load())

    @cute.jit
    def reduce(self, acc: cute.Tensor, sSums: cute.Tensor, tensors: Tensors, row: cutlass.Int32):
        """Add a token's sums over lanes, then over warps, and store them."""
        tidx, _, _ = cute.arch.thread_idx()
        warp, lane = tidx // WARP, tidx % WARP
        for v in cutlass.range_constexpr(self.sums):
            acc[v] = reduce.over_threads(acc[v], WARP)
        if lane == 0:
            for v in cutlass.range_constexpr(self.sums):
                sSums[warp, v] = acc[v]
        cute.arch.sync_threads()
        if tidx < self.sums:
            total = reduce.over_lanes(sSums, tidx)
            n = self.config.n
            for mOut, first, count in (
                (tensors.mDpost, self.post_offset, n),
                (tensors.mDres, self.res_offset, n * n),
                (tensors.mDpre, self.pre_offset, n),
            ):
                if cutlass.const_expr(mOut is not None):
                    v = tidx - first
                    if (v >= 0) & (v < count):
                        copy.aligned(mOut, cutlass.Int64(row) * count + v, 1)[0] = total
        # The next token's sums are not written before these are read.
        cute.arch.sync_threads()


def build(config: ReduceConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    n, rows = config.n, FakeRows(config.dtype, config.n)
    of_res, of_pre = config.x and config.dy, config.x and config.d_out
    parts = fake.compact(cutlass.Float32, (fake.size(), rows.c), 4) if config.bias else None
    return compile(
        MhcReduceSm90(config),
        rows.streams(config.x),
        rows.streams(config.dy),
        rows.channels(config.d_out),
        rows.channels(config.f),
        rows.bias(config.bias),
        rows.tokens(n, config.f),
        rows.tokens(n * n, config.dx and config.dy),
        rows.tokens(n, config.dx and config.d_out),
        rows.channels(config.f),
        rows.streams(config.dx),
        rows.compact(n, config.f, 4),
        rows.compact(n * n, of_res, 4),
        rows.compact(n, of_pre, 4),
        parts,
        *(cutlass.Int32(1) for _ in range(3)),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
