"""Elementary functions in fp64, made of IEEE operations: each is one torch call on a tensor.

A vector register and the scalar tail behind it then round alike, and so does any thread: no bit
depends on where an element lies.  torch.exp and its kin promise nothing of the kind, and addcmul
may contract in one of the two.  What is returned is off by less than 2^-36 of itself; around a zero
of a derivative, by less than 2^-36 of the terms of its sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
#: log2(e) as two numbers of fp32.
LOG2E_FP32 = (1.4426950216293335, 1.925963033500011e-08)


def _exp2_series(count: int) -> tuple[float, ...]:
    """ln(2)^i / i!: those of 2^f."""
    terms = [1.0]
    for i in range(1, count):
        terms.append(terms[-1] * LN2 / i)
    return tuple(terms)


#: 2^f on [-1/2, 1/2], in fp64: the next term is below 2^-46.
EXP2 = _exp2_series(12)
#: ln((1 + s) / (1 - s)) = Σ_i c_i s^(2 i + 1), in fp64, for |s| < 0.172: a mantissa's range.
LOG_SERIES = tuple(2.0 / (2 * i + 1) for i in range(11))
SQRT_HALF = 0.5**0.5
#: tanh(x) = x Σ_i c_i x^(2 i) below `TANH_SMALL`; the next term is below 2^-40.
TANH = (
    1.0,
    -1 / 3,
    2 / 15,
    -17 / 315,
    62 / 2835,
    -1382 / 155925,
    21844 / 6081075,
    -929569 / 638512875,
)
TANH_SMALL = 0.25
#: (1 + 2 z) e^(z²) erfc(z) for z ≥ 0 as a polynomial of t = (z - 3) / (z + 3): interpolated at
#: Chebyshev's points in 60 digits.  Off by less than 2^-40 in fp64, and by less than 2^-27.
ERFC_MIDDLE = 3.0
ERFC = (
    1.2530080582697083,
    -0.13562110612097714,
    -0.047562294349106415,
    0.1296451584843267,
    -0.11927366356169056,
    0.06830803123731662,
    -0.023770512995302844,
    0.002529360157979918,
    0.0018886774286512016,
    -0.0007796920717824697,
    -0.00010510930458725482,
    0.0001247314555857568,
    4.827299314279155e-06,
    -1.9508279846326352e-05,
    -5.429803692969122e-07,
    2.889004737403984e-06,
    1.7099393755053604e-07,
    -2.8031975846031596e-07,
    -2.7252816984119575e-08,
)
ERFC_FP32 = (
    1.2530080582534238,
    -0.1356210694002736,
    -0.04756229269565379,
    0.1296441143440814,
    -0.11927369132068087,
    0.06831656777114085,
    -0.023770334675484478,
    0.0024991168696069477,
    0.0018881128646091253,
    -0.0007264536790340485,
    -0.00010413071427970404,
    7.731024224076895e-05,
    3.861849136821459e-06,
)
#: Beyond it e^(-z²) is 0 in every dtype that is returned.
ERFC_MOST = 40.0
#: gelu's approximation: x / (1 + e^(-2 u)), u = GELU_SCALE (x + GELU_CUBE x³).
GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBE = 0.044715
SQRT_TWO = math.sqrt(2.0)
DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
#: π / 2 in three parts; the first two have 28 bits, so that whole numbers below 2^25 times them
#: are exact.
HALF_PI = (
    1.570796325802803,
    9.920935739593517e-10,
    5.721188726109832e-18,
)
#: sin r = r Σ_i c_i r^(2 i) and cos r = Σ_i c_i r^(2 i) for |r| ≤ π / 4; the next terms are below
#: 2^-53.
SIN = tuple((-1.0) ** i / math.factorial(2 * i + 1) for i in range(8))
COS = tuple((-1.0) ** i / math.factorial(2 * i) for i in range(9))

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


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Compute ln(1 + e^x); inf for inf, 0 for -inf, NaN for NaN."""
    # max(x, 0) + ln(1 + u), u = e^-|x|: s of `log` is below 1/3.
    u = exp(-x.abs())
    s = u / (u + 2.0)
    return x.clamp(min=0.0) + _horner(LOG_SERIES, s * s) * s


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
    """Evaluate one of the kinds of rowwise at fp64 numbers that fp32 holds."""
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
