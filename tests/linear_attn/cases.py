"""Calls of the convolution and of what comes before the delta rule: a batch or a pack."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from cute_kernels.linear_attn.tensors import Gate, GateGradients, Sequences
from cute_kernels.runtime import dispatch, plan_cache
from tests.runtime.cached_calls import drawn

BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """One call; ``lengths``: of a pack's sequences, or one number of a batch of ``batch``."""

    lengths: tuple[int, ...]
    batch: int = 0
    channels: int = 40
    width: int = 4
    dtype: torch.dtype = BF16
    bias: bool = True
    initial: bool = True
    silu: bool = True
    behind: int = 0  # rows behind the last sequence of a pack
    each: int = 1  # channels of a gate's head
    bound: float | None = None  # of a gate

    @property
    def rows(self) -> int:
        return self.batch * self.lengths[0] if self.batch else sum(self.lengths) + self.behind

    @property
    def count(self) -> int:
        return self.batch or len(self.lengths)

    @property
    def offsets(self) -> torch.Tensor | None:
        """cu_seqlens of a pack."""
        if self.batch:
            return None
        return torch.tensor([0, *self.lengths]).cumsum(0).int()

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.rows, self.lengths[0] if self.batch else 0, self.offsets)


class Operands(NamedTuple):
    """Rows [N, D] of a call, its parameters and states, and the gradient of its result."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    initial: torch.Tensor | None
    dy: torch.Tensor


def operands(case: Case, seed: int = 0) -> Operands:
    d, dtype = case.channels, case.dtype
    return Operands(
        drawn(case.rows, d, seed=seed, dtype=dtype),
        drawn(d, case.width, seed=seed + 1, dtype=dtype),
        drawn(d, seed=seed + 2, dtype=dtype) if case.bias else None,
        drawn(case.count, d, case.width - 1, seed=seed + 3, dtype=dtype) if case.initial else None,
        drawn(case.rows, d, seed=seed + 4, dtype=dtype),
    )


CASES = {
    "batch": Case((21,), batch=2),
    "batch, two chunks": Case((70,), batch=2, initial=False),
    "pack": Case((5, 0, 66, 1, 130), behind=3),
    "plain": Case((9,), batch=1, bias=False, initial=False, silu=False),
    "width 2": Case((3, 70), width=2, dtype=FP32),
    "width 3": Case((67,), batch=1, width=3, channels=130, dtype=torch.float16),
}


@contextlib.contextmanager
def one_sum_a_micro_batch(module: ModuleType, name: str, *summed: str) -> Iterator[None]:
    """While it lasts, a backward adds one fp32 sum of each call to these gradients."""
    true = getattr(module, name)

    def mutant(*args):
        *inputs, gradients = args
        into = {field: getattr(gradients, field) for field in summed}
        totals = {field: torch.zeros_like(t) for field, t in into.items()}
        true(*inputs, gradients._replace(**totals))
        for field, t in into.items():
            t += totals[field]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, mutant)
        dispatch.forget()
        plan_cache.clear()
        yield
    dispatch.forget()
    plan_cache.clear()


# ---- the ops before the gated delta rule ---------------------------------------------------------

#: Inputs of a gate at the ends of its formulas.
SPECIAL = (float("-inf"), -100.0, -20.0, -1e-3, 0.0, 1e-3, 19.5, 20.5, 30.0, 300.0)
#: K of rows of l2norm.
WIDTHS = (8, 24, 64, 128, 200, 256)
GATES = {
    "batch": Case((21,), batch=2, channels=6),
    "two chunks": Case((70,), batch=2, channels=3, bias=False, dtype=FP32),
    "pack": Case((5, 0, 66, 1, 130), channels=6, behind=3),
    "many heads": Case((3, 2), channels=70, dtype=torch.float16),
    "channels": Case((5, 0, 66, 1, 130), channels=3, behind=3, each=24),
    "bounded": Case((70,), batch=2, channels=3, dtype=FP32, each=16, bound=-5.0),
    "bounded heads": Case((3, 70), channels=6, bound=-5.0, bias=False),
}


class GateOperands(NamedTuple):
    """Rows [N, C] of a decay, its parameters, and the gradient of its result."""

    a: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor | None
    dg: torch.Tensor


def gate_operands(case: Case, seed: int = 0) -> GateOperands:
    """Rows of which some elements are `SPECIAL`."""
    h, channels, dtype = case.channels, case.channels * case.each, case.dtype
    a = drawn(case.rows, channels, seed=seed, dtype=FP32) * 6
    flat, special = a.view(-1)[3::7], torch.tensor(SPECIAL)
    if case.bound is not None:  # a slope of 0, times x
        special = special.clamp(min=-300)
    flat[: len(SPECIAL)] = special[: len(flat)]
    dt_bias = drawn(channels, seed=seed + 2, dtype=FP32) if case.bias else None
    dg = drawn(case.rows, channels, seed=seed + 3, dtype=FP32)
    return GateOperands(a.to(dtype), drawn(h, seed=seed + 1, dtype=dtype), dt_bias, dg)


def decay(launch, case: Case, o: GateOperands, sums=None) -> list[torch.Tensor]:
    """Results of both passes of launchers of the decay: g, da, dA_log, d_dt_bias."""
    call = Gate(*o[:3]), case.sequences, case.bound
    g, da = torch.full_like(o.dg, float("nan")), torch.full_like(o.a, float("nan"))
    launch.decay_gate(*call, g)
    if sums is None:
        sums = torch.zeros(case.channels), torch.zeros(case.channels * case.each)
    into = sums if o.dt_bias is not None else (sums[0], None)
    launch.decay_gate_backward(o.dg, *call, GateGradients(da, *into))
    return [g, da, *sums]


def l2norm(launch, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Results of both passes of launchers of l2norm, of rows [N, H, K]: y, dx."""
    y, dx = (torch.full(x.shape, float("nan"), dtype=x.dtype) for _ in range(2))
    launch.l2norm(x, 1e-6, y)
    launch.l2norm_backward(dy, x, 1e-6, dx)
    return [y, dx]


def norm_rows(width: int, dtype: torch.dtype = BF16, rows: int = 7, heads: int = 3):
    """(x, dy) [N, H, K] of l2norm: a slice of wider rows, some of them near 0."""
    wide = drawn(rows, (heads + 2) * width, seed=width, dtype=dtype)
    x = wide[:, width:-width].view(rows, heads, width)
    x[1] *= 2.0**-12
    x[2, 0] = 0
    return x, drawn(rows, heads, width, seed=width + 1, dtype=dtype)
