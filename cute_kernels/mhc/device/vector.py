"""Vectors of streams: a few neighbouring channels of all streams of one token, in registers.

Element (stream i, channel e) of a vector is at index e n + i in the layout "cn", where a vector is
contiguous in a row, and at i E + e in "nc", where each stream is contiguous.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import copy

#: Bytes of the widest access.
ACCESS = 16


@dataclass(frozen=True)
class Vector:
    """Layout of vectors in rows.

    Channels are counted in 64 bits, so that offsets that differ by a constant share an address.

    dtype:    element type.
    n:        streams.
    layout:   "cn" or "nc".
    channels: E, channels of a vector.  Rows have whole vectors, and begin at multiples of 16 bytes.
    """

    dtype: type[cutlass.Numeric]
    n: int
    layout: str
    channels: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.n * self.channels

    @property
    def width(self) -> int:
        """Elements of one access to a row of streams."""
        contiguous = self.size if self.layout == "cn" else self.channels
        return min(contiguous, ACCESS * 8 // self.dtype.width)

    @property
    def row_width(self) -> int:
        """Elements of one access to a row of [M, C]."""
        return min(self.channels, ACCESS * 8 // self.dtype.width)

    def position(self, i: int, e: int) -> int:
        """Index of stream i, channel e."""
        return e * self.n + i if self.layout == "cn" else i * self.channels + e

    def channel(self, p: int) -> int:
        """Channel of index p."""
        return p // self.n if self.layout == "cn" else p % self.channels

    @cute.jit
    def offset(
        self, p: cutlass.Constexpr[int], c: cutlass.Int64, total: cutlass.Int32
    ) -> cutlass.Int64:
        """Offset in a row of ``total`` channels of index p of the vector at channel c.

        Computed by hand: it needs 64 bits, and one form that serves both layouts.
        """
        if cutlass.const_expr(self.layout == "cn"):
            return cutlass.Int64(c) * self.n + p
        stream, e = p // self.channels, p % self.channels
        return cutlass.Int64(total) * stream + cutlass.Int64(c) + e

    @cute.jit
    def load(
        self,
        mX: cute.Tensor,
        base: cutlass.Int64,
        c: cutlass.Int64,
        total: cutlass.Int32,
        checked: cutlass.Constexpr[bool] = False,
    ) -> cute.Tensor:
        """Load the vector at channel c of the row that begins at element ``base``; unconverted.

        ``checked``: channels beyond ``total`` are 0.
        """
        rX = cute.make_rmem_tensor(cute.make_layout(self.size), mX.element_type)
        for a in cutlass.range_constexpr(self.size // self.width):
            p = a * self.width
            offset = base + self.offset(p, c, total)
            rAccess = subview(rX, p, self.width)
            if cutlass.const_expr(checked):
                rAccess.fill(0.0)
                if c + self.channel(p) < total:
                    rAccess.store(copy.aligned(mX, offset, self.width).load())
            else:
                rAccess.store(copy.aligned(mX, offset, self.width).load())
        return rX

    @cute.jit
    def store(
        self,
        rX: cute.Tensor,
        mX: cute.Tensor,
        base: cutlass.Int64,
        c: cutlass.Int64,
        total: cutlass.Int32,
        checked: cutlass.Constexpr[bool] = False,
    ):
        """Store a vector; the inverse of ``load``."""
        for a in cutlass.range_constexpr(self.size // self.width):
            p = a * self.width
            gAccess = copy.aligned(mX, base + self.offset(p, c, total), self.width)
            if cutlass.const_expr(checked):
                if c + self.channel(p) < total:
                    gAccess.store(subview(rX, p, self.width).load())
            else:
                gAccess.store(subview(rX, p, self.width).load())

    @cute.jit
    def load_raw(
        self,
        mF: cute.Tensor,
        base: cutlass.Int64,
        c: cutlass.Int64,
        total: cutlass.Int32,
        checked: cutlass.Constexpr[bool] = False,
    ) -> cute.Tensor:
        """Load E channels from c on of a row of [M, C]; unconverted."""
        rF = cute.make_rmem_tensor(cute.make_layout(self.channels), mF.element_type)
        for a in cutlass.range_constexpr(self.channels // self.row_width):
            e = a * self.row_width
            rAccess = subview(rF, e, self.row_width)
            gAccess = copy.aligned(mF, base + cutlass.Int64(c) + e, self.row_width)
            if cutlass.const_expr(checked):
                rAccess.fill(0.0)
                if c + e < total:
                    rAccess.store(gAccess.load())
            else:
                rAccess.store(gAccess.load())
        return rF

    @cute.jit
    def load_channels(
        self,
        mF: cute.Tensor,
        base: cutlass.Int64,
        c: cutlass.Int64,
        total: cutlass.Int32,
        checked: cutlass.Constexpr[bool] = False,
    ) -> cute.Tensor:
        """Load E channels from c on of a row of [M, C], in fp32."""
        return to_fp32(self.load_raw(mF, base, c, total, checked))

    @cute.jit
    def store_channels(
        self,
        values: cute.Tensor,
        mF: cute.Tensor,
        base: cutlass.Int64,
        c: cutlass.Int64,
    ):
        """Round fp32 values and store them to E channels of a row of [M, C]."""
        rF = rounded(values, mF.element_type)
        for a in cutlass.range_constexpr(self.channels // self.row_width):
            e = a * self.row_width
            gAccess = copy.aligned(mF, base + cutlass.Int64(c) + e, self.row_width)
            gAccess.store(subview(rF, e, self.row_width).load())

    @cute.jit
    def expanded(
        self,
        x: cute.Tensor,
        f: cute.Tensor,
        bias: cute.Tensor | None,
        post: cute.Tensor,
        res: cute.Tensor,
    ) -> cute.Tensor:
        """y_j = (f + bias) post_j + Σ_i x_i res[i, j], i ascending, one fma each; fp32."""
        y = cute.make_rmem_tensor(cute.make_layout(self.size), cutlass.Float32)
        for e in cutlass.range_constexpr(self.channels):
            f_plus_bias = f[e]
            if cutlass.const_expr(bias is not None):
                f_plus_bias = f_plus_bias + bias[e]
            for j in cutlass.range_constexpr(self.n):
                total = f_plus_bias * post[j]
                for i in cutlass.range_constexpr(self.n):
                    total = cute.math.fma(x[self.position(i, e)], res[i * self.n + j], total)
                y[self.position(j, e)] = total
        return y

    @cute.jit
    def collapsed(self, x: cute.Tensor, pre: cute.Tensor) -> cute.Tensor:
        """out = Σ_i x_i pre_i, i ascending; fp32."""
        out = cute.make_rmem_tensor(cute.make_layout(self.channels), cutlass.Float32)
        for e in cutlass.range_constexpr(self.channels):
            total = x[self.position(0, e)] * pre[0]
            for i in cutlass.range_constexpr(1, self.n):
                total = cute.math.fma(x[self.position(i, e)], pre[i], total)
            out[e] = total
        return out

    @cute.jit
    def input_gradient(
        self,
        start: cute.Tensor | None,
        dy: cute.Tensor | None,
        d_out: cute.Tensor | None,
        res: cute.Tensor | None,
        pre: cute.Tensor | None,
    ) -> cute.Tensor:
        """dx_i = start_i + Σ_j dy_j res[i, j] + d_out pre_i: one fma each in this order; fp32.

        ``start`` may be None.  Without ``res`` the second term is dy_i; without ``dy`` there is
        none, nor the last one without ``d_out``.
        """
        dx = cute.make_rmem_tensor(cute.make_layout(self.size), cutlass.Float32)
        for e in cutlass.range_constexpr(self.channels):
            for i in cutlass.range_constexpr(self.n):
                p = self.position(i, e)
                total = None if start is None else start[p]
                if cutlass.const_expr(dy is not None and res is None):
                    total = dy[p] if start is None else total + dy[p]
                if cutlass.const_expr(dy is not None and res is not None):
                    for j in cutlass.range_constexpr(self.n):
                        dy_j, weight = dy[self.position(j, e)], res[i * self.n + j]
                        total = plus(total, dy_j, weight)
                if cutlass.const_expr(d_out is not None):
                    total = plus(total, d_out[e], pre[i])
                dx[p] = total
        return dx


@cute.jit
def subview(
    rX: cute.Tensor, first: cutlass.Constexpr[int], size: cutlass.Constexpr[int]
) -> cute.Tensor:
    """View of ``size`` neighbouring registers."""
    return cute.make_tensor(rX.iterator + first, cute.make_layout(size))


@cute.jit
def to_fp32(rX: cute.Tensor) -> cute.Tensor:
    """Convert registers to fp32; fp32 registers are returned as they are."""
    if cutlass.const_expr(rX.element_type is cutlass.Float32):
        return rX
    values = cute.make_rmem_tensor(cute.make_layout(cute.size(rX)), cutlass.Float32)
    values.store(rX.load().to(cutlass.Float32))
    return values


@cute.jit
def rounded(values: cute.Tensor, dtype: cutlass.Constexpr[type[cutlass.Numeric]]) -> cute.Tensor:
    """Round fp32 registers to ``dtype``; for fp32 they are returned as they are."""
    if cutlass.const_expr(dtype is cutlass.Float32):
        return values
    rX = cute.make_rmem_tensor(cute.make_layout(cute.size(values)), dtype)
    rX.store(values.load().to(dtype))
    return rX


@cute.jit
def load_coefficients(
    mX: cute.Tensor, row: cutlass.Int32, count: cutlass.Constexpr[int]
) -> cute.Tensor:
    """Load ``count`` fp32 of a token's row; the row stride may be anything."""
    values = cute.make_rmem_tensor(cute.make_layout(count), cutlass.Float32)
    base = cutlass.Int64(row) * mX.stride[0]
    for i in cutlass.range_constexpr(count):
        values[i] = copy.aligned(mX, base + i, 1)[0]
    return values


