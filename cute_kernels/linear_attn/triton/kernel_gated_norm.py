"""gated_rms_norm in Triton, forward and backward, one pass over x and the gate each.

    a = σ(gate), or gate σ(gate) of silu;  mean: over a group of x's row
    norm first     y = x rstd w a,        rstd = 1 / √(mean(x²) + eps)
                   dx = rstd (g - x̂ mean(g x̂)),  g = dy w a,  x̂ = x rstd
                   dgate = dy x̂ w a';  dweight = Σ_m dy x̂ a
    gate first     y = h rstd w,          h = x a,  rstd = 1 / √(mean(h²) + eps)
                   dh = rstd (g - ĥ mean(g ĥ)),  g = dy w,  ĥ = h rstd
                   dx = dh a;  dgate = dh x a';  dweight = Σ_m dy ĥ

Layouts.  x, gate, dy [M, D], neighbours of a row side by side, any stride between rows; y, dx and
dgate dense; weight [D]; rstd fp32 [M, D / GROUP]; pieces of dweight fp32 [P, D].

Order of sums.  Over a group: its elements in pairs, neighbours first, zeros up to BLOCK, a function
of GROUP.  Over the PIECE rows of a piece: lane r of ROWS adds rows r, r + ROWS, ... ascending, one
fma each, then lanes, each half onto half.  The pieces of a part are added half onto half, and parts
one by one, ascending, by `add_sums_kernel`.  PIECE, ROWS and the pieces of a part are functions of
GROUP.  Nothing follows M.

Means are sums times 1 / GROUP.  Nothing is fused but `tl.fma`; the root and its inverse are IEEE's.
Nothing is atomic or autotuned.

H200, 2026-11-30, 2a4a90a1, bf16, 67 M elements, as a share of the speed of a copy of its bytes:
forward 0.86 to 0.99 (8192 before the gate: 0.76); backward 0.80, 0.77, 0.84, 0.87, 0.91, 0.80, 0.63
of groups of 64, 128, 256, 512, 1024, 4096 and 8192 elements (0.63 of 128 at 8 M elements).  Of 8192
some registers are on the stack.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...cpu import elementary
from ...runtime.triton_sums import halves, pairs
from ...runtime.triton_tiles import multiples
from .kernel import add_sums_kernel  # noqa: F401  (launched as one of this module)

#: One number of fp32: e^-|z| is off by |z| 2^-24 of itself at most, and by that of 2^y.
_LOG2E = tl.constexpr(elementary.LOG2E_FP32[0])
#: 1 / (1 + e) on [0, 1]: what is left of 1 is Chebyshev's T_4(2 e - 1) / T_4(3).
_INVERSE = tl.constexpr((576 / 577, -544 / 577, 384 / 577, -128 / 577))


@triton.jit
def _columns(group, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """(columns [1, BLOCK] of a group, which of them there are)."""
    lane = tl.arange(0, BLOCK)[None, :]
    return group * GROUP + lane, lane < GROUP


@triton.jit
def _load(ptr, row, rows, stride, c, mask):
    """[ROWS, BLOCK] of columns c of rows behind ``row``; 0 outside; not converted."""
    return tl.load(ptr + row * stride + (rows * stride + c), mask=mask, other=0.0)


@triton.jit
def _store(ptr, v, row, rows, stride, c, mask):
    """The inverse of `_load`, with the one rounding."""
    out = v.to(ptr.dtype.element_ty)
    tl.store(ptr + row * stride + (rows * stride + c), out, mask=mask)


@triton.jit
def _weight(weight_ptr, c, in_c):
    """fp32 weight [1, BLOCK] of columns; 0 outside."""
    return tl.load(weight_ptr + c, mask=in_c, other=0.0).to(tl.float32)


@triton.jit
def _inverse(e):
    """1 / (1 + e) of e in [0, 1], within an ulp: no branch, as an IEEE division has."""
    inverse = tl.full(e.shape, _INVERSE[3], tl.float32)
    for i in tl.static_range(3):
        inverse = tl.fma(inverse, e, tl.full(e.shape, _INVERSE[2 - i], tl.float32))
    # The polynomial is wrong by t, at most 1 / 577:  1 / (1 - t) = 1 + t + t², and t³
    t = tl.fma(-(e + 1.0), inverse, tl.full(e.shape, 1.0, tl.float32))
    return tl.fma(inverse, tl.fma(t, t, t), inverse)


@triton.jit
def _activation(z, KIND: tl.constexpr):
    """(value, slope) of the gate's activation, from one power of two and one inverse."""
    # e = e^-|z|;  σ(|z|) = 1 / (1 + e), σ(-|z|) = e / (1 + e);  σ' = e / (1 + e)²
    e = tl.exp2(tl.abs(z) * -_LOG2E)
    inverse = _inverse(e)
    lower = e * inverse
    sigmoid = tl.where(z < 0.0, lower, inverse)
    slope = lower * inverse
    if KIND == "silu":
        return z * sigmoid, tl.fma(z, slope, sigmoid)
    else:
        tl.static_assert(KIND == "sigmoid")
        return sigmoid, slope


