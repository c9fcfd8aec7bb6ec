"""Launches of the gated delta rule, for the tests of its kernels on GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.linear_attn import cpu_delta
from cute_kernels.linear_attn.op_delta import RULE
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
    saved = saved_of(given, o, on_cpu=launch is cpu_delta)
    out = torch.full_like(o.v, float("nan"))
    final = torch.full((given.count, given.heads[1], *given.sizes), float("nan"))
    launch.delta_rule(o, given.sequences, SCALE, out, Last(final, lag), saved)
    return Forward(out, final, saved)


def saved_of(given: Case, o: DeltaRule, on_cpu: bool = False) -> DeltaSaved:
    """Tensors for what a forward saves, not written."""
    shape = (given.batch, given.lengths[0]) if given.batch else (1, given.rows)
    rows = o._replace(**{n: getattr(o, n).unflatten(0, shape) for n in RULE.of_rows})
    return RULE.saved_tensors(rows, given.sequences.slots(RULE.chunk), on_cpu)


def backward(launch, given: Case, o: DeltaRule, of: Forward, slopes=None) -> DeltaGradients:
    d_out, d_final = upstream(given) if slopes is None else slopes
    into = (None if t is None else torch.full_like(t, float("nan")) for t in o)
    gradients = DeltaGradients(*into)
    launch.delta_rule_backward(d_out, d_final, o, given.sequences, SCALE, of.saved, gradients)
    return gradients