@dataclass(frozen=True)
class TokenCoefficients:
    """Coefficients of one token, in registers; None for those that a kernel does not read."""

    pre: cute.Tensor | None
    post: cute.Tensor | None
    res: cute.Tensor | None


@cute.jit
def load_token(
    n: cutlass.Constexpr[int],
    row: cutlass.Int32,
    mPre: cute.Tensor | None,
    mPost: cute.Tensor | None,
    mRes: cute.Tensor | None,
) -> TokenCoefficients:
    """Load the coefficients of a token."""
    post = None if mPost is None else load_coefficients(mPost, row, n)
    res = None if mRes is None else load_coefficients(mRes, row, n * n)
    pre = None if mPre is None else load_coefficients(mPre, row, n)
    return TokenCoefficients(pre, post, res)


@cute.jit
def load_compact(mX: cute.Tensor, row: cutlass.Int32, count: cutlass.Constexpr[int]) -> cute.Tensor:
    """Load ``count`` fp32 of a token of a compact [M, count], aligned to 16 bytes (n = 2: 8)."""
    values = cute.make_rmem_tensor(cute.make_layout(count), cutlass.Float32)
    width = min(count, 4)
    for a in cutlass.range_constexpr(count // width):
        offset = cutlass.Int64(row) * count + a * width
        subview(values, a * width, width).store(copy.aligned(mX, offset, width).load())
    return values


@cute.jit
def store_compact(mX: cute.Tensor, row: cutlass.Int32, values: cute.Tensor):
    """Store a token's values to a compact [M, count]."""
    count = cute.size(values)
    width = min(count, 4)
    for a in cutlass.range_constexpr(count // width):
        gAccess = copy.aligned(mX, cutlass.Int64(row) * count + a * width, width)
        gAccess.store(subview(values, a * width, width).load())


@cute.jit
def plus(total: cutlass.Float32 | None, a: cutlass.Float32, b: cutlass.Float32) -> cutlass.Float32:
    """total + a b, rounded once; a b if ``total`` is None."""
    if cutlass.const_expr(total is None):
        return a * b
    return cute.math.fma(a, b, total)
