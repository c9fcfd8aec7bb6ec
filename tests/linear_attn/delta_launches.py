"""Launches of the gated delta rule, for the tests of its kernels on GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.linear_attn import cpu_delta, op_delta
from cute_kernels.linear_attn.tensors import DeltaGradients, DeltaRule, DeltaSaved, Last

from .delta_cases import Case, operands, upstream

#: They multiply; sums of one number and zeros have one result in any order.  K of 128 spills.
ALLOWED = {"matrix instruction", "a sum in the order of the compiler", "spills"}
SCALE = 0.25


class Forward(NamedTuple):
    """Results of a forward: o, the last states, what is saved."""

    out: torch.Tensor
    final: torch.Tensor
    saved: DeltaSaved


def slow(given: Case) -> DeltaRule:
    """Operands whose gates let rows of other blocks count."""
    o = operands(given)
    return o._replace(g=o.g * 0.05)


def forward(launch, given: Case, o: DeltaRule, lag: int = -1) -> Forward:
    k, v, g = (t.unflatten(0, (1, -1)) for t in (o.k, o.v, o.g))
    rows = given.rows if given.batch == 0 else given.batch * given.lengths[0]
    assert rows == len(o.v)
    saved = op_delta._saved(*batched(given, k, v, g), given.offsets, on_cpu=launch is cpu_delta)
    out = torch.full_like(o.v, float("nan"))
    final = torch.full((given.count, given.heads[1], *given.sizes), float("nan"))
    launch.delta_rule(o, given.sequences, SCALE, out, Last(final, lag), saved)
    return Forward(out, final, saved)


def batched(given: Case, *rows: torch.Tensor) -> list[torch.Tensor]:
    shape = (given.batch, given.lengths[0]) if given.batch else (1, given.rows)
    return [t[0].unflatten(0, shape) for t in rows]


def backward(launch, given: Case, o: DeltaRule, of: Forward, slopes=None) -> DeltaGradients:
    d_out, d_final = upstream(given) if slopes is None else slopes
    into = (None if t is None else torch.full_like(t, float("nan")) for t in o)
    gradients = DeltaGradients(*into)
    launch.delta_rule_backward(d_out, d_final, o, given.sequences, SCALE, of.saved, gradients)
    return gradients