@triton.jit(do_not_specialize=["M"])
def gated_norm_kernel(
    x_ptr, weight_ptr, gate_ptr, y_ptr, rstd_ptr, M, x_m, gate_m, inverse_size, eps,
    KIND: tl.constexpr, NORM_FIRST: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one group."""
    x_m, gate_m = multiples((x_m, gate_m), ALIGN)
    groups: tl.constexpr = D // GROUP
    row = (tl.program_id(0) // groups).to(tl.int64) * ROWS
    group = (tl.program_id(0) % groups).to(tl.int64)
    c, in_c = _columns(group, GROUP, BLOCK)
    lanes = tl.arange(0, ROWS)
    rows, in_m = lanes[:, None].to(tl.int64), lanes < M - row
    mask = in_m[:, None] & in_c
    x = _load(x_ptr, row, rows, x_m, c, mask).to(tl.float32)
    z = _load(gate_ptr, row, rows, gate_m, c, mask).to(tl.float32)
    value, _ = _activation(z, KIND)
    normed = x if NORM_FIRST else x * value
    mean = pairs(normed * normed, ROWS, BLOCK) * inverse_size
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd_ptr + row * groups + (lanes.to(tl.int64) * groups + group), rstd, mask=in_m)
    y = normed * rstd[:, None]
    if weight_ptr is not None:
        y = y * _weight(weight_ptr, c, in_c)
    if NORM_FIRST:
        y = y * value
    _store(y_ptr, y, row, rows, D, c, mask)


@triton.jit(do_not_specialize=["M"])
def gated_norm_gradient_kernel(
    dy_ptr, x_ptr, weight_ptr, gate_ptr, rstd_ptr, dx_ptr, d_gate_ptr, pieces_ptr,
    M, dy_m, x_m, gate_m, inverse_size,
    KIND: tl.constexpr, NORM_FIRST: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    ALIGN: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of PIECE rows of one group, ROWS at a time; the next are in flight."""
    dy_m, x_m, gate_m = multiples((dy_m, x_m, gate_m), ALIGN)
    groups: tl.constexpr = D // GROUP
    piece = (tl.program_id(0) // groups).to(tl.int64)
    group = (tl.program_id(0) % groups).to(tl.int64)
    row = piece * PIECE
    left = tl.minimum(M - row, PIECE).to(tl.int32)
    c, in_c = _columns(group, GROUP, BLOCK)
    lanes = tl.arange(0, ROWS)
    rows = lanes[:, None].to(tl.int64)
    mask = (lanes < left)[:, None] & in_c
    next_dy = _load(dy_ptr, row, rows, dy_m, c, mask)
    next_x = _load(x_ptr, row, rows, x_m, c, mask)
    next_gate = _load(gate_ptr, row, rows, gate_m, c, mask)
    of_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(0, (left - 1) // ROWS + 1):
        in_m = lanes < left - step * ROWS
        at = rstd_ptr + row * groups + (lanes.to(tl.int64) * groups + group)
        rstd = tl.load(at, mask=in_m, other=0.0)[:, None]
        dy, x, z = next_dy.to(tl.float32), next_x.to(tl.float32), next_gate.to(tl.float32)
        following = row + ROWS
        mask = (lanes < left - step * ROWS - ROWS)[:, None] & in_c
        next_dy = _load(dy_ptr, following, rows, dy_m, c, mask)
        next_x = _load(x_ptr, following, rows, x_m, c, mask)
        next_gate = _load(gate_ptr, following, rows, gate_m, c, mask)
        value, slope = _activation(z, KIND)
        hat = (x if NORM_FIRST else x * value) * rstd
        if pieces_ptr is not None:
            of_weight = tl.fma(dy * value if NORM_FIRST else dy, hat, of_weight)
        weighted = dy
        if weight_ptr is not None:
            weighted = dy * _weight(weight_ptr, c, in_c)
        mask = in_m[:, None] & in_c
        # What needs no mean comes first, so that registers hold less until the mean is there.
        if NORM_FIRST:
            if d_gate_ptr is not None:
                _store(d_gate_ptr, weighted * hat * slope, row, rows, D, c, mask)
            g = weighted * value
        else:
            g, of_gate = weighted, x * slope
        # -mean: a negated tile would cost an instruction for each element.
        mean = (pairs(g * hat, ROWS, BLOCK) * -inverse_size)[:, None] + tl.zeros_like(g)
        of_normed = tl.fma(hat, mean, g) * rstd
        if dx_ptr is not None:
            dx = of_normed if NORM_FIRST else of_normed * value
            _store(dx_ptr, dx, row, rows, D, c, mask)
        if not NORM_FIRST and d_gate_ptr is not None:
            _store(d_gate_ptr, of_normed * of_gate, row, rows, D, c, mask)
        row = following
    if pieces_ptr is not None:
        total = halves(of_weight, 1, ROWS, BLOCK)
        _store(pieces_ptr, total, piece, tl.zeros([1, 1], tl.int64), D, c, in_c)
