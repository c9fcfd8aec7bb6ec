"""Norms of q and k, and the decay of a gated delta rule, in Triton.

    l2norm_kernel            y = x rstd, rstd = 1 / √(Σ x² + eps)
    l2norm_gradient_kernel   x̂ = x rstd;  dx = rstd (dy - x̂ Σ dy x̂)
    decay_kernel             g = -e^A_log softplus(a + dt_bias)
    decay_gradient_kernel    da = dg · -e^A_log sigmoid(a + dt_bias)
    decay_sums_kernel        Σ dg g and Σ da of a chunk: dA_log and d_dt_bias

A sum of a row adds neighbours, then neighbours of those sums; zeros fill the row.  A sum over a
chunk's rows is one chain of multiply-adds, the first row first, and chunks are added by
`add_sums_kernel`.  fp32 inside; nothing is atomic or autotuned, and nothing is fused but `tl.fma`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...cpu import elementary
from ...runtime.triton_elementary import activation_value, exp
from ...runtime.triton_sums import pairs, rows_of
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
def _gate(a_ptr, A_log_ptr, dt_bias_ptr, offset, head, mask):
    """(a + dt_bias, -e^A_log) in fp32."""
    x = tl.load(a_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if dt_bias_ptr is not None:
        x = x + tl.load(dt_bias_ptr + head, mask=mask, other=0.0).to(tl.float32)
    return x, -exp(tl.load(A_log_ptr + head, mask=mask, other=0.0).to(tl.float32))


@triton.jit
def _elements(offsets_ptr, N, H, SEQUENCES, ELEMENTS: tl.constexpr):
    """A program's elements of [N, H]: index, row, head, which there are, which of a sequence."""
    index = rows_of(tl.program_id(0), ELEMENTS)
    row = index // H
    end = tl.cast(N, tl.int64)
    if offsets_ptr is not None:
        end = tl.load(offsets_ptr + SEQUENCES).to(tl.int64)
    return index, row, index % H, row < N, row < end


@triton.jit(do_not_specialize=["N", "SEQUENCES", "H", "a_row"])
def decay_kernel(
    a_ptr, A_log_ptr, dt_bias_ptr, offsets_ptr, g_ptr, N, SEQUENCES, H, a_row,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    """g; rows that belong to no sequence are 0."""
    index, row, head, mask, inside = _elements(offsets_ptr, N, H, SEQUENCES, ELEMENTS)
    x, rate = _gate(a_ptr, A_log_ptr, dt_bias_ptr, row * a_row + head, head, mask)
    tl.store(g_ptr + index, tl.where(inside, rate * softplus(x), 0.0), mask=mask)


@triton.jit(do_not_specialize=["N", "SEQUENCES", "H", "a_row"])
def decay_gradient_kernel(
    dg_ptr, a_ptr, A_log_ptr, dt_bias_ptr, offsets_ptr, da_ptr, N, SEQUENCES, H, a_row,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    """da; rows that belong to no sequence are 0."""
    index, row, head, mask, inside = _elements(offsets_ptr, N, H, SEQUENCES, ELEMENTS)
    x, rate = _gate(a_ptr, A_log_ptr, dt_bias_ptr, row * a_row + head, head, mask)
    dg = tl.load(dg_ptr + index, mask=mask, other=0.0)
    da = tl.where(inside, dg * (rate * activation_value(x, "sigmoid")), 0.0)
    tl.store(da_ptr + index, da.to(da_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES", "H", "a_row"])
def decay_sums_kernel(
    dg_ptr, a_ptr, A_log_ptr, dt_bias_ptr, offsets_ptr, sums_ptr, N, LENGTH, SEQUENCES, H, a_row,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """sums [slots, 2, H]: Σ dg g and Σ dg dg/da of a chunk; -0 where there is none."""
    sequence, first, end, start = sequence_rows(offsets_ptr, ROWS, N, LENGTH, SEQUENCES)
    which = tl.arange(0, 2)
    head = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    mask = head < H
    total = tl.zeros((2, CHANNELS), tl.float32)
    for row in range(start, tl.minimum(start + ROWS, end)):
        x, rate = _gate(a_ptr, A_log_ptr, dt_bias_ptr, row * a_row + head, head, mask)
        g, slope = rate * softplus(x), rate * activation_value(x, "sigmoid")
        factor = tl.where((which == 0)[:, None], g[None, :], slope[None, :])
        dg = tl.load(dg_ptr + row * H + head, mask=mask, other=0.0)
        total = tl.fma(factor, tl.broadcast_to(dg[None, :], (2, CHANNELS)), total)
    store_sums(sums_ptr, total, which, head, sequence, start, end, SEQUENCES, H, 2)
