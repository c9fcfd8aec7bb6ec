"""Elementary functions in fp32, for the Triton kernels of every system.

Formulas are those of cpu/elementary.py.  2^y is the device's own; divisions are IEEE's.  CUDA's 2^y
flushes: what is below 2^-126 may be 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..cpu import elementary

_LOG2E = tl.constexpr(elementary.LOG2E_FP32[0])
_LOG2E_LOW = tl.constexpr(elementary.LOG2E_FP32[1])
_LN2 = tl.constexpr(elementary.LN2)
_NORMAL_SCALE = tl.constexpr(1.0 / elementary.SQRT_TWO)
_DENSITY = tl.constexpr(elementary.DENSITY)
_GELU_CUBE = tl.constexpr(elementary.GELU_CUBE)
_GELU_CUBE_3 = tl.constexpr(3.0 * elementary.GELU_CUBE)
_GELU_SCALE_2 = tl.constexpr(2.0 * elementary.GELU_SCALE)
_TANH = tl.constexpr(elementary.TANH[:6])
_TANH_SMALL = tl.constexpr(elementary.TANH_SMALL)
_ERFC = tl.constexpr(elementary.ERFC_FP32)
_ERFC_MIDDLE = tl.constexpr(elementary.ERFC_MIDDLE)
_LOG_SERIES = tl.constexpr(elementary.LOG_SERIES)
_SQRT_HALF = tl.constexpr(elementary.SQRT_HALF)
_SIN = tl.constexpr(elementary.SIN)
_COS = tl.constexpr(elementary.COS)
_PI_0 = tl.constexpr(elementary.HALF_PI[0])
_PI_1 = tl.constexpr(elementary.HALF_PI[1])
_PI_2 = tl.constexpr(elementary.HALF_PI[2])
_QUARTERS = tl.constexpr(1.0 / (elementary.HALF_PI[0] + elementary.HALF_PI[1]))
#: 1.5 · 2^52: adding it rounds what is below 2^51.
_ROUND = tl.constexpr(6755399441055744.0)
#: e^110 is inf, and e^-110 is 0, in fp32.
_FAR = tl.constexpr(110.0)
#: e^(-x² / 2) is 0 in fp32 beyond it.
_TAIL = tl.constexpr(20.0)


@triton.jit
def _horner(CONSTANTS: tl.constexpr, COUNT: tl.constexpr, x):
    series = tl.full(x.shape, CONSTANTS[COUNT - 1], x.dtype)
    for i in tl.static_range(COUNT - 1):
        series = series * x + CONSTANTS[COUNT - 2 - i]
    return series


@triton.jit
def _inverse(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def exp(x):
    """e^x in fp32; 0 below -110, inf above 110, NaN for NaN."""
    near = tl.where(x < -_FAR, -_FAR, x)
    near = tl.where(near > _FAR, _FAR, near)
    # log2(e) in two parts: the first product's rounding error is kept.
    high = near * _LOG2E
    low = tl.fma(near, tl.full(x.shape, _LOG2E, tl.float32), -high) + near * _LOG2E_LOW
    return tl.exp2(high) * (low * _LN2 + 1.0)


@triton.jit
def log(x):
    """ln x of a normal x > 0 in fp64; NaN for NaN."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    small = m < _SQRT_HALF
    m = tl.where(small, m + m, m)
    exponent = tl.where(small, exponent - 1, exponent)
    s = (m - 1.0) / (m + 1.0)
    value = _horner(_LOG_SERIES, 11, s * s) * s + exponent.to(tl.float64) * _LN2
    return tl.where(x == x, value, x)


# ---- functions of one number ---------------------------------------------------------------------


@triton.jit
def _sigmoid(x):
    return _inverse(exp(-x) + 1.0)


@triton.jit
def _sigmoid_slope(x):
    e = exp(-tl.abs(x))
    below = e + 1.0
    return tl.div_rn(e, below * below)


@triton.jit
def _tanh(x):
    size = tl.abs(x)
    e = exp(size * -2.0)
    far = tl.div_rn(1.0 - e, e + 1.0)
    far = tl.where(x < 0.0, -far, far)
    near = tl.where(size < _TANH_SMALL, x, 0.0)
    return tl.where(size < _TANH_SMALL, _horner(_TANH, 6, near * near) * x, far)


@triton.jit
def _bell(x):
    """e^(-x² / 2): the rounding error of x² is kept."""
    near = tl.where(x > _TAIL, _TAIL, tl.where(x < -_TAIL, -_TAIL, x))
    high = near * near
    low = tl.fma(near, near, -high)
    return exp(high * -0.5) * (low * -0.5 + 1.0)


@triton.jit
def _normal(x):
    size = tl.abs(x)
    z = tl.where(size > _TAIL, _TAIL, size) * _NORMAL_SCALE
    tail = _horner(_ERFC, 13, tl.div_rn(z - _ERFC_MIDDLE, z + _ERFC_MIDDLE))
    tail = tl.div_rn(tail, z * 2.0 + 1.0) * _bell(x) * 0.5
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def _twice_u(x):
    return (x + x * x * x * _GELU_CUBE) * _GELU_SCALE_2


@triton.jit
def activation_value(x, KIND: tl.constexpr):
    """f(x) in fp32; KIND: "silu", "gelu", "gelu_tanh", "sigmoid" or "tanh"."""
    if KIND == "silu":
        return tl.div_rn(x, exp(-x) + 1.0)
    elif KIND == "gelu":
        return x * _normal(x)
    elif KIND == "gelu_tanh":
        return tl.div_rn(x, exp(-_twice_u(x)) + 1.0)
    elif KIND == "sigmoid":
        return _sigmoid(x)
    else:
        tl.static_assert(KIND == "tanh")
        return _tanh(x)


@triton.jit
def activation_slope(x, KIND: tl.constexpr):
    """f'(x) in fp32."""
    if KIND == "silu":
        return _sigmoid(x) + x * _sigmoid_slope(x)
    elif KIND == "gelu":
        return _normal(x) + x * (_bell(x) * _DENSITY)
    elif KIND == "gelu_tanh":
        twice = _twice_u(x)
        inner = (x * x * _GELU_CUBE_3 + 1.0) * _GELU_SCALE_2
        return _sigmoid(twice) + x * _sigmoid_slope(twice) * inner
    elif KIND == "sigmoid":
        return _sigmoid_slope(x)
    else:
        tl.static_assert(KIND == "tanh")
        return _sigmoid_slope(x * 2.0) * 4.0


@triton.jit
def cos_sin(angle):
    """(cos, sin) of an angle in fp64, below 2^25 in size; NaN for inf and NaN."""
    # r = angle - n π / 2, from π / 2 in three parts.
    n = (angle * _QUARTERS + _ROUND) - _ROUND
    r = ((angle - n * _PI_0) - n * _PI_1) - n * _PI_2
    square = r * r
    sine, cosine = _horner(_SIN, 8, square) * r, _horner(_COS, 9, square)
    quarter = n.to(tl.int64) & 3
    odd = (quarter & 1) == 1
    cos, sin = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    cos = tl.where((quarter == 1) | (quarter == 2), -cos, cos)
    return cos, tl.where(quarter >= 2, -sin, sin)
