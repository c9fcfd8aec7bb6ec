"""A layer of experts made of the public functions."""

from __future__ import annotations

import torch

import cute_kernels as ck
from tests.contract import RowOp

from .cases import drawn

WIDTH, EXPERTS, K, INNER = 40, 7, 3, 24


def parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "router": drawn(EXPERTS, WIDTH, seed=1, dtype=dtype),
        "up": drawn(EXPERTS, 2 * INNER, WIDTH, seed=2, dtype=dtype),
        "down": drawn(EXPERTS, WIDTH, INNER, seed=3, dtype=dtype),
    }


def experts(x: torch.Tensor, p: dict[str, torch.Tensor], **options) -> torch.Tensor:
    """y [T, D] of x [T, D]; options: of `route`."""
    logits = ck.linear(x, p["router"])
    routing = ck.moe.route(logits, K, **options)
    rows, permutation = ck.moe.permute(x, routing.indices, EXPERTS)
    gate, up = ck.grouped_linear(rows, p["up"], permutation.offsets).chunk(2, -1)
    rows = ck.grouped_linear(ck.silu_mul(gate, up), p["down"], permutation.offsets)
    return ck.moe.combine(rows, routing.weights, permutation)


def row_op() -> RowOp:
    """The layer with a bias and groups."""
    p = parameters(torch.bfloat16)
    options = {"score": "sigmoid", "bias": drawn(EXPERTS, seed=4), "scale": 2.5}
    return RowOp("experts", lambda x: experts(x, p, **options), WIDTH, torch.bfloat16)
