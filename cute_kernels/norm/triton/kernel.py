"""rms_norm and layer_norm in Triton, for ROCm and for CUDA without SM90.

    forward_kernel     h = x + residual, rounded;  mean = Σ h / D (0 of an RMS norm)
                       rstd = 1 / √(Σ (h - mean)² / D + eps)
                       y = (h - mean) rstd (weight + offset) + bias
    backward_kernel    x̂ = (h - mean) rstd;  g = dy (weight + offset)
                       dx = dh + rstd (g - mean(g) - x̂ mean(g x̂)),  mean(g) of a layer norm only
                       dweight = Σ_m dy x̂;  dbias = Σ_m dy, of the rows of a part
    dx_kernel          dx of rows that registers do not hold
    parts_kernel       dweight and dbias of their parts
    add_parts_kernel   a vector += parts

Layouts.  x, residual, dy, dh, h [M, D], neighbours of a row side by side, any stride between rows;
y, h and dx that are made are dense; weight, bias [D]; mean, rstd fp32 [M]; parts fp32 [P, D].

Order of sums.  Over a row: lane l of BLOCK adds elements l, l + BLOCK, ... ascending, then lanes
are added in pairs, neighbours first; BLOCK is a function of D, and so is which kernel answers.
Zeros fill a row.  Over the rows of a part: lane r of ROWS adds rows r, r + ROWS, ... ascending, one
fma each of dweight; then lanes, each half onto half; ROWS is a function of D.  Parts are added one
by one, ascending.  No row meets another but in sums over rows; nothing follows M.

Nothing is fused but `tl.fma`; divisions and roots are IEEE's.  Nothing is atomic, nothing is
autotuned, M is not specialised on.  Offsets are 64 bits.

Limits.  Where D or a stride between rows is no multiple of 8, loads are scalar: the same bits,
slower, with some registers on the stack of the widest rows that are held whole.

Tests run this source in Triton's interpreter and its sm_90 code in ptxsim, where no row, no
cut between parts, no address, no size and no number of warps shows in a bit; they compile it for
sm_80, sm_90, gfx942 and gfx950 and read that code.  It ran on an H200 (2026-11-23);
not timed: sizes are guesses that no measurement has tuned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.triton_sums import halves, pairs, rows_of
from ...runtime.triton_tiles import multiples


@triton.jit
def _columns(first, BLOCK: tl.constexpr):
    """[1, BLOCK]: ``first`` and on, in 64 bits."""
    return (first + tl.arange(0, BLOCK)[None, :]).to(tl.int64)


@triton.jit
def _load(ptr, rows, stride, in_m, c, D):
    """[ROWS, BLOCK] of columns c of rows; 0 outside; not converted."""
    return tl.load(ptr + rows[:, None] * stride + c, mask=in_m & (c < D), other=0.0)


@triton.jit
def _store(ptr, v, rows, in_m, c, D):
    """The inverse of `_load` in dense rows, with the one rounding."""
    ptrs = ptr + rows[:, None] * D + c
    tl.store(ptrs, v.to(ptr.dtype.element_ty), mask=in_m & (c < D))


@triton.jit
def _added(x_ptr, residual_ptr, rows, x_m, residual_m, in_m, c, D):
    """h in fp32, after its rounding."""
    h = _load(x_ptr, rows, x_m, in_m, c, D).to(tl.float32)
    if residual_ptr is not None:
        h += _load(residual_ptr, rows, residual_m, in_m, c, D).to(tl.float32)
        h = h.to(x_ptr.dtype.element_ty).to(tl.float32)
    return h


@triton.jit
def _centred(h, mean, c, D):
    """h - mean; 0 behind the row, where h was."""
    return tl.where(c < D, h - mean[:, None], 0.0)


@triton.jit
def _rstd(squares, size, eps):
    """1 / √(Σ (h - mean)² / D + eps)."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, size) + eps))


