"""Norms of q and k, and the decay of a gated delta rule, in Triton.

    l2norm_kernel            y = x rstd, rstd = 1 / √(Σ x² + eps)
    l2norm_gradient_kernel   x̂ = x rstd;  dx = rstd (dy - x̂ Σ dy x̂)
    decay_kernel             g = -e^A_log softplus(a + dt_bias), or, with a lower bound,
                             lower_bound sigmoid(e^A_log (a + dt_bias))
    decay_gradient_kernel    da = dg dg/da
    decay_sums_kernel        Σ dg dg/dA_log and Σ da of a chunk: dA_log and d_dt_bias

A sum of a row adds neighbours, then neighbours of those sums; zeros fill the row.  A sum over a
chunk's rows is one chain of multiply-adds, the first row first; where EACH consecutive channels
have a head's A_log, each half of their sums is then added onto half.  Chunks are added by
`add_sums_kernel`.  fp32 inside; nothing is atomic or autotuned, and nothing is fused but `tl.fma`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...cpu import elementary
from ...runtime.triton_elementary import activation_slope, activation_value, exp
from ...runtime.triton_sums import lane_sum, pairs, rows_of
from ..config import SOFTPLUS_LINEAR
from .kernel import add_sums_kernel as add_sums_kernel
from .kernel import sequence_rows, store_sums
from .plan import TRITON

_TERMS = tl.constexpr(TRITON.log_terms)
_ARTANH = tl.constexpr(elementary.LOG_SERIES[: TRITON.log_terms])
_LINEAR = tl.constexpr(SOFTPLUS_LINEAR)


# ---- norms ---------------------------------------------------------------------------------------


@triton.jit
def _rows(N, H, x_row, x_head, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr):
    """Offsets [ROWS, BLOCK_K] of a program's rows in x and in dense memory, and which there are."""
    row = rows_of(tl.program_id(0), ROWS)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    return row // H * x_row + row % H * x_head + k, row * K + k, (row < N) & (k < K)


