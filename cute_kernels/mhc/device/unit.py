"""A unit: a few neighbouring channels of all streams of one token, in one thread's registers.

Element (stream i, channel e) is at position e n + i in the layout "cn", where a unit is one piece
of a row, and at i E + e in "nc", where it is a piece of each stream.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import copy

#: Bytes of the widest access.
ACCESS = 16


@dataclass(frozen=True)
class Unit:
    """How units lie in rows.  Channels are counted in 64 bits, so that places that are a constant
    apart share an address.

    dtype: of the elements.  channels: E.  wide: whether every row of units, and of channels, begins
    at a multiple of 16 bytes and C is a multiple of E; else elements are read one by one.
    """

    dtype: type
    n: int
    layout: str
    channels: int
    wide: bool

    @property
    def size(self) -> int:
        """Elements."""
        return self.n * self.channels

    @property
    def width(self) -> int:
        """Elements of one access."""
        piece = self.size if self.layout == "cn" else self.channels
        return min(piece, ACCESS * 8 // self.dtype.width) if self.wide else 1

    @property
    def row_width(self) -> int:
        """Elements of one access to [M, C]."""
        return min(self.channels, ACCESS * 8 // self.dtype.width) if self.wide else 1

    def position(self, i: int, e: int) -> int:
        """Of stream i, channel e."""
        return e * self.n + i if self.layout == "cn" else i * self.channels + e

    def channel(self, p: int) -> int:
        """Of position p."""
        return p // self.n if self.layout == "cn" else p % self.channels

    @cute.jit
    def offset(self, p: cutlass.Constexpr, c, total):
        """Of position p of the unit at channel c, in a row of ``total`` channels."""
        if cutlass.const_expr(self.layout == "cn"):
            return cutlass.Int64(c) * self.n + p
        stream, e = p // self.channels, p % self.channels
        return cutlass.Int64(total) * stream + cutlass.Int64(c) + e

    @cute.jit
    def load(self, tensor: cute.Tensor, base, c, total, checked: cutlass.Constexpr = False):
        """The unit at channel c of the row that begins at element ``base``; raw.

        ``checked``: channels behind the last one are 0.
        """
        raw = cute.make_rmem_tensor(cute.make_layout(self.size), tensor.element_type)
        for a in cutlass.range_constexpr(self.size // self.width):
            p = a * self.width
            at = base + self.offset(p, c, total)
            part = piece(raw, p, self.width)
            if cutlass.const_expr(checked):
                part.fill(0.0)
                if c + self.channel(p) < total:
                    part.store(copy.aligned(tensor, at, self.width).load())
            else:
                part.store(copy.aligned(tensor, at, self.width).load())
        return raw

    @cute.jit
    def store(
        self, raw: cute.Tensor, tensor: cute.Tensor, base, c, total, checked: cutlass.Constexpr
    ):
        """The other way."""
        for a in cutlass.range_constexpr(self.size // self.width):
            p = a * self.width
            target = copy.aligned(tensor, base + self.offset(p, c, total), self.width)
            if cutlass.const_expr(checked):
                if c + self.channel(p) < total:
                    target.store(piece(raw, p, self.width).load())
            else:
                target.store(piece(raw, p, self.width).load())

    @cute.jit
    def load_raw(self, tensor: cute.Tensor, base, c, total, checked: cutlass.Constexpr = False):
        """E channels from c on of a row of [M, C]; raw."""
        raw = cute.make_rmem_tensor(cute.make_layout(self.channels), tensor.element_type)
        for a in cutlass.range_constexpr(self.channels // self.row_width):
            e = a * self.row_width
            part = piece(raw, e, self.row_width)
            source = copy.aligned(tensor, base + cutlass.Int64(c) + e, self.row_width)
            if cutlass.const_expr(checked):
                part.fill(0.0)
                if c + e < total:
                    part.store(source.load())
            else:
                part.store(source.load())
        return raw

    @cute.jit
    def load_channels(
        self, tensor: cute.Tensor, base, c, total, checked: cutlass.Constexpr = False
    ):
        """The same; fp32."""
        return widened(self.load_raw(tensor, base, c, total, checked))

    @cute.jit
    def store_channels(
        self, values: cute.Tensor, tensor: cute.Tensor, base, c, total, checked: cutlass.Constexpr
    ):
        """fp32 values, rounded, to E channels of a row of [M, C]."""
        raw = narrowed(values, tensor.element_type)
        for a in cutlass.range_constexpr(self.channels // self.row_width):
            e = a * self.row_width
            target = copy.aligned(tensor, base + cutlass.Int64(c) + e, self.row_width)
            if cutlass.const_expr(checked):
                if c + e < total:
                    target.store(piece(raw, e, self.row_width).load())
            else:
                target.store(piece(raw, e, self.row_width).load())


@cute.jit
def piece(raw: cute.Tensor, first: cutlass.Constexpr, size: cutlass.Constexpr) -> cute.Tensor:
    """Some neighbours in registers."""
    return cute.make_tensor(raw.iterator + first, cute.make_layout(size))


@cute.jit
def widened(raw: cute.Tensor) -> cute.Tensor:
    """In fp32."""
    if cutlass.const_expr(raw.element_type is cutlass.Float32):
        return raw
    values = cute.make_rmem_tensor(cute.make_layout(cute.size(raw)), cutlass.Float32)
    values.store(raw.load().to(cutlass.Float32))
    return values


@cute.jit
def narrowed(values: cute.Tensor, dtype: cutlass.Constexpr) -> cute.Tensor:
    """fp32, rounded to ``dtype``."""
    if cutlass.const_expr(dtype is cutlass.Float32):
        return values
    raw = cute.make_rmem_tensor(cute.make_layout(cute.size(values)), dtype)
    raw.store(values.load().to(dtype))
    return raw


@cute.jit
def coefficients(tensor: cute.Tensor, row, count: cutlass.Constexpr) -> cute.Tensor:
    """``count`` fp32 of a token's row; the row stride may be anything."""
    values = cute.make_rmem_tensor(cute.make_layout(count), cutlass.Float32)
    base = cutlass.Int64(row) * tensor.stride[0]
    for i in cutlass.range_constexpr(count):
        values[i] = copy.aligned(tensor, base + i, 1)[0]
    return values


