"""Elementwise functions in fp64, made of IEEE operations: each is one torch call on a tensor.

A vector register and the scalar tail behind it then round alike, and so does any thread: no bit
depends on where an element lies.  torch.exp and its kin promise nothing of the kind, and addcmul
may contract in one of the two.  What is returned is off by less than 2^-36 of itself; around a zero
of a derivative, by less than 2^-36 of the terms of its sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .config import (
    COS,
    DENSITY,
    ERFC,
    ERFC_MIDDLE,
    ERFC_MOST,
    EXP2,
    GELU_CUBE,
    GELU_SCALE,
    HALF_PI,
    LN2,
    LOG2E,
    LOG_SERIES,
    SIN,
    SQRT_HALF,
    SQRT_TWO,
    TANH,
    TANH_SMALL,
)

#: Powers of two beyond it are 0 or infinite in every dtype that is returned.
_FAR = 1000.0
_BIAS, _FRACTION = 1023, 52


def exp(x: torch.Tensor) -> torch.Tensor:
    """Compute e^x; 0 below 2^-1000, inf above 2^1000, NaN for NaN."""
    y = x * LOG2E
    f = y.clamp(-_FAR, _FAR)
    exponent = f.round()
    f -= exponent
    value = _horner(EXP2, f)
    value *= ((exponent.to(torch.int64) + _BIAS) << _FRACTION).view(torch.float64)
    value.masked_fill_(y < -_FAR, 0.0)
    return value.masked_fill_(y > _FAR, torch.inf)


def log(x: torch.Tensor) -> torch.Tensor:
    """Compute ln x of a normal x > 0; inf for inf, NaN for NaN."""
    bits = x.view(torch.int64)
    exponent = (bits >> _FRACTION) - (_BIAS - 1)
    m = ((bits & ((1 << _FRACTION) - 1)) | ((_BIAS - 1) << _FRACTION)).view(torch.float64)
    small = m < SQRT_HALF
    m = torch.where(small, m + m, m)
    exponent = torch.where(small, exponent - 1, exponent)
    # ln m = Σ_i 2 / (2 i + 1) s^(2 i + 1), s = (m - 1) / (m + 1)
    s = (m - 1.0) / (m + 1.0)
    value = _horner(LOG_SERIES, s * s) * s + exponent.to(torch.float64) * LN2
    return torch.where(x < torch.inf, value, x)


def cos_sin(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin) of an angle of fp32, below 2^25 in size; NaN for inf and NaN."""
    # r = angle - n π / 2, from π / 2 in three parts: the first two products are exact.
    n = (angle * (1.0 / (HALF_PI[0] + HALF_PI[1]))).round()
    r = angle
    for part in HALF_PI:
        r = r - n * part
    square = r * r
    sine, cosine = _horner(SIN, square) * r, _horner(COS, square)
    # A quarter further: sin' = cos, cos' = -sin.
    quarter = n - 4.0 * (n * 0.25).floor()
    odd = (quarter == 1.0) | (quarter == 3.0)
    cos, sin = torch.where(odd, sine, cosine), torch.where(odd, cosine, sine)
    cos = torch.where((quarter == 1.0) | (quarter == 2.0), -cos, cos)
    sin = torch.where(quarter >= 2.0, -sin, sin)
    return cos, sin


def value(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Evaluate one of `config.KINDS` at fp64 numbers that fp32 holds."""
    return _FUNCTIONS[kind][0](x)


def derivative(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Derivative of `value`."""
    return _FUNCTIONS[kind][1](x)


def _horner(constants: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    series = torch.full_like(x, constants[-1])
    for c in constants[-2::-1]:
        series *= x
        series += c
    return series


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (exp(-x) + 1.0)


def _sigmoid_slope(x: torch.Tensor) -> torch.Tensor:
    # s (1 - s) = e / (1 + e)², e = e^-|x|
    e = exp(-x.abs())
    below = e + 1.0
    return e / (below * below)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (exp(-x) + 1.0)


def _silu_slope(x: torch.Tensor) -> torch.Tensor:
    # s + x s (1 - s)
    return _sigmoid(x) + x * _sigmoid_slope(x)


def _tanh(x: torch.Tensor) -> torch.Tensor:
    size = x.abs()
    # ± (1 - e) / (1 + e), e = e^(-2 |x|); a series where 1 - e would cancel.
    e = exp(size * -2.0)
    far = (1.0 - e) / (e + 1.0)
    far = torch.where(x < 0.0, -far, far)
    clamped = size.clamp(max=TANH_SMALL)
    return torch.where(size < TANH_SMALL, _horner(TANH, clamped * clamped) * x, far)


def _tanh_slope(x: torch.Tensor) -> torch.Tensor:
    return _sigmoid_slope(x * 2.0) * 4.0


def _normal(x: torch.Tensor) -> torch.Tensor:
    """Compute Φ(x) = erfc(-x / √2) / 2, with the small tail relatively exact."""
    z = (x.abs() * (1.0 / SQRT_TWO)).clamp(max=ERFC_MOST)
    # erfc(z) = P((z - 3) / (z + 3)) / (1 + 2 z) e^(-z²); x² is exact.
    tail = _horner(ERFC, (z - ERFC_MIDDLE) / (z + ERFC_MIDDLE)) / (z * 2.0 + 1.0)
    tail *= exp(x * x * -0.5)
    tail *= 0.5
    return torch.where(x < 0.0, tail, 1.0 - tail)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * _normal(x)


def _gelu_slope(x: torch.Tensor) -> torch.Tensor:
    # Φ + x φ
    return _normal(x) + x * (exp(x * x * -0.5) * DENSITY)


def _twice_u(x: torch.Tensor) -> torch.Tensor:
    return (x + x * x * x * GELU_CUBE) * (2.0 * GELU_SCALE)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    # x (1 + tanh u) / 2 = x / (1 + e^(-2 u))
    return x / (exp(-_twice_u(x)) + 1.0)


def _gelu_tanh_slope(x: torch.Tensor) -> torch.Tensor:
    # s(2 u) + x s'(2 u) (2 u)'
    twice = _twice_u(x)
    inner = (x * x * (3.0 * GELU_CUBE) + 1.0) * (2.0 * GELU_SCALE)
    return _sigmoid(twice) + x * _sigmoid_slope(twice) * inner


_FUNCTIONS: dict[str, tuple[Callable, Callable]] = {
    "silu": (_silu, _silu_slope),
    "gelu": (_gelu, _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "sigmoid": (_sigmoid, _sigmoid_slope),
    "tanh": (_tanh, _tanh_slope),
}
