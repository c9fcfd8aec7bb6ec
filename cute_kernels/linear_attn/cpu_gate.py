"""CPU backend of `op_gate`: fp64 inside, one IEEE operation at a time, one rounding at the end.

1 / √(Σ x² + eps) of a row is rounded to fp32.
"""

from __future__ import annotations

import torch

from ..cpu import elementary
from ..cpu.ieee import halves, ieee
from .config import SOFTPLUS_LINEAR
from .cpu import add_chunks
from .tensors import Gate, GateGradients, Sequences


def l2norm(x: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Write x / √(Σ x² + eps) of rows [N, H, K] to out."""
    with ieee():
        x = x.double()
        out.copy_(x * _rstd(x, eps))


def l2norm_backward(dy: torch.Tensor, x: torch.Tensor, eps: float, dx: torch.Tensor) -> None:
    """Write dx [N, H, K] of `l2norm`."""
    with ieee():
        x, dy = x.double(), dy.double()
        rstd = _rstd(x, eps)
        x_hat = x * rstd
        dx.copy_((dy - x_hat * halves(dy * x_hat, -1)[..., None]) * rstd)


def _rstd(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / √(Σ x² + eps), rounded to fp32: a root is an ulp of fp64 off in some vector libraries."""
    return (1.0 / (halves(x * x, -1) + eps).sqrt()[..., None]).float().double()


def decay_gate(
    gate: Gate, sequences: Sequences, lower_bound: float | None, out: torch.Tensor
) -> None:
    """Write g [N, C] = -e^A_log softplus(a + dt_bias), or lower_bound sigmoid(e^A_log (a + ...)).

    Rows of no sequence are 0.
    """
    out.zero_()
    end = sequences.bounds()[-1][1]
    with ieee():
        out[:end] = _values(gate, lower_bound, 0, end)[0]


def decay_gate_backward(
    dg: torch.Tensor,
    gate: Gate,
    sequences: Sequences,
    lower_bound: float | None,
    gradients: GateGradients,
) -> None:
    """Make the gradients of `decay_gate` from dg [N, C]; da of rows of no sequence is 0."""
    da, into_A_log, into_dt_bias = gradients
    if da is not None:
        da.zero_()
    with ieee():
        for first, end in sequences.bounds():
            _, slope, of_A_log = _values(gate, lower_bound, first, end)
            upstream = dg[first:end].double()
            if da is not None:
                da[first:end] = upstream * slope
            if into_A_log is not None:
                terms = (upstream * of_A_log).unflatten(1, (len(gate.A_log), -1))
                add_chunks(into_A_log, halves(terms, 2))
            if into_dt_bias is not None:
                add_chunks(into_dt_bias, upstream * slope)


def _values(
    gate: Gate, lower_bound: float | None, first: int, end: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(g, dg/da, dg/dA_log) of rows, fp64."""
    x = gate.a[first:end].double()
    if gate.dt_bias is not None:
        x = x + gate.dt_bias.double()
    rate = elementary.exp(gate.A_log.double()).repeat_interleave(x.shape[1] // len(gate.A_log))
    if lower_bound is not None:
        slope = elementary.derivative("sigmoid", rate * x) * lower_bound * rate
        return elementary.value("sigmoid", rate * x) * lower_bound, slope, slope * x
    soft = torch.where(x > SOFTPLUS_LINEAR, x, elementary.softplus(x))
    g = -rate * soft
    return g, -rate * elementary.value("sigmoid", x), g