@cute.jit
def compact(tensor: cute.Tensor, row, count: cutlass.Constexpr) -> cute.Tensor:
    """The same of rows without gaps that begin at multiples of 16 bytes (two streams: 8)."""
    values = cute.make_rmem_tensor(cute.make_layout(count), cutlass.Float32)
    width = min(count, 4)
    for a in cutlass.range_constexpr(count // width):
        at = cutlass.Int64(row) * count + a * width
        piece(values, a * width, width).store(copy.aligned(tensor, at, width).load())
    return values


@cute.jit
def store(tensor: cute.Tensor, row, values: cute.Tensor):
    """A token's values to a compact [M, count]."""
    count = cute.size(values)
    width = min(count, 4)
    for a in cutlass.range_constexpr(count // width):
        target = copy.aligned(tensor, cutlass.Int64(row) * count + a * width, width)
        target.store(piece(values, a * width, width).load())


@cute.jit
def expanded(
    unit: cutlass.Constexpr,
    x: cute.Tensor,
    f: cute.Tensor,
    bias: cute.Tensor | None,
    post: cute.Tensor,
    res: cute.Tensor,
) -> cute.Tensor:
    """y_j = (f + bias) post_j + Σ_i x_i res[i, j], i ascending, one fma each; fp32."""
    y = cute.make_rmem_tensor(cute.make_layout(unit.size), cutlass.Float32)
    for e in cutlass.range_constexpr(unit.channels):
        own = f[e]
        if cutlass.const_expr(bias is not None):
            own = own + bias[e]
        for j in cutlass.range_constexpr(unit.n):
            total = own * post[j]
            for i in cutlass.range_constexpr(unit.n):
                total = cute.math.fma(x[unit.position(i, e)], res[i * unit.n + j], total)
            y[unit.position(j, e)] = total
    return y


@cute.jit
def collapsed(unit: cutlass.Constexpr, x: cute.Tensor, pre: cute.Tensor) -> cute.Tensor:
    """out = Σ_i x_i pre_i, i ascending; fp32."""
    out = cute.make_rmem_tensor(cute.make_layout(unit.channels), cutlass.Float32)
    for e in cutlass.range_constexpr(unit.channels):
        total = x[unit.position(0, e)] * pre[0]
        for i in cutlass.range_constexpr(1, unit.n):
            total = cute.math.fma(x[unit.position(i, e)], pre[i], total)
        out[e] = total
    return out


@cute.jit
def passed(
    unit: cutlass.Constexpr,
    start: cute.Tensor | None,
    dy: cute.Tensor | None,
    d_out: cute.Tensor | None,
    res: cute.Tensor | None,
    pre: cute.Tensor | None,
) -> cute.Tensor:
    """dx_i = start_i + Σ_j dy_j res[i, j] + d_out pre_i: one fma each in this order; fp32.

    Without res, dy_i itself.
    """
    dx = cute.make_rmem_tensor(cute.make_layout(unit.size), cutlass.Float32)
    for e in cutlass.range_constexpr(unit.channels):
        for i in cutlass.range_constexpr(unit.n):
            at = unit.position(i, e)
            total = None if start is None else start[at]
            if cutlass.const_expr(dy is not None and res is None):
                total = dy[at] if start is None else total + dy[at]
            if cutlass.const_expr(dy is not None and res is not None):
                for j in cutlass.range_constexpr(unit.n):
                    of_y, weight = dy[unit.position(j, e)], res[i * unit.n + j]
                    total = plus(total, of_y, weight)
            if cutlass.const_expr(d_out is not None):
                total = plus(total, d_out[e], pre[i])
            dx[at] = total
    return dx


@cute.jit
def plus(total, a, b):
    """total + a b, rounded once; a b if there is no total yet."""
    if cutlass.const_expr(total is None):
        return a * b
    return cute.math.fma(a, b, total)
