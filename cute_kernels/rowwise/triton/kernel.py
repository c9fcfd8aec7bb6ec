"""Elementwise functions, row sums, rotary, embedding's gradient and sums of squares in Triton.

For ROCm and for every CUDA device: there is no SM90 kernel of these.  Formulas are those of
cpu/elementary.py, in fp32 where it has fp64; the angle of a rotary table and sums of squares are in
fp64 here too.

Orders.  A row's sum: lane l adds the columns l + i L, ascending, then half the lanes are added to
half, by `tl.sum` over an axis of two, which has one result whoever adds it.  An entry's gradient:
one chain, tokens ascending.  Squares: lanes, over chunks of a fixed size, then over their sums;
sums of gradients: a chain.

Nothing is fused but `tl.fma` (enable_fp_fusion is off), nothing is atomic, nothing is autotuned,
sizes are not specialised on.  Divisions and roots are IEEE's.  2^y is the device's own.

Limits.  gelu_tanh of fp32 far below 0 is off by about 2^-22 |2 u| of itself, and softmax of fp32
by 2^-24 |x - max|.  CUDA's 2^y flushes: what is below 2^-126 may be 0.  It ran on
an H200 (2026-11-23, tests/rowwise/test_gpu.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.triton_elementary import activation_slope, activation_value, cos_sin, exp, log
from ...runtime.triton_sums import lane_sum

_INFINITY = tl.constexpr(float("inf"))
_UNROLL = tl.constexpr(4)


# ---- elements ------------------------------------------------------------------------------------


@triton.jit
def _elements(N, ELEMENTS: tl.constexpr):
    """The elements of a program, in 64 bits, and which of them there are."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    return at, at < N


@triton.jit
def _loaded(ptr, at, mask):
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _stored(ptr, at, value, mask):
    tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def activation_kernel(x_ptr, out_ptr, N, KIND: tl.constexpr, ELEMENTS: tl.constexpr):
    """out = f(x)."""
    at, mask = _elements(N, ELEMENTS)
    _stored(out_ptr, at, activation_value(_loaded(x_ptr, at, mask), KIND), mask)


@triton.jit(do_not_specialize=["N"])
def activation_backward_kernel(
    dy_ptr, x_ptr, out_ptr, N, KIND: tl.constexpr, ELEMENTS: tl.constexpr
):
    """out = f'(x) dy."""
    at, mask = _elements(N, ELEMENTS)
    slope = activation_slope(_loaded(x_ptr, at, mask), KIND)
    _stored(out_ptr, at, slope * _loaded(dy_ptr, at, mask), mask)


@triton.jit(do_not_specialize=["N"])
def gated_kernel(
    gate_ptr, up_ptr, out_ptr, N, KIND: tl.constexpr, STEPS: tl.constexpr, ELEMENTS: tl.constexpr
):
    """out = f(gate) up.  STEPS: f(gate) is rounded, as by an op of its own."""
    at, mask = _elements(N, ELEMENTS)
    value = _stepped(activation_value(_loaded(gate_ptr, at, mask), KIND), gate_ptr, STEPS)
    _stored(out_ptr, at, value * _loaded(up_ptr, at, mask), mask)


@triton.jit(do_not_specialize=["N"])
def gated_rows_kernel(x_ptr, out_ptr, N, KIND: tl.constexpr, COLUMNS: tl.constexpr):
    """out[t, n] = f(x[t, n]) x[t, N + n], f(x) and the product rounded; x [T, 2 N], out [T, N]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < N
    first = row * 2 * N + column
    gate = tl.load(x_ptr + first, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (first + N), mask=mask, other=0.0).to(tl.float32)
    value = activation_value(gate, KIND).to(out_ptr.dtype.element_ty).to(tl.float32)
    product = (value * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * N + column, product, mask=mask)


@triton.jit(do_not_specialize=["N"])
def gated_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, N,
    KIND: tl.constexpr, STEPS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """d_gate = f'(gate) (dy up), d_up = f(gate) dy.  STEPS: f(gate) and dy up are rounded."""
    at, mask = _elements(N, ELEMENTS)
    dy, gate = _loaded(dy_ptr, at, mask), _loaded(gate_ptr, at, mask)
    up = _loaded(up_ptr, at, mask)
    _stored(d_gate_ptr, at, activation_slope(gate, KIND) * _product(dy, up, up_ptr, STEPS), mask)
    _stored(d_up_ptr, at, _stepped(activation_value(gate, KIND), gate_ptr, STEPS) * dy, mask)


