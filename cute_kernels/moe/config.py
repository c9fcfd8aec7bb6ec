"""Every constant that the bits of mixtures of experts depend on, and the guarantees kept.

A grouped product has the order of ``ck.linear``: `plan` contains that op's plan.  Nothing here
reads a number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from .. import arch, contracts
from ..contracts import BATCH_INVARIANT, RUN_TO_RUN, SCHEDULE_INVARIANT, SPLIT_INVARIANT
from .triton.plan import ROUTING

#: Orders of the sums of grouped products: those of ``ck.linear``.
ORDER, TREE = ORDERS = ("chain", "tree")
#: Epilogues of kernel_grouped_tree_sm90.
TREE_EPILOGUES = ("plain", "bias", "leaves")
SOFTMAX, SIGMOID = "softmax", "sigmoid"
#: How `route` makes scores of logits.
SCORES = (SOFTMAX, SIGMOID)
#: A sum of weights is divided by after this is added, so that no weight is 0 / 0.
EPSILON = 1e-20
#: Columns of a row of which one lane adds every LANES-th, for the gradient of a weight.
LANES = 256
#: Best scores of a group whose sum ranks it, where there is a bias; without one, its best score.
GROUP_BEST = 2

#: Experts, at most: a program holds a number for each.
MAX_EXPERTS = 1024
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class GroupedConfig:
    """One compiled SM90 kernel of grouped products.

    ``b_major``: ``"k"`` where the reduction dimension of each expert's weight is contiguous, else
    ``"mn"``.  ``cluster_n``: CTAs with neighbouring columns that share the tile of A.
    """

    dtype: str
    b_major: str
    bias: bool
    tile_n: int = 256
    tile_m: int = 128
    tile_k: int = 64
    raster_group: int = 8
    cluster_n: int = 2


@dataclass(frozen=True)
class GroupedFewConfig:
    """One compiled SM90 kernel for few rows an expert.

    Tiles of ``tile_n`` rows of the weight by ``tile_m`` tokens.  ``w_major``: as ``b_major`` in
    `GroupedConfig`.
    """

    dtype: str
    w_major: str
    bias: bool
    tile_m: int
    tile_n: int = 64
    tile_k: int = 128


@dataclass(frozen=True)
class GroupedTreeConfig:
    """One compiled SM90 kernel of grouped products in the order ``tree``.

    ``epilogue``: of `TREE_EPILOGUES`; ``"leaves"`` stores each in fp32, the others add them.
    ``b_major``: as in `GroupedConfig`.
    """

    dtype: str
    b_major: str
    epilogue: str
    tile_n: int = 192
    tile_m: int = 128
    tile_k: int = 64
    raster_group: int = 8
    #: No CTAs share tiles.
    cluster_n: ClassVar[int] = 1


@dataclass(frozen=True)
class GroupedDwConfig:
    """One compiled SM90 kernel of the weights' gradients.

    ``accumulate``: The accumulator starts from an fp32 tensor that is updated in place.
    ``cluster_m``: CTAs with neighbouring rows of dW that share the tile of B.
    """

    dtype: str
    accumulate: bool
    tile_n: int = 256
    tile_m: int = 128
    tile_k: int = 64
    raster_group: int = 8
    cluster_m: int = 2


_ON_CPU = frozenset({RUN_TO_RUN, BATCH_INVARIANT})
_ON_GPU = _ON_CPU | {SCHEDULE_INVARIANT}

#: Of ``ck.grouped_linear``.
KEPT: Mapping[str, frozenset[str]] = {
    arch.CUTE_SM90: _ON_GPU | {SPLIT_INVARIANT},
    arch.TRITON: _ON_GPU | {SPLIT_INVARIANT},
    arch.CPU: _ON_CPU | {SPLIT_INVARIANT},
}
#: Of ``ck.moe``.
KEPT_ROUTING: Mapping[str, frozenset[str]] = {arch.TRITON: _ON_GPU, arch.CPU: _ON_CPU}


def contract_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that the contract id of ``grouped_linear`` covers."""
    of_linear = contracts.facts_of("linear", backend, device)
    rows = {"product": of_linear, "groups": "by offsets"}
    if backend == arch.CUTE_SM90:
        # dbias is Triton's there.
        triton = contracts.facts_of("linear", arch.TRITON, device)
        return rows | {"dbias": triton["column_sum"]}
    return rows


def routing_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that the contract id of ``moe`` covers."""
    common: dict[str, object] = {
        "scores": [
            contracts.facts_of(SOFTMAX, backend, device),
            contracts.facts_of(SIGMOID, backend, device),
        ],
        "choice": "scores + bias in fp32, descending; ties: the lowest index",
        "groups": {"best": GROUP_BEST, "without a bias": 1},
        "weights": {"sum": "experts ascending", "epsilon": EPSILON},
        "slot weights": {"sum": "slots by halves", "epsilon": 0},
        "combine": "experts ascending, product and sum rounded to fp32, one rounding",
        "losses": {
            "tokens": _column_sum(contracts.facts_of("linear", backend, device)),
            "experts": "halves",
            "logarithm": contracts.facts_of("log_softmax", backend, device),
        },
        "weight gradient": {"lanes": LANES, "order": "halves"},
    }
    if backend == arch.TRITON:
        return common | {"fp_fusion": ROUTING.fp_fusion}
    return common


def _column_sum(linear: Mapping[str, object]) -> dict[str, object]:
    """Order of a sum over tokens, of the plan of ``ck.linear``."""
    if "column_sum" in linear:
        return dict(linear["column_sum"])
    return {name: value for name, value in linear["blocks"].items() if name.startswith("sum_")}
