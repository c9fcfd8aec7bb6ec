"""One pass over the streams of a token and the gradients that come in, on SM90.

    df = Σ_j dy_j post_j;  dpost_j = Σ_c dy_j (f + bias);  dbias = Σ_m df (unrounded)
    dres[i, j] = Σ_c x_i dy_j;  dpre_i = Σ_c x_i dout
    dx_i = Σ_j dy_j res[i, j] + dout pre_i

Layout       x, dy, dx [M, K] rows of streams (mhc/config.py); f, df, dout [M, C]; coefficients and
             their gradients fp32; parts of dbias fp32 [⌈M / tokens⌉, C].
Order        of a sum over channels: a thread adds the units that fall to it, ascending, one fma an
             element; then lanes, neighbours first; then warps, ascending.  A function of (n, C).
             dbias: the tokens of a CTA, ascending.
Work         a CTA for a token; with a bias for so many neighbours, whose dbias stays in shared
             memory.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy, reduce
from .config import ReduceConfig
from .device import unit
from .device.unit import Unit

WARP = 32


class MhcReduceSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ReduceConfig):
        self.config = config
        n = config.n
        self.dtype = fake.DTYPES[config.dtype]
        channels = 8 // n if config.layout == "cn" else 8
        self.unit = Unit(self.dtype, n, config.layout, channels, config.wide)
        self.tokens = config.tokens if config.bias else 1
        self.warps = config.threads // WARP
        # A unit of the layout "nc" is n times as long.
        self.ahead = 2 if config.layout == "cn" else 1
        # Where the sums of each gradient begin.
        self.of_post = 0
        self.of_res = n if config.f else 0
        self.of_pre = self.of_res + (n * n if config.x and config.dy else 0)
        self.sums = self.of_pre + (n if config.x and config.d_out else 0)

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
        stream,
    ):
        read = (mX, mDy, mDout, mF, mBias)
        shared = channels * 4 if self.config.bias else 0
        self.kernel(
            read, (mPost, mRes, mPre), (mDf, mDx), (mDpost, mDres, mDpre), mDbias, rows, channels
        ).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            smem=shared + self.warps * max(self.sums, 1) * 4 + 16,
            min_blocks_per_mp=self.config.blocks,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=50,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, read: tuple, coefficients: tuple, made: tuple, sums: tuple, mDbias, m, total):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        allocator = SmemAllocator()
        sums_layout = cute.make_ordered_layout((self.warps, max(self.sums, 1)), order=(1, 0))
        sSums = allocator.allocate_tensor(cutlass.Float32, sums_layout, byte_alignment=16)
        sBias = None
        if cutlass.const_expr(self.config.bias):
            pointer = cute.arch.get_dyn_smem(cutlass.Float32, alignment=16)
            sBias = cute.make_tensor(pointer + cute.size(sums_layout), cute.make_layout(total))
        blocks = (m + self.tokens - 1) // self.tokens
        for index in cutlass.range(block, blocks, ctas, unroll=1):
            if cutlass.const_expr(self.config.bias):
                for c in cutlass.range(tidx, total, self.config.threads, unroll=1):
                    sBias[c] = cutlass.Float32(0.0)
                cute.arch.sync_threads()
            last = cutlass.min((index + 1) * self.tokens, m)
            for row in cutlass.range(index * self.tokens, last, unroll=1):
                self.token(read, coefficients, made, sums, sSums, sBias, row, total)
            if cutlass.const_expr(self.config.bias):
                cute.arch.sync_threads()
                base = cutlass.Int64(index) * total
                for c in cutlass.range(tidx, total, self.config.threads, unroll=1):
                    copy.aligned(mDbias, base + c, 1)[0] = sBias[c]

    @cute.jit
    def token(
        self, read: tuple, coefficients: tuple, made: tuple, sums: tuple, sSums, sBias, row, total
    ):
        """All gradients of one token."""
        tidx, _, _ = cute.arch.thread_idx()
        n = self.config.n
        own = []
        for tensor, count in zip(coefficients, (n, n * n, n)):
            own.append(None if tensor is None else unit.coefficients(tensor, row, count))
        acc = cute.make_rmem_tensor(cute.make_layout(max(self.sums, 1)), cutlass.Float32)
        acc.fill(0.0)
        tensors = (read, own, made, acc, sBias, row)
        step = self.unit.channels
        stride = self.config.threads * step
        batch = self.ahead * stride
        limit = total - total % batch if self.config.wide else 0
        for c in cutlass.range(tidx * step, limit, batch, unroll=1):
            at = cutlass.Int64(c)
            self.units(tensors, [at + a * stride for a in range(self.ahead)], total, False)
        for c in cutlass.range(limit + tidx * step, total, stride, unroll=1):
            self.units(tensors, [c], total, not self.config.wide)
        if cutlass.const_expr(self.sums > 0):
            self.reduce(acc, sSums, sums, row)

    @cute.jit
    def units(self, tensors: tuple, places: list, total, checked: cutlass.Constexpr):
        """A few units of a token: all loads first."""
        (mX, mDy, mDout, mF, mBias), own, made, acc, sBias, row = tensors
        base = cutlass.Int64(row) * total
        wide, zero = base * self.config.n, cutlass.Int64(0)
        loads = []
        for c in places:
            x = dy = d_out = f = bias = None
            if cutlass.const_expr(mX is not None):
                x = self.unit.load(mX, wide, c, total, checked)
            if cutlass.const_expr(mDy is not None):
                dy = self.unit.load(mDy, wide, c, total, checked)
            if cutlass.const_expr(mDout is not None):
                d_out = self.unit.load_channels(mDout, base, c, total, checked)
            if cutlass.const_expr(mF is not None):
                f = self.unit.load_channels(mF, base, c, total, checked)
            if cutlass.const_expr(mBias is not None):
                bias = self.unit.load_channels(mBias, zero, c, total, checked)
            loads.append((c, x, dy, d_out, f, bias))
        for c, x, dy, d_out, f, bias in loads:
            x = None if x is None else unit.widened(x)
            dy = None if dy is None else unit.widened(dy)
            self.add(acc, x, dy, d_out, f, bias)
            self.give(own, made, sBias, (base, wide, c, total), dy, d_out, checked)

    @cute.jit
    def add(self, acc, x, dy, d_out, f, bias):
        """The sums over channels, one unit on."""
        n = self.config.n
        for e in cutlass.range_constexpr(self.unit.channels):
            if cutlass.const_expr(f is not None):
                given = f[e]
                if cutlass.const_expr(bias is not None):
                    given = given + bias[e]
                for j in cutlass.range_constexpr(n):
                    at = self.of_post + j
                    acc[at] = cute.math.fma(dy[self.unit.position(j, e)], given, acc[at])
            for i in cutlass.range_constexpr(n):
                if cutlass.const_expr(x is not None and dy is not None):
                    for j in cutlass.range_constexpr(n):
                        at = self.of_res + i * n + j
                        of_y = dy[self.unit.position(j, e)]
                        acc[at] = cute.math.fma(x[self.unit.position(i, e)], of_y, acc[at])
                if cutlass.const_expr(x is not None and d_out is not None):
                    at = self.of_pre + i
                    acc[at] = cute.math.fma(x[self.unit.position(i, e)], d_out[e], acc[at])

    @cute.jit
    def give(self, own, made: tuple, sBias, at: tuple, dy, d_out, checked: cutlass.Constexpr):
        """df and dx of one unit."""
        post, res, pre = own
        mDf, mDx = made
        base, wide, c, total = at
        if cutlass.const_expr(self.config.f):
            df = unit.collapsed(self.unit, dy, post)
            self.unit.store_channels(df, mDf, base, c, total, checked)
            if cutlass.const_expr(sBias is not None):
                self.add_bias(sBias, df, c, total, checked)
        if cutlass.const_expr(self.config.dx):
            dx = unit.passed(self.unit, None, dy, d_out, res, pre)
            self.unit.store(unit.narrowed(dx, self.dtype), mDx, wide, c, total, checked)

    @cute.jit
    def add_bias(self, sBias, df, c, total, checked: cutlass.Constexpr):
        """dbias += df of one unit, which no other thread has."""
        if cutlass.const_expr(checked):
            for e in cutlass.range_constexpr(self.unit.channels):
                if c + e < total:
                    sBias[c + e] = sBias[c + e] + df[e]
        else:
            # One access for neighbours: threads of a warp read different banks.
            width = min(self.unit.channels, 4)
            for a in cutlass.range_constexpr(self.unit.channels // width):
                pointer = cute.make_ptr(
                    cutlass.Float32,
                    (sBias.iterator + (c + a * width)).toint(),
                    cute.AddressSpace.smem,
                    assumed_align=width * 4,
                )
                own = cute.make_tensor(pointer, cute.make_layout(width))
                own.store(own.load() + unit.piece(df, a * width, width).load())

    @cute.jit
    def reduce(self, acc, sSums, sums: tuple, row):
        """A token's sums: over lanes, then over warps."""
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
            mDpost, mDres, mDpre = sums
            for mOut, first, count in (
                (mDpost, self.of_post, n),
                (mDres, self.of_res, n * n),
                (mDpre, self.of_pre, n),
            ):
                if cutlass.const_expr(mOut is not None):
                    v = tidx - first
                    if (v >= 0) & (v < count):
                        copy.aligned(mOut, cutlass.Int64(row) * count + v, 1)[0] = total
        # The next token's sums are not written before these are read.
        cute.arch.sync_threads()


def build(config: ReduceConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    n, element = config.n, fake.DTYPES[config.dtype]
    m, k, c = (fake.size() for _ in range(3))
    align = 16 if config.wide else element.width // 8

    def streams(there: bool):
        return fake.compact(element, (m, k), align) if there else None

    def channels(there: bool):
        return fake.compact(element, (m, c), align) if there else None

    def read(there: bool, columns: int):
        return fake.rows("fp32", m, columns) if there else None

    def made(there: bool, columns: int):
        return fake.compact(cutlass.Float32, (m, columns), 4) if there else None

    of_res, of_pre = config.x and config.dy, config.x and config.d_out
    parts = fake.compact(cutlass.Float32, (fake.size(), c), 4) if config.bias else None
    return compile(
        MhcReduceSm90(config),
        streams(config.x),
        streams(config.dy),
        channels(config.d_out),
        channels(config.f),
        fake.compact(element, (c,), align) if config.bias else None,
        read(config.f, n),
        read(config.dx and config.dy, n * n),
        read(config.dx and config.d_out, n),
        channels(config.f),
        streams(config.dx),
        made(config.f, n),
        made(of_res, n * n),
        made(of_pre, n),
        parts,
        *(cutlass.Int32(1) for _ in range(3)),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