@triton.jit(do_not_specialize=["N"])
def scale_kernel(x_ptr, factor_ptr, out_ptr, N, ELEMENTS: tl.constexpr):
    """out = x factor."""
    at, mask = _elements(N, ELEMENTS)
    _stored(out_ptr, at, _loaded(x_ptr, at, mask) * tl.load(factor_ptr), mask)


# ---- rows ----------------------------------------------------------------------------------------


@triton.jit
def _columns(ptr, row, N, first, stride_m, stride_n, other, LANES: tl.constexpr):
    """Columns of a row from ``first`` on, in fp32, and which of them there are."""
    at = (first + tl.arange(0, LANES)).to(tl.int64)
    mask = at < N
    return tl.load(ptr + row * stride_m + at * stride_n, mask=mask, other=other).to(
        tl.float32
    ), mask


@triton.jit
def _row_power(ptr, row, N, stride_m, stride_n, LANES: tl.constexpr):
    """(max x, Σ e^(x - max)) of a row."""
    top = tl.full([LANES], -_INFINITY, tl.float32)
    for first in range(0, N, LANES):
        x, _ = _columns(ptr, row, N, first, stride_m, stride_n, -_INFINITY, LANES)
        top = tl.maximum(top, x)
    top = tl.max(top, axis=0)
    total = tl.zeros([LANES], tl.float32)
    for first in range(0, N, LANES):
        x, mask = _columns(ptr, row, N, first, stride_m, stride_n, -_INFINITY, LANES)
        total += tl.where(mask, exp(x - top), 0.0)
    return top, lane_sum(total, LANES)


@triton.jit(do_not_specialize=["N"])
def softmax_kernel(x_ptr, out_ptr, N, stride_m, stride_n, LOG: tl.constexpr, LANES: tl.constexpr):
    """out [M, N] = e^(x - max) / Σ, or x - max - ln Σ; a program a row."""
    row = tl.program_id(0).to(tl.int64)
    top, total = _row_power(x_ptr, row, N, stride_m, stride_n, LANES)
    log_total = log(total.to(tl.float64)).to(tl.float32)
    for first in range(0, N, LANES):
        x, mask = _columns(x_ptr, row, N, first, stride_m, stride_n, 0.0, LANES)
        if LOG:
            y = (x - top) - log_total
        else:
            y = tl.div_rn(exp(x - top), tl.zeros([LANES], tl.float32) + total)
        _stored(out_ptr, row * N + first + tl.arange(0, LANES), y, mask)