@triton.jit
def _rstd(x, eps, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    return tl.div_rn(1.0, tl.sqrt_rn(pairs(x * x, ROWS, BLOCK_K) + eps))[:, None]


@triton.jit(do_not_specialize=["N", "H"])
def l2norm_kernel(
    x_ptr, y_ptr, N, H, x_row, x_head, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y = x rstd, of N rows."""
    offset, dense, mask = _rows(N, H, x_row, x_head, K, BLOCK_K, ROWS)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    y = x * _rstd(x, eps, ROWS, BLOCK_K)
    tl.store(y_ptr + dense, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N", "H"])
def l2norm_gradient_kernel(
    dy_ptr, x_ptr, dx_ptr, N, H, x_row, x_head, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = rstd (dy - x̂ Σ dy x̂), of N rows."""
    offset, dense, mask = _rows(N, H, x_row, x_head, K, BLOCK_K, ROWS)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + dense, mask=mask, other=0.0).to(tl.float32)
    rstd = _rstd(x, eps, ROWS, BLOCK_K)
    x_hat = x * rstd
    dx = (dy - x_hat * pairs(dy * x_hat, ROWS, BLOCK_K)[:, None]) * rstd
    tl.store(dx_ptr + dense, dx.to(dx_ptr.dtype.element_ty), mask=mask)


# ---- decay ---------------------------------------------------------------------------------------


@triton.jit
def softplus(x):
    """ln(1 + e^x); x above `_LINEAR`."""
    # max(x, 0) + ln(1 + u), u = e^-|x|; ln(1 + u) = 2 artanh(s)
    u = exp(-tl.abs(x))
    s = tl.div_rn(u, u + 2.0)
    square = s * s
    series = tl.full(x.shape, _ARTANH[_TERMS - 1], tl.float32)
    for i in tl.static_range(_TERMS - 1):
        series = series * square + _ARTANH[_TERMS - 2 - i]
    return tl.where(x > _LINEAR, x, tl.where(x > 0.0, x, 0.0) + series * s)


@triton.jit
def _gate(
    a_ptr, A_log_ptr, dt_bias_ptr, offset, channel, mask,
    EACH: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """(g, dg/da, dg/dA_log) in fp32."""
    x = tl.load(a_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if dt_bias_ptr is not None:
        x = x + tl.load(dt_bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    rate = exp(tl.load(A_log_ptr + channel // EACH, mask=mask, other=0.0).to(tl.float32))
    if BOUND is not None:
        y = rate * x
        slope = activation_slope(y, "sigmoid") * BOUND * rate
        return activation_value(y, "sigmoid") * BOUND, slope, slope * x
    else:
        rate = -rate
        g = rate * softplus(x)
        return g, rate * activation_value(x, "sigmoid"), g


@triton.jit
def _elements(offsets_ptr, N, C, SEQUENCES, ELEMENTS: tl.constexpr):
    """A program's elements of [N, C]: index, row, channel, which there are, which of a sequence."""
    index = rows_of(tl.program_id(0), ELEMENTS)
    row = index // C
    end = tl.cast(N, tl.int64)
    if offsets_ptr is not None:
        end = tl.load(offsets_ptr + SEQUENCES).to(tl.int64)
    return index, row, index % C, row < N, row < end


@triton.jit(do_not_specialize=["N", "SEQUENCES", "C", "a_row"])
def decay_kernel(
    a_ptr, A_log_ptr, dt_bias_ptr, offsets_ptr, g_ptr, N, SEQUENCES, C, a_row,
    EACH: tl.constexpr, BOUND: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """g; rows that belong to no sequence are 0."""
    index, row, channel, mask, inside = _elements(offsets_ptr, N, C, SEQUENCES, ELEMENTS)
    g, _slope, _of_A_log = _gate(
        a_ptr, A_log_ptr, dt_bias_ptr, row * a_row + channel, channel, mask, EACH, BOUND
    )  # fmt: skip
    tl.store(g_ptr + index, tl.where(inside, g, 0.0), mask=mask)


@triton.jit(do_not_specialize=["N", "SEQUENCES", "C", "a_row"])
def decay_gradient_kernel(
    dg_ptr, a_ptr, A_log_ptr, dt_bias_ptr, offsets_ptr, da_ptr, N, SEQUENCES, C, a_row,
    EACH: tl.constexpr, BOUND: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """da; rows that belong to no sequence are 0."""
    index, row, channel, mask, inside = _elements(offsets_ptr, N, C, SEQUENCES, ELEMENTS)
    _g, slope, _of_A_log = _gate(
        a_ptr, A_log_ptr, dt_bias_ptr, row * a_row + channel, channel, mask, EACH, BOUND
    )  # fmt: skip
    dg = tl.load(dg_ptr + index, mask=mask, other=0.0)
    da = tl.where(inside, dg * slope, 0.0)
    tl.store(da_ptr + index, da.to(da_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES", "C", "a_row"])
def decay_sums_kernel(
    dg_ptr, a_ptr, A_log_ptr, dt_bias_ptr, offsets_ptr, of_A_log_ptr, of_bias_ptr,
    N, LENGTH, SEQUENCES, C, a_row,
    EACH: tl.constexpr, BOUND: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """of_A_log [slots, C / EACH], of_bias [slots, C]: sums of a chunk; -0 where there is none.

    Of the EACH channels of a head, or of CHANNELS heads.
    """
    sequence, first, end, start = sequence_rows(offsets_ptr, ROWS, N, LENGTH, SEQUENCES)
    block, lane = tl.program_id(1).to(tl.int64), tl.arange(0, CHANNELS)
    size: tl.constexpr = CHANNELS if EACH == 1 else EACH
    channel = block * size + lane
    # What is no channel of this program is none at all.
    channel = tl.where(lane < size, channel, C)
    mask = channel < C
    of_A_log = tl.zeros((CHANNELS,), tl.float32)
    of_bias = of_A_log
    for row in range(start, tl.minimum(start + ROWS, end)):
        _g, slope, factor = _gate(
            a_ptr, A_log_ptr, dt_bias_ptr, row * a_row + channel, channel, mask, EACH, BOUND
        )  # fmt: skip
        dg = tl.load(dg_ptr + row * C + channel, mask=mask, other=0.0)
        of_A_log = tl.fma(factor, dg, of_A_log)
        of_bias = tl.fma(slope, dg, of_bias)
    one = tl.arange(0, 1)
    store_sums(of_bias_ptr, of_bias[None, :], one, channel, sequence, start, end, SEQUENCES, C, 1)
    if EACH > 1:
        of_A_log = lane_sum(tl.where(mask, of_A_log, 0.0), CHANNELS) + tl.zeros((1,), tl.float32)
        channel = block + one
    heads = C // EACH
    store_sums(
        of_A_log_ptr, of_A_log[None, :], one, channel, sequence, start, end, SEQUENCES, heads, 1
    )  # fmt: skip
