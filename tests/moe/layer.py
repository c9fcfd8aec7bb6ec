"""A layer of experts made of the public functions."""

from __future__ import annotations

import torch

import cute_kernels as ck
from tests.contract import RowOp, bits, same_bytes

from .cases import INT32, drawn

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


def with_strays(dtype: torch.dtype, device: str = "cpu", product=ck.grouped_linear) -> None:
    """Replay strays, forward and backward: each token has the bytes of its other slots alone.

    product: in place of `grouped_linear`.
    """
    values = [[0, 2, 5], [1, -1, 0], [9, 3, -7], [4, 4, 4], [2, 0, 1]]
    strays = torch.tensor(values, dtype=INT32, device=device)
    kept = (strays >= 0) & (strays < 4)
    weights = parameters(dtype)
    x, dy, logits = (
        drawn(5, width, seed=width + i, dtype=dtype).to(device)
        for i, width in enumerate((WIDTH, WIDTH, 4))
    )

    def run(indices, *tensors):
        up, down, x, logits, dy = (t.detach().clone().requires_grad_() for t in tensors)
        routing = ck.moe.route(logits, indices.shape[1], indices=indices)
        rows, permutation = ck.moe.permute(x, indices, 4)
        gate, inner = product(rows, up, permutation.offsets).chunk(2, -1)
        rows = product(ck.silu_mul(gate, inner), down, permutation.offsets)
        y = ck.moe.combine(rows, routing.weights, permutation)
        y.backward(dy.detach())
        return y.detach(), x.grad, logits.grad, up.grad, down.grad

    both = weights["up"][:4].to(device), weights["down"][:4].to(device)
    got = run(strays, *both, x, logits, dy)
    assert all(t.isfinite().all() for t in got)
    for token, here in enumerate(kept):
        one = slice(token, token + 1)
        if here.any():
            want = run(strays[one, here], *both, x[one], logits[one], dy[one])
            assert all(same_bytes(t[one], w) for t, w in zip(got[:3], want[:3], strict=True))
        else:
            assert not any(bits(t[token]).any() for t in got[:3])


def row_op() -> RowOp:
    """The layer with a bias and groups."""
    p = parameters(torch.bfloat16)
    options = {"score": "sigmoid", "bias": drawn(EXPERTS, seed=4), "scale": 2.5}
    return RowOp("experts", lambda x: experts(x, p, **options), WIDTH, torch.bfloat16)
