"""Calls of gated_rms_norm."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.linear_attn.tensors import Gated, GatedGradients, GatedRule
from tests.oracles.error_bounds import Near
from tests.runtime.cached_calls import drawn

BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """One call; ``dtype``: of rows, ``weight``: of the weight, or None without one;
    ``scale``: of the gate."""

    rows: int
    width: int
    norm_before_gate: bool = True
    groups: int = 1
    activation: str = "silu"
    dtype: torch.dtype = BF16
    weight: torch.dtype | None = BF16
    scale: float = 2.0

    @property
    def rule(self) -> GatedRule:
        return GatedRule(self.activation, 1e-5, self.norm_before_gate, self.width // self.groups)


class Operands(NamedTuple):
    """Rows [M, D] of a call, its weight, and the gradient of its result."""

    x: torch.Tensor
    weight: torch.Tensor | None
    gate: torch.Tensor
    dy: torch.Tensor

    @property
    def gated(self) -> Gated:
        return Gated(*self[:3])


def operands(case: Case, seed: int = 0) -> Operands:
    x, gate, dy = (drawn(case.rows, case.width, seed=seed + i, dtype=case.dtype) for i in range(3))
    weight = None
    if case.weight is not None:
        weight = (1 + 0.3 * drawn(case.width, seed=seed + 3, dtype=FP32)).to(case.weight)
    return Operands(x, weight, case.scale * gate, dy)


def run(launch, case: Case, o: Operands, main: torch.Tensor | None = None) -> list[torch.Tensor]:
    """[y, dx, dgate, dweight] of both passes by a backend's functions; dweight is added to main."""
    nan = float("nan")
    y, dx, d_gate = (
        torch.full_like(o.x, nan, memory_format=torch.contiguous_format) for _ in "123"
    )
    rstd = torch.full((case.rows, case.groups), nan)
    launch.gated_norm(o.gated, case.rule, y, rstd)
    if o.weight is not None and main is None:
        main = torch.zeros(case.width)
    gradients = GatedGradients(dx, main, d_gate)
    launch.gated_norm_backward(o.dy, o.gated, case.rule, rstd, gradients)
    return [y, dx, d_gate, *([] if main is None else [main])]


def share(got: torch.Tensor, want: Near) -> float:
    """The largest error in parts of its bound."""
    value, bound = want.stored(got.dtype)
    return ((got.detach().double() - value).abs() / bound).nan_to_num(nan=1e9).max().item()


CASES = {
    "heads": Case(70, 64),
    "norm first, groups": Case(9, 96, groups=2, dtype=torch.float16, weight=FP32),
    "gate first": Case(5, 48, False, dtype=FP32, weight=FP32),
    "gate first, groups": Case(6, 72, False, 3),
    "sigmoid": Case(3, 33, activation="sigmoid"),
    "gate first, sigmoid, no weight": Case(3, 40, False, activation="sigmoid", weight=None),
    "wide": Case(2, 1030, False),
    "large gates": Case(3, 64, False, dtype=FP32, weight=FP32, scale=20.0),
}
