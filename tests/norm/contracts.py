"""Public functions of norm as ops of the battery (tests/contract.py)."""

from __future__ import annotations

import torch

import cute_kernels as ck
from cute_kernels.norm.config import part_rows
from tests.contract import RowOp, SumOp

WIDTH = 104


def _vectors(width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(width)
    weight, bias = (torch.randn(width, generator=g) for _ in range(2))
    return (1 + 0.3 * weight).to(device), bias.to(device)


def row_ops(width: int = WIDTH, dtype=torch.bfloat16, device: str = "cpu") -> list[RowOp]:
    """y, h and dx of both norms; the rows are x, and for dx of dy's too."""
    weight, bias = _vectors(width, device)

    def y_of_rms(rows):
        return ck.rms_norm(rows, weight.to(dtype), offset=1.0)

    def y_of_layer(rows):
        return ck.layer_norm(rows, weight, bias)

    def with_residual(rows):
        return torch.cat(ck.rms_norm(rows, weight, residual=rows * 0.37), 1)

    def gradient(norm):
        def run(rows):
            x = rows.detach().requires_grad_()
            y = norm(x)
            # The cotangent of a row is of that row alone.
            return torch.autograd.grad(y, x, (rows * 0.73).sin())[0]

        return run

    def residuals_gradient(rows):
        x = rows.detach().requires_grad_()
        out = ck.layer_norm(x, weight, bias, residual=rows * 0.37)
        return torch.autograd.grad(out, x, ((rows * 0.73).sin(), rows * 0.5))[0]

    runs = {
        "rms_norm": y_of_rms,
        "layer_norm": y_of_layer,
        "rms_norm residual": with_residual,
        "rms_norm dx": gradient(y_of_rms),
        "layer_norm dx": gradient(y_of_layer),
        "layer_norm residual dx": residuals_gradient,
    }
    return [RowOp(name, run, width, dtype, device) for name, run in runs.items()]


def sum_ops(tokens: int, width: int = WIDTH, dtype=torch.bfloat16, device="cpu") -> list[SumOp]:
    """dweight of both norms and dbias, into main_grads."""
    weight, bias = _vectors(width, device)
    g = torch.Generator().manual_seed(tokens)
    x, dy = (torch.randn(tokens, width, generator=g).to(dtype).to(device) for _ in range(2))

    def of_rms(start, pieces):
        state, parameter = start.clone(), torch.nn.Parameter(weight)
        for piece in pieces:
            ck.rms_norm(x[piece], parameter, main_grad=state).backward(dy[piece])
        assert parameter.grad is None
        return state

    def of_layer(start, pieces):
        states = start.clone(), start.clone() + 1
        parameters = [torch.nn.Parameter(t) for t in (weight, bias)]
        into = {"main_grad": states[0], "bias_main_grad": states[1]}
        for piece in pieces:
            ck.layer_norm(x[piece], *parameters, **into).backward(dy[piece])
        return torch.stack(states)

    start = torch.randn(width, generator=g).to(device)
    cut = part_rows(width)
    return [SumOp(n, f, tokens, start, cut) for n, f in (("rms", of_rms), ("layer", of_layer))]