@triton.jit
def _scaled(x_hat, weight_ptr, bias_ptr, offset, c, D):
    """x̂ (weight + offset) + bias, of those that there are."""
    y = x_hat
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + c, mask=c < D, other=0.0).to(tl.float32) + offset
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + c, mask=c < D, other=0.0).to(tl.float32)
            y = tl.fma(y, weight + tl.zeros_like(y), bias + tl.zeros_like(y))
        else:
            y = y * weight
    elif bias_ptr is not None:
        y += tl.load(bias_ptr + c, mask=c < D, other=0.0).to(tl.float32)
    return y


@triton.jit
def _row(held, x_ptr, residual_ptr, rows, x_m, residual_m, in_m, c, D):
    """h in fp32: the block that registers hold, or computed again."""
    h = held
    if held is None:
        h = _added(x_ptr, residual_ptr, rows, x_m, residual_m, in_m, c, D)
    return h


@triton.jit(do_not_specialize=["M"])
def forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    h_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    D,
    x_m,
    residual_m,
    size,
    eps,
    offset,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """ROWS rows in blocks of BLOCK elements; a layer norm's if there is a mean.

    WHOLE: one block is a row, and registers hold it; of a wider row each pass computes h again.
    """
    D, x_m, residual_m = multiples((D, x_m, residual_m), ALIGN)
    rows = rows_of(tl.program_id(0), ROWS)
    in_m = (rows < M)[:, None]
    blocks = 1 if WHOLE else (D - 1) // BLOCK + 1
    held = None
    if WHOLE:
        c = _columns(0, BLOCK)
        held = _added(x_ptr, residual_ptr, rows, x_m, residual_m, in_m, c, D)
        if h_ptr is not None:
            _store(h_ptr, held, rows, in_m, c, D)

    mean = tl.zeros([ROWS], tl.float32)
    if mean_ptr is not None:
        lanes = tl.zeros([ROWS, BLOCK], tl.float32)
        for block in tl.range(0, blocks):
            c = _columns(block * BLOCK, BLOCK)
            own = _row(held, x_ptr, residual_ptr, rows, x_m, residual_m, in_m, c, D)
            # A whole row as it is: a sum from +0 would lose the sign of -0.
            lanes = own if WHOLE else lanes + own
        mean = tl.div_rn(pairs(lanes, ROWS, BLOCK), size)
        tl.store(mean_ptr + rows, mean, mask=rows < M)

    lanes = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in tl.range(0, blocks):
        c = _columns(block * BLOCK, BLOCK)
        own = _row(held, x_ptr, residual_ptr, rows, x_m, residual_m, in_m, c, D)
        if mean_ptr is not None:
            own = _centred(own, mean, c, D)
        lanes = own * own if WHOLE else tl.fma(own, own, lanes)
    rstd = _rstd(pairs(lanes, ROWS, BLOCK), size, eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)

    for block in tl.range(0, blocks):
        c = _columns(block * BLOCK, BLOCK)
        own = _row(held, x_ptr, residual_ptr, rows, x_m, residual_m, in_m, c, D)
        if h_ptr is not None and not WHOLE:
            _store(h_ptr, own, rows, in_m, c, D)
        if mean_ptr is not None:
            own = _centred(own, mean, c, D)
        y = _scaled(own * rstd[:, None], weight_ptr, bias_ptr, offset, c, D)
        _store(y_ptr, y, rows, in_m, c, D)


# ---- backward ------------------------------------------------------------------------------------


@triton.jit
def _statistics(mean_ptr, rstd_ptr, rows, there):
    """mean and rstd [ROWS, 1]; 0 of rows that are not there, whose share is 0 then."""
    mean = tl.zeros_like(rows).to(tl.float32)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + rows, mask=there, other=0.0)
    return mean[:, None], tl.load(rstd_ptr + rows, mask=there, other=0.0)[:, None]


@triton.jit
def _x_hat(h, mean, rstd, mean_ptr):
    """(h - mean) rstd in fp32."""
    own = h.to(tl.float32)
    if mean_ptr is not None:
        own -= mean
    return own * rstd


@triton.jit
def _g(dy, weight_ptr, offset, c, D):
    """dy (weight + offset)."""
    g = dy
    if weight_ptr is not None:
        g = dy * (tl.load(weight_ptr + c, mask=c < D, other=0.0).to(tl.float32) + offset)
    return g


