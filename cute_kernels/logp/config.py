"""Every constant that the bits of linear_logp depend on, and the configurations of its kernels.

A token's log-probability is ``log2 p = y_t - log2 Σ_v 2^(y_v)`` with ``y = logit · log2(e) / τ``.
The sum is made so that nobody's order can show in it:

    unit    16 neighbours of the vocabulary, from a multiple of 16 on.  M = round(max y); the sum
            s = Σ 2^(y - M) in fp32, added as a tree: v, v + 8; then neighbours 1, 2 and 4 apart.
    sum     Σ_units s 2^M in integers: exact, so that tiles, CTAs, kernels and ranks may add units
            in any order and in any number of parts.

What is below 2^-48 of the largest unit may be left out: all of a vocabulary is 2^-34 of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from .. import arch
from ..contracts import (
    BATCH_INVARIANT,
    RUN_TO_RUN,
    SCHEDULE_INVARIANT,
    SPLIT_INVARIANT,
    TP_INVARIANT,
)
from ..cpu import ieee
from ..schedulers.tiles.leaves import LEAVES

#: Neighbours of the vocabulary whose exponentials are added in fp32.
UNIT = 16
#: Exponents M of one bin of the exact sum, and the bins that are kept: the highest and those below.
BIN = 16
BINS = 4
#: A unit's sum s is the integer s 2^(FRACTION + M mod BIN) of its bin.
FRACTION = 24
#: |y| is clamped to it where exponents are formed; beyond, log-probabilities are NaN.
MAX_EXPONENT = 2**21
#: More than 16 · 2^½, which no unit of finite logits in range comes to.
TOO_MUCH = 32.0
#: 2^y y is 0 for y below.
MIN_POWER = -256.0
#: Bins of 64 bits have room for so many units (docs/linear_logp.md).
MAX_VOCAB = 2**19

#: The highest bin of a row that no unit has reached, and of one that has seen NaN or an overflow.
EMPTY, LOST = -(2**20), 2**20

#: Columns of a state: the highest bin; the sums of it and those below; the chosen logit's bits;
#: for the entropy, sums weighted with y.
TOP, SUMS, CHOSEN, WEIGHTED = 0, 1, 1 + BINS, 2 + BINS

#: Targets that no vocabulary has: masked by ignore_index, and out of range.
MASKED, OUTSIDE = -1, -2

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

#: log2((1 + s) / (1 - s)) = Σ_i c_i s^(2 i + 1), in fp64, for |s| < 0.172; a mantissa's range.
LOG2_SERIES = tuple(2.0 / LN2 / (2 * i + 1) for i in range(11))
SQRT_HALF = 0.5**0.5

ORDERS = ("chain", "tree")
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_OF_A_HEAD = frozenset({RUN_TO_RUN, BATCH_INVARIANT, SPLIT_INVARIANT, TP_INVARIANT})
_OF_LOGITS = frozenset({RUN_TO_RUN, BATCH_INVARIANT})
_ON_GPUS = frozenset({SCHEDULE_INVARIANT})
#: Op -> backend -> what it keeps.
KEPT: Mapping[str, Mapping[str, frozenset[str]]] = {
    "linear_logp": {
        arch.CUTE_SM90: _OF_A_HEAD | _ON_GPUS,
        arch.TRITON: _OF_A_HEAD | _ON_GPUS,
        arch.CPU: _OF_A_HEAD,
    },
    "log_probs": {arch.TRITON: _OF_LOGITS | _ON_GPUS, arch.CPU: _OF_LOGITS},
    "linear_policy_loss": {
        arch.CUTE_SM90: _OF_LOGITS | _ON_GPUS,
        arch.TRITON: _OF_LOGITS | _ON_GPUS,
        arch.CPU: _OF_LOGITS,
    },
}


def columns_of_state(entropy: bool) -> int:
    """Number of int64 columns of a token's state."""
    return WEIGHTED + BINS * entropy


@dataclass(frozen=True)
class Config:
    """One compiled SM90 kernel on tiles of tokens by vocabulary.

    ``softcap``: whether logits are capped.  ``entropy``: whether it, or its gradient, is asked for.
    ``keep``: whether the forward stores the logits' sums over D.
    """

    dtype: str
    order: str
    bias: bool
    softcap: bool
    entropy: bool
    tile_n: int = 256
    tile_m: int = 128
    tile_k: int = 64
    cluster_m: int = 2
    keep: bool = False


@dataclass(frozen=True)
class FewConfig:
    """One compiled SM90 kernel for few tokens: tiles of ``tile_n`` entries by ``tile_m`` tokens.

    The others are those of `Config`.  ``ctas_per_sm``: that many rings of loads under way on an SM.
    """

    dtype: str
    order: str
    bias: bool
    softcap: bool
    entropy: bool
    tile_m: int
    tile_n: int = 64
    tile_k: int = 128
    ctas_per_sm: int = 2


@dataclass(frozen=True)
class FinishConfig:
    """The compiled SM90 kernel that states of a vocabulary's runs end in: a warp for a token."""

    entropy: bool
    warps: int = 4


@dataclass(frozen=True)
class CpuPlan:
    """The CPU backend's 2^f, and blocks of its backward.

    dHidden: the vocabulary in blocks of ``columns``, ascending, each a product that is added.
    """

    exp2: tuple[float, ...] = ieee.EXP2
    columns: int = 1024


CPU = CpuPlan()


def contract_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that a contract id covers, besides the products' own plan."""
    common: dict[str, object] = {
        "unit": UNIT,
        "unit_sum": "v + 8, then 1, 2, 4 apart",
        "bins": (BIN, BINS, FRACTION),
        "orders": ORDERS,
        "leaves": {"at most": LEAVES, "of": f"16 ceil(V / {16 * LEAVES})", "in": "dHidden of tree"},
        "gradient of logits": "rounded to the dtype of hidden",
    }
    if backend == arch.CPU:
        return common | {"cpu": asdict(CPU), "threads": device.threads}
    return common | {"exp2": "v_exp_f32" if device.arch.startswith("gfx") else "ex2.approx.ftz"}


def policy_plan(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that the bits of `linear_policy_loss` depend on: those of the head, and its own."""
    return contract_facts(backend, device) | {
        "exp of a loss": ieee.EXP2,
        "losses": 1,
        "sum of losses": "fp64, each half onto half",
    }
