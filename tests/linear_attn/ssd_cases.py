"""Calls of the state space scan: a batch or a pack, with states and several heads to a group."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.linear_attn.tensors import StateSpace, StepOptions
from tests.oracles import linear_attn as oracle
from tests.runtime.cached_calls import drawn

from . import cases

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")


class Case(NamedTuple):
    """One call; ``lengths``: of a pack's sequences, or one number of a batch of ``batch``."""

    lengths: tuple[int, ...]
    batch: int = 0
    heads: tuple[int, int] = (2, 4)  # groups and heads
    sizes: tuple[int, int] = (16, 24)  # P and N
    dtype: torch.dtype = BF16
    dt: torch.dtype = BF16
    skip: int = 1  # dimensions of D; 0: none
    gate: bool = True
    bias: bool = True
    initial: bool = True
    softplus: bool = True
    limit: tuple[float, float] = (0.02, 2.0)
    behind: int = 0  # rows behind the last sequence of a pack

    rows, count = cases.Case.rows, cases.Case.count
    offsets, sequences = cases.Case.offsets, cases.Case.sequences

    @property
    def options(self) -> StepOptions:
        return StepOptions(self.softplus, *self.limit)


def operands(case: Case, seed: int = 0) -> StateSpace:
    """Rows [N, ...]: steps below, inside and above the limits, some of 25; decays down to e^-50."""
    (groups, heads), (size, state), n = case.heads, case.sizes, case.rows
    B, C = (drawn(n, groups, state, seed=seed + i, dtype=FP32) * state**-0.5 for i in (1, 2))
    dt = drawn(n, heads, seed=seed + 3, dtype=FP32) - 1.0
    if not case.softplus:
        dt = dt.abs() * 0.2
    dt[::13], dt[1::11] = -9.0, 25.0
    D = drawn(*(heads, size)[: case.skip], seed=seed + 5) if case.skip else None
    rows = [drawn(n, heads, size, seed=seed + i, dtype=case.dtype) for i in (0, 6)]
    return StateSpace(
        rows[0],
        dt.to(case.dt),
        -drawn(heads, seed=seed + 4, dtype=FP32).exp2(),
        B.to(case.dtype),
        C.to(case.dtype),
        D,
        rows[1] if case.gate else None,
        drawn(heads, seed=seed + 7, dtype=FP32) if case.bias else None,
        drawn(case.count, heads, size, state, seed=seed + 8, dtype=FP32) if case.initial else None,
    )


def upstream(case: Case, seed: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows and of the last states."""
    heads, sizes = case.heads[1], case.sizes
    d_out = drawn(case.rows, heads, sizes[0], seed=seed, dtype=case.dtype)
    return d_out, drawn(case.count, heads, *sizes, seed=seed + 1, dtype=FP32)


def exact(
    case: Case, o: StateSpace
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """(out, last states, float64 leaves) by the recurrence, sequence by sequence."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in o]
    x, dt, A, B, C, D, z, dt_bias, initial = leaves
    outs, lasts = [], []
    for s, (first, end) in enumerate(case.sequences.bounds()):
        state = x.new_zeros(case.heads[1], *case.sizes) if initial is None else initial[s]
        rows = [t[first:end] for t in (x, dt, B, C)]
        gate = None if z is None else z[first:end]
        out, last = oracle.state_space(*rows, A, D, gate, dt_bias, state, case.options)
        outs.append(out)
        lasts.append(last)
    return torch.cat(outs), torch.stack(lasts), leaves


CASES = {
    "batch": Case((140,), batch=2),
    "plain": Case(
        (9,), batch=3, heads=(1, 1), sizes=(8, 8), skip=0, gate=False, bias=False, initial=False,
        softplus=False, limit=(0.0, INF),
    ),
    "pack": Case((5, 0, 130, 1, 260), behind=3, skip=2),
    "fp32": Case((129,), batch=1, dtype=FP32, dt=FP32, sizes=(32, 8), gate=False, softplus=False),
    "fp16": Case((3, 128), dtype=FP16, dt=FP32, heads=(2, 2), sizes=(40, 16), bias=False),
}  # fmt: skip