@triton.jit(do_not_specialize=["N"])
def softmax_backward_kernel(dy_ptr, y_ptr, out_ptr, N, dy_m, dy_n, y_m, y_n, LANES: tl.constexpr):
    """out [M, N] = y (dy - Σ y dy)."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([LANES], tl.float32)
    for first in range(0, N, LANES):
        dy, _ = _columns(dy_ptr, row, N, first, dy_m, dy_n, 0.0, LANES)
        y, _ = _columns(y_ptr, row, N, first, y_m, y_n, 0.0, LANES)
        total += y * dy
    total = lane_sum(total, LANES)
    for first in range(0, N, LANES):
        dy, mask = _columns(dy_ptr, row, N, first, dy_m, dy_n, 0.0, LANES)
        y, _ = _columns(y_ptr, row, N, first, y_m, y_n, 0.0, LANES)
        _stored(out_ptr, row * N + first + tl.arange(0, LANES), y * (dy - total), mask)


@triton.jit(do_not_specialize=["N"])
def log_softmax_backward_kernel(
    dy_ptr, x_ptr, out_ptr, N, dy_m, dy_n, x_m, x_n, LANES: tl.constexpr
):
    """out [M, N] = dy - softmax(x) Σ dy."""
    row = tl.program_id(0).to(tl.int64)
    top, below = _row_power(x_ptr, row, N, x_m, x_n, LANES)
    total = tl.zeros([LANES], tl.float32)
    for first in range(0, N, LANES):
        dy, _ = _columns(dy_ptr, row, N, first, dy_m, dy_n, 0.0, LANES)
        total += dy
    total = lane_sum(total, LANES)
    for first in range(0, N, LANES):
        dy, mask = _columns(dy_ptr, row, N, first, dy_m, dy_n, 0.0, LANES)
        x, _ = _columns(x_ptr, row, N, first, x_m, x_n, 0.0, LANES)
        p = tl.div_rn(exp(x - top), tl.zeros([LANES], tl.float32) + below)
        _stored(out_ptr, row * N + first + tl.arange(0, LANES), dy - p * total, mask)


# ---- rotary --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["N"])
def rotary_table_kernel(
    positions_ptr,
    inv_freq_ptr,
    cos_ptr,
    sin_ptr,
    N,
    F,
    scaling,
    ELEMENTS: tl.constexpr,
):
    """cos and sin [P, 2 F] of N = P F angles: position · inv_freq, rounded to fp32."""
    at, mask = _elements(N, ELEMENTS)
    row, column = at // F, at % F
    position = tl.load(positions_ptr + row, mask=mask, other=0).to(tl.float64)
    frequency = tl.load(inv_freq_ptr + column, mask=mask, other=0.0).to(tl.float64)
    angle = (position * frequency).to(tl.float32).to(tl.float64)
    cos, sin = cos_sin(angle)
    cos, sin = cos * scaling, sin * scaling
    out = row * (2 * F) + column
    _stored(cos_ptr, out, cos.to(tl.float32), mask)
    _stored(cos_ptr, out + F, cos.to(tl.float32), mask)
    _stored(sin_ptr, out, sin.to(tl.float32), mask)
    _stored(sin_ptr, out + F, sin.to(tl.float32), mask)


@triton.jit
def _row_at(row, B, C, stride_a, stride_b, stride_c):
    """Offset of row (a, b, c) of [A, B, C]."""
    c, ab = row % C, row // C
    return ab // B * stride_a + ab % B * stride_b + c * stride_c


@triton.jit(do_not_specialize=["M", "B", "C", "D", "R"])
def rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    M,
    B,
    C,
    D,
    R,
    x_a,
    x_b,
    x_c,
    x_d,
    cos_a,
    cos_b,
    cos_c,
    cos_d,
    sin_a,
    sin_b,
    sin_c,
    sin_d,
    BACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out [M, D] = x cos + rotate_half(x) sin in the first R columns, x in the others."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    first = column < R // 2
    other = tl.where(first, column + R // 2, column - R // 2)
    inside = (rows < M)[:, None] & (column < D)[None, :]
    turned = (rows < M)[:, None] & (column < R)[None, :]
    x_row = _row_at(rows, B, C, x_a, x_b, x_c)[:, None]
    cos_row = _row_at(rows, B, C, cos_a, cos_b, cos_c)[:, None]
    sin_row = _row_at(rows, B, C, sin_a, sin_b, sin_c)[:, None]
    # Transposed, the sine is that of the other half, and so is its sign.
    of_sine = other if BACK else column
    x = _loaded(x_ptr, x_row + column[None, :] * x_d, inside)
    partner = _loaded(x_ptr, x_row + other[None, :] * x_d, turned)
    cos = _loaded(cos_ptr, cos_row + column[None, :] * cos_d, turned)
    sin = _loaded(sin_ptr, sin_row + of_sine[None, :] * sin_d, turned)
    if BACK:
        sin = tl.where(first[None, :], sin, -sin)
    else:
        sin = tl.where(first[None, :], -sin, sin)
    y = tl.where((column < R)[None, :], x * cos + partner * sin, x)
    _stored(out_ptr, rows[:, None] * D + column[None, :], y, inside)


@triton.jit
def _stepped(v, like_ptr, ROUND: tl.constexpr):
    """v in fp32, rounded to the dtype of a pointer if ROUND."""
    if ROUND:
        v = v.to(like_ptr.dtype.element_ty).to(tl.float32)
    return v


@triton.jit
def _product(a, b, like_ptr, ROUND: tl.constexpr):
    return _stepped(a * b, like_ptr, ROUND)


@triton.jit
def _halves_at(ptr, offset, mask, HALF: tl.constexpr):
    return _loaded(ptr, offset, mask), _loaded(ptr, offset + HALF, mask)


@triton.jit
def _rotate_rows(
    tile, x_ptr, out_ptr, cos_ptr, sin_ptr, M, B, C, x_a, x_b, x_c, out_a, out_b, out_c,
    cos_a, cos_b, cos_c, sin_a, sin_b, sin_c, D: tl.constexpr, HALF: tl.constexpr,
    SAME: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = (rows < M)[:, None]
    x_row = _row_at(rows, B, C, x_a, x_b, x_c)[:, None]
    out_row = _row_at(rows, B, C, out_a, out_b, out_c)[:, None]
    cos_row = _row_at(rows, B, C, cos_a, cos_b, cos_c)[:, None]
    sin_row = _row_at(rows, B, C, sin_a, sin_b, sin_c)[:, None]
    # An op of torch rounds to its dtype; autograd rounds a gradient to that of q and k besides.
    like = out_ptr if BACK else x_ptr
    ROUND: tl.constexpr = SAME or BACK
    for first in tl.static_range(0, HALF, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        mask = valid & (column < HALF)
        x1, x2 = _halves_at(x_ptr, x_row + column, mask, HALF)
        c1, c2 = _halves_at(cos_ptr, cos_row + column, mask, HALF)
        s1, s2 = _halves_at(sin_ptr, sin_row + column, mask, HALF)
        if BACK:
            # dx1 = dy1 c1 + (dy2 s2 + 0), dx2 = dy2 c2 + (0 - dy1 s1): autograd pads with 0
            x1, x2 = _stepped(x1, like, SAME), _stepped(x2, like, SAME)
            y1 = _product(x1, c1, like, ROUND) + (_product(x2, s2, like, ROUND) + 0.0)
            y2 = _product(x2, c2, like, ROUND) + (0.0 - _product(x1, s1, like, ROUND))
        else:
            # y1 = x1 c1 - x2 s1, y2 = x2 c2 + x1 s2
            y1 = _product(x1, c1, like, ROUND) - _product(x2, s1, like, ROUND)
            y2 = _product(x2, c2, like, ROUND) + _product(x1, s2, like, ROUND)
            y1, y2 = _stepped(y1, like, ROUND), _stepped(y2, like, ROUND)
        _stored(out_ptr, out_row + column, y1, mask)
        _stored(out_ptr, out_row + column + HALF, y2, mask)
    for first in range(2 * HALF, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        mask = valid & (column < D)
        y = _loaded(x_ptr, x_row + column, mask)
        if BACK:
            y = _stepped(y, like, ROUND) + 0.0
        _stored(out_ptr, out_row + column, y, mask)


@triton.jit(do_not_specialize=["Q_TILES", "Q_ROWS", "Q_B", "Q_C", "K_ROWS", "K_B", "K_C"])
def rotary_pair_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    Q_TILES, Q_ROWS, Q_B, Q_C, K_ROWS, K_B, K_C,
    q_a, q_b, q_c, k_a, k_b, k_c, q_out_a, q_out_b, q_out_c, k_out_a, k_out_b, k_out_c,
    cos_a, cos_b, cos_c, sin_a, sin_b, sin_c,
    D_Q: tl.constexpr, D_K: tl.constexpr, HALF: tl.constexpr, SAME: tl.constexpr,
    BACK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of q, then rows of k: x cos + rotate_half(x) sin in the steps of torch, or its gradient.

    SAME: the tables have the dtype of q and k.  HALF: of the columns that are rotated.
    """
    program = tl.program_id(0)
    if program < Q_TILES:
        _rotate_rows(
            program, q_ptr, q_out_ptr, cos_ptr, sin_ptr, Q_ROWS, Q_B, Q_C, q_a, q_b, q_c,
            q_out_a, q_out_b, q_out_c, cos_a, cos_b, cos_c, sin_a, sin_b, sin_c,
            D_Q, HALF, SAME, BACK, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        _rotate_rows(
            program - Q_TILES, k_ptr, k_out_ptr, cos_ptr, sin_ptr, K_ROWS, K_B, K_C, k_a, k_b, k_c,
            k_out_a, k_out_b, k_out_c, cos_a, cos_b, cos_c, sin_a, sin_b, sin_c,
            D_K, HALF, SAME, BACK, ROWS, COLUMNS,
        )  # fmt: skip


# ---- embedding -----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["D", "padding", "blocks"])
def embedding_gradient_kernel(
    dy_ptr,
    order_ptr,
    entry_ptr,
    end_ptr,
    into_ptr,
    D,
    padding,
    blocks,
    dy_t,
    dy_d,
    into_v,
    into_d,
    COLUMNS: tl.constexpr,
):
    """into[v] += Σ dy_t, t ascending: a program for each sorted token and block of columns.

    The program of an entry's first token adds all of them; the others have nothing to do.
    """
    program = tl.program_id(0).to(tl.int64)
    place, block = program // blocks, program % blocks
    v = tl.load(entry_ptr + place)
    before = tl.load(entry_ptr + place - 1, mask=place > 0, other=-1)
    if (v != before) & (v != padding):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        mask = column < D
        into = into_ptr + v * into_v + column * into_d
        total = tl.load(into, mask=mask, other=0.0).to(tl.float32)
        end = tl.load(end_ptr + place)
        for first in range(place, end, _UNROLL):
            for k in tl.static_range(_UNROLL):
                there = first + k < end
                token = tl.load(order_ptr + first + k, mask=there, other=0)
                dy = _loaded(dy_ptr, token * dy_t + column * dy_d, mask & there)
                total = tl.where(there, total + dy, total)
        tl.store(into, total.to(into_ptr.dtype.element_ty), mask=mask)


# ---- sums of squares -----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["N"])
def lane_sums_kernel(
    x_ptr, out_ptr, N, SQUARE: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr
):
    """out [program] = Σ x, or Σ x², in fp64 over a chunk; of all, where CHUNK is 0."""
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * CHUNK
    end = N
    if CHUNK:
        end = tl.minimum(start + CHUNK, N)
    total = tl.zeros([LANES], tl.float64)
    for first in range(start, end, LANES):
        at = first + tl.arange(0, LANES)
        x = tl.load(x_ptr + at, mask=at < end, other=0.0).to(tl.float64)
        if SQUARE:
            x = x * x
        total += x
    tl.store(out_ptr + chunk, lane_sum(total, LANES))


@triton.jit(do_not_specialize=["N"])
def chain_kernel(x_ptr, out_ptr, N):
    """out = Σ x in fp64, ascending."""
    total = tl.load(x_ptr)
    for i in range(1, N):
        total += tl.load(x_ptr + i)
    tl.store(out_ptr, total)
