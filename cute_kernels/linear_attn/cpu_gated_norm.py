"""CPU backend of gated_rms_norm: fp64 inside, one IEEE operation at a time, one rounding.

Sums over a group and over the rows of a part are made by halving; every operation is elementwise.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ..cpu import elementary
from ..cpu.ieee import halves, ieee
from .config import group_part_rows
from .tensors import Gated, GatedGradients, GatedRule


def gated_norm(operands: Gated, rule: GatedRule, y: torch.Tensor, rstd: torch.Tensor) -> None:
    """Write y [M, D] and 1 / √(mean of squares + eps) [M, D / group_size] of what is normalised."""
    with ieee():
        x, weight, value = _widened(operands, rule)
        normed = x if rule.norm_before_gate else x * value
        # halves works within a dimension: each group has its own tree, a function of its size.
        squares = halves(_by_group(normed * normed, rule), 2)
        rstd.copy_(1.0 / (squares / rule.group_size + rule.eps).sqrt())
        out = normed * _spread(rstd, rule)
        if weight is not None:
            out = out * weight
        y.copy_(out * value if rule.norm_before_gate else out)


def gated_norm_backward(
    dy: torch.Tensor,
    operands: Gated,
    rule: GatedRule,
    rstd: torch.Tensor,
    gradients: GatedGradients,
) -> None:
    """Make the gradients of `gated_norm` from dy [M, D]."""
    dx, into, d_gate = gradients
    with ieee():
        x, weight, value = _widened(operands, rule)
        dy, spread = dy.double(), _spread(rstd, rule)
        hat = (x if rule.norm_before_gate else x * value) * spread
        if into is not None:
            _add_parts(dy * hat * value if rule.norm_before_gate else dy * hat, rule, into)
        weighted = dy if weight is None else dy * weight
        g = weighted * value if rule.norm_before_gate else weighted
        mean = halves(_by_group(g * hat, rule), 2) / rule.group_size
        of_normed = (g - hat * _spread(mean, rule)) * spread
        if dx is not None:
            dx.copy_(of_normed if rule.norm_before_gate else of_normed * value)
        if d_gate is not None:
            slope = elementary.derivative(rule.activation, operands.gate.double())
            d_gate.copy_((weighted * hat if rule.norm_before_gate else of_normed * x) * slope)


def _widened(
    operands: Gated, rule: GatedRule
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(x, weight, the gate's activation) in fp64, row-major."""
    x, weight, gate = operands
    value = elementary.value(rule.activation, gate.double().contiguous())
    return x.double().contiguous(), None if weight is None else weight.double(), value


def _by_group(t: torch.Tensor, rule: GatedRule) -> torch.Tensor:
    """[M, D] as [M, groups, group_size]."""
    return t.view(t.shape[0], -1, rule.group_size)


def _spread(t: torch.Tensor, rule: GatedRule) -> torch.Tensor:
    """[M, groups] as [M, D] in fp64."""
    return t.double().repeat_interleave(rule.group_size, 1)


def _add_parts(t: torch.Tensor, rule: GatedRule, into: torch.Tensor) -> None:
    """Add the rows of t [M, D] to into [D]: each part's sum from zero, parts ascending."""
    m, width = t.shape
    rows = group_part_rows(rule.group_size)
    for part in halves(pad(t, (0, 0, 0, -m % rows)).view(-1, rows, width), 1):
        into += part.float()
