"""Every constant that the bits of rowwise depend on, and the guarantees it keeps.

A sum over a row, and a sum of squares, is made of lanes.  Lane l of L adds the elements l, l + L,
l + 2 L, ..., ascending; then the upper half of the lanes is added to the lower half, again and
again.  L is the power of two at or above the width, from 2 to LANES: a function of the width alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import arch
from ..contracts import BATCH_INVARIANT, RUN_TO_RUN, SCHEDULE_INVARIANT, SPLIT_INVARIANT
from ..cpu.elementary import (
    COS,
    ERFC,
    ERFC_FP32,
    ERFC_MIDDLE,
    ERFC_MOST,
    EXP2,
    GELU_CUBE,
    GELU_SCALE,
    HALF_PI,
    LOG2E_FP32,
    LOG_SERIES,
    SIN,
    TANH,
    TANH_SMALL,
)
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