@triton.jit
def _dx(g, x_hat, of_products, of_g, rstd, dh_ptr, mean_ptr, rows, dh_m, in_m, c, D):
    """rstd (g - mean(g) - x̂ mean(g x̂)) + dh."""
    inner = tl.fma(-x_hat, of_products[:, None] + tl.zeros_like(g), g)
    if mean_ptr is not None:
        inner -= of_g[:, None]
    if dh_ptr is not None:
        dh = _load(dh_ptr, rows, dh_m, in_m, c, D).to(tl.float32)
        dx = tl.fma(inner, rstd + tl.zeros_like(g), dh)
    else:
        dx = inner * rstd
    return dx


@triton.jit(do_not_specialize=["M"])
def backward_kernel(
    dy_ptr,
    dh_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    dx_ptr,
    weight_parts_ptr,
    bias_parts_ptr,
    M,
    D,
    dy_m,
    dh_m,
    h_m,
    size,
    offset,
    ALIGN: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of PART rows of at most BLOCK elements, ROWS at a time; the next are under way."""
    D, dy_m, dh_m, h_m = multiples((D, dy_m, dh_m, h_m), ALIGN)
    start = tl.cast(tl.program_id(0), tl.int64) * PART
    end = tl.minimum(start + PART, M)
    c = _columns(0, BLOCK)
    rows = start + tl.arange(0, ROWS)
    in_m = (rows < end)[:, None]
    ahead_dy = _load(dy_ptr, rows, dy_m, in_m, c, D)
    ahead_h = _load(h_ptr, rows, h_m, in_m, c, D)
    of_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    of_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(0, (end - start - 1) // ROWS + 1):
        rows = start + step * ROWS + tl.arange(0, ROWS)
        in_m = (rows < end)[:, None]
        mean, rstd = _statistics(mean_ptr, rstd_ptr, rows, rows < end)
        dy = ahead_dy.to(tl.float32)
        x_hat = _x_hat(ahead_h, mean, rstd, mean_ptr)
        following = rows + ROWS
        ahead_dy = _load(dy_ptr, following, dy_m, (following < end)[:, None], c, D)
        ahead_h = _load(h_ptr, following, h_m, (following < end)[:, None], c, D)
        if weight_parts_ptr is not None:
            of_weight = tl.fma(dy, x_hat, of_weight)
        if bias_parts_ptr is not None:
            of_bias += dy
        g = _g(dy, weight_ptr, offset, c, D)
        of_products = tl.div_rn(pairs(g * x_hat, ROWS, BLOCK), size)
        of_g = of_products
        if mean_ptr is not None:
            of_g = tl.div_rn(pairs(g, ROWS, BLOCK), size)
        dx = _dx(g, x_hat, of_products, of_g, rstd, dh_ptr, mean_ptr, rows, dh_m, in_m, c, D)
        _store(dx_ptr, dx, rows, in_m, c, D)
    part = tl.program_id(0) + tl.zeros([1], tl.int64)
    one = (part >= 0)[:, None]
    if weight_parts_ptr is not None:
        _store(weight_parts_ptr, halves(of_weight, 1, ROWS, BLOCK), part, one, c, D)
    if bias_parts_ptr is not None:
        _store(bias_parts_ptr, halves(of_bias, 1, ROWS, BLOCK), part, one, c, D)


@triton.jit
def _block(dy_ptr, h_ptr, mean, rstd, mean_ptr, rows, dy_m, h_m, in_m, c, D):
    """(dy, x̂) in fp32 of columns c of rows."""
    x_hat = _x_hat(_load(h_ptr, rows, h_m, in_m, c, D), mean, rstd, mean_ptr)
    dy = _load(dy_ptr, rows, dy_m, in_m, c, D).to(tl.float32)
    return dy, x_hat


@triton.jit(do_not_specialize=["M"])
def dx_kernel(
    dy_ptr,
    dh_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    dx_ptr,
    M,
    D,
    dy_m,
    dh_m,
    h_m,
    size,
    offset,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx of one row, block after block."""
    D, dy_m, dh_m, h_m = multiples((D, dy_m, dh_m, h_m), ALIGN)
    rows = rows_of(tl.program_id(0), 1)
    in_m = (rows < M)[:, None]
    blocks = (D - 1) // BLOCK + 1
    mean, rstd = _statistics(mean_ptr, rstd_ptr, rows, rows < M)
    products = tl.zeros([1, BLOCK], tl.float32)
    lanes = tl.zeros([1, BLOCK], tl.float32)
    for block in tl.range(0, blocks):
        c = _columns(block * BLOCK, BLOCK)
        dy, x_hat = _block(dy_ptr, h_ptr, mean, rstd, mean_ptr, rows, dy_m, h_m, in_m, c, D)
        g = _g(dy, weight_ptr, offset, c, D)
        products = tl.fma(g, x_hat, products)
        if mean_ptr is not None:
            lanes += g
    of_products = tl.div_rn(pairs(products, 1, BLOCK), size)
    of_g = tl.div_rn(pairs(lanes, 1, BLOCK), size)
    for block in tl.range(0, blocks):
        c = _columns(block * BLOCK, BLOCK)
        dy, x_hat = _block(dy_ptr, h_ptr, mean, rstd, mean_ptr, rows, dy_m, h_m, in_m, c, D)
        g = _g(dy, weight_ptr, offset, c, D)
        dx = _dx(g, x_hat, of_products, of_g, rstd, dh_ptr, mean_ptr, rows, dh_m, in_m, c, D)
        _store(dx_ptr, dx, rows, in_m, c, D)


@triton.jit(do_not_specialize=["M"])
def parts_kernel(
    dy_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    weight_parts_ptr,
    bias_parts_ptr,
    M,
    D,
    dy_m,
    h_m,
    ALIGN: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of a part: its rows ascending, as a part of one lane."""
    D, dy_m, h_m = multiples((D, dy_m, h_m), ALIGN)
    blocks = (D - 1) // BLOCK + 1
    part = tl.cast(tl.program_id(0) // blocks, tl.int64)
    c = _columns(tl.program_id(0) % blocks * BLOCK, BLOCK)
    start = part * PART
    of_weight = tl.zeros([1, BLOCK], tl.float32)
    of_bias = tl.zeros([1, BLOCK], tl.float32)
    for step in tl.range(0, tl.minimum(M - start, PART)):
        rows = start + step + tl.zeros([1], tl.int64)
        in_m = (rows < M)[:, None]
        mean, rstd = _statistics(mean_ptr, rstd_ptr, rows, rows < M)
        dy, x_hat = _block(dy_ptr, h_ptr, mean, rstd, mean_ptr, rows, dy_m, h_m, in_m, c, D)
        of_weight = tl.fma(dy, x_hat, of_weight)
        of_bias += dy
    own = part + tl.zeros([1], tl.int64)
    one = (own >= 0)[:, None]
    _store(weight_parts_ptr, of_weight, own, one, c, D)
    if bias_parts_ptr is not None:
        _store(bias_parts_ptr, of_bias, own, one, c, D)


@triton.jit(do_not_specialize=["count"])
def add_parts_kernel(
    parts_ptr,
    out_ptr,
    count,
    D,
    parts_m,
    ACCUMULATE: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [D] = (+= with ACCUMULATE) the parts [count, D] one by one, ascending, one rounding.

    AHEAD of them are loaded together and added after one another.
    """
    c = rows_of(tl.program_id(0), BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if ACCUMULATE:
        total = tl.load(out_ptr + c, mask=c < D, other=0.0)
    for step in tl.range(0, (count - 1) // AHEAD + 1):
        ahead = ()
        for i in tl.static_range(AHEAD):
            part = tl.cast(step, tl.int64) * AHEAD + i
            ptrs = parts_ptr + part * parts_m + c
            ahead = ahead + (tl.load(ptrs, mask=(c < D) & (part < count), other=0.0),)
        for i in tl.static_range(AHEAD):
            # Not a part of zeros: it would turn -0 into +0.
            there = step * AHEAD + i < count
            total = tl.where(there, total + ahead[i], total)
    tl.store(out_ptr + c, total.to(out_ptr.dtype.element_ty), mask=c < D)
