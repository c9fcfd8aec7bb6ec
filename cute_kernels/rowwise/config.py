"""Every constant that the bits of rowwise depend on, and the guarantees it keeps.

A sum over a row, and a sum of squares, is made of lanes.  Lane l of L adds the elements l, l + L,
l + 2 L, ..., ascending; then the upper half of the lanes is added to the lower half, again and
again.  L is the power of two at or above the width, from 2 to LANES: a function of the width alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from .. import arch
from ..contracts import BATCH_INVARIANT, RUN_TO_RUN, SCHEDULE_INVARIANT, SPLIT_INVARIANT
from .triton.plan import TRITON

#: Of a sum over a row, at most.
LANES = 1024
#: Elements of a gradient whose squares are added in lanes; the sums of such chunks in lanes again.
SQUARES = 65536
#: What `clip_grad_norm_` adds to the norm it divides by, as torch does.
EPSILON = 1e-6

#: The functions of one number.  ``gelu_tanh`` is gelu(approximate="tanh").
KINDS = ("silu", "gelu", "gelu_tanh", "sigmoid", "tanh")
GATES = ("silu", "gelu", "gelu_tanh")
APPROXIMATE = {"none": "gelu", "tanh": "gelu_tanh"}

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
#: log2(e) as two numbers of fp32.
LOG2E_FP32 = (1.4426950216293335, 1.925963033500011e-08)


def _exp2_series(count: int) -> tuple[float, ...]:
    """ln(2)^i / i!: those of 2^f."""
    found = [1.0]
    for i in range(1, count):
        found.append(found[-1] * LN2 / i)
    return tuple(found)


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

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_ROWS = frozenset({RUN_TO_RUN, BATCH_INVARIANT})
_ON_GPUS = frozenset({SCHEDULE_INVARIANT})


def _kept(names: frozenset[str]) -> Mapping[str, frozenset[str]]:
    return {arch.TRITON: names | _ON_GPUS, arch.CPU: names}


#: Op -> backend -> what it keeps.
KEPT: Mapping[str, Mapping[str, frozenset[str]]] = {
    "embedding": _kept(_ROWS | {SPLIT_INVARIANT}),
    "softmax": _kept(_ROWS),
    "log_softmax": _kept(_ROWS),
    "silu": _kept(_ROWS),
    "gelu": _kept(_ROWS),
    "sigmoid": _kept(_ROWS),
    "tanh": _kept(_ROWS),
    "silu_mul": _kept(_ROWS),
    "gelu_mul": _kept(_ROWS),
    "rotary_table": _kept(_ROWS),
    "apply_rotary": _kept(_ROWS),
    "apply_rotary_pos_emb": _kept(_ROWS),
    "clip_grad_norm_": _kept(frozenset({RUN_TO_RUN})),
}


def lanes(width: int) -> int:
    """Lanes of a sum over ``width`` elements: two at least, so that there is something to add."""
    return min(LANES, 1 << max(1, width - 1).bit_length())


def contract_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that a contract id covers.  No thread count: no bit depends on it."""
    common: dict[str, object] = {
        "lanes": (LANES, "l + i L ascending, then halves"),
        "squares": (SQUARES, "in fp64; chunks in lanes, tensors ascending"),
        "embedding": "fp32, tokens ascending, one rounding",
        "rotary": "two products and a sum",
        "angle": "position times inv_freq, rounded to fp32",
        "constants": (
            EXP2, LOG_SERIES, TANH, TANH_SMALL, ERFC_MIDDLE, ERFC_MOST, GELU_SCALE, GELU_CUBE,
            HALF_PI, SIN, COS, EPSILON,
        ),
    }  # fmt: skip
    if backend == arch.CPU:
        return common | {"cpu": {"inside": "fp64", "erfc": ERFC}}
    exp2 = "v_exp_f32" if device.arch.startswith("gfx") else "ex2.approx.ftz"
    return common | {
        "fp_fusion": TRITON.fp_fusion,
        "inside": "fp32",
        "exp2": exp2,
        "erfc": ERFC_FP32,
        "log2(e)": LOG2E_FP32,
    }


def rotary_pos_emb_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants of `apply_rotary_pos_emb`, whose steps are those of torch's elementwise ops."""
    steps: dict[str, object] = {
        "forward": "round(round(x cos) + round(rotate_half(x) sin)) in the dtype of x and cos",
        "backward": "round(round(dy cos) + rotate_half^T(round(dy sin)) + 0) in the dtype of x",
    }
    return steps if backend == arch.CPU else steps | {"fp_fusion": TRITON.fp_fusion}


def promoted(dtype: torch.dtype, tables: torch.dtype) -> torch.dtype:
    """Dtype that torch promotes x and its rotary tables to; one of them is fp32 if they differ.

    `torch.promote_types` is an op of torch's dispatcher.
    """
    return dtype if dtype == tables else torch.float32


#: Op -> its contract facts; `contract_facts` has those of the others.
FACTS = {"apply_rotary_pos_emb": rotary_pos_emb_facts}
