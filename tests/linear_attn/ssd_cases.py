"""Calls of the scans: a batch or a pack, with states and several heads to a group."""

from __future__ import annotations

from typing import NamedTuple

import torch

import cute_kernels as ck
from cute_kernels.linear_attn import op_selective, op_ssd
from cute_kernels.linear_attn.tensors import StateSpace, StepOptions
from tests.oracles import linear_attn as oracle
from tests.runtime.cached_calls import drawn

from . import cases

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")
NAMES = StateSpace._fields
ROWS, SUMMED = ("x", "dt", "B", "C", "z"), ("A", "D", "dt_bias")
#: Whether a scan is Mamba-1's -> (its function, its names of `NAMES`, rows of a chunk).
SCANS = {
    False: ("mamba_chunk_scan_combined", (*NAMES[:-1], "initial_states"), 128),
    True: (
        "selective_scan",
        ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"),
        32,
    ),
}


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
    selective: bool = False  # Mamba-1's scan: heads are its channels, of P = 1

    rows, count = cases.Case.rows, cases.Case.count
    offsets, sequences = cases.Case.offsets, cases.Case.sequences

    @property
    def op(self):
        return (op_selective if self.selective else op_ssd).SCAN

    @property
    def launcher(self) -> str:
        return self.op.entry

    @property
    def of_heads(self) -> tuple[str, ...]:
        """Operands of heads."""
        return tuple(name for name in NAMES if name not in ("B", "C"))

    @property
    def public(self) -> tuple[str, tuple[str, ...]]:
        """The public function, and its names of operands."""
        return SCANS[self.selective][:2]

    @property
    def flags(self) -> dict[str, object]:
        if self.selective:
            return {"delta_softplus": self.softplus, "return_last_state": True}
        limits = {"dt_softplus": self.softplus, "dt_limit": self.limit}
        return limits | {"return_final_states": True}

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
    row, rates = ((heads,), (heads, state)) if case.selective else ((heads, size), (heads,))
    rows = [drawn(n, *row, seed=seed + i, dtype=case.dtype) for i in (0, 6)]
    return StateSpace(
        rows[0],
        dt.to(case.dt),
        -drawn(*rates, seed=seed + 4, dtype=FP32).exp2(),
        B.to(case.dtype),
        C.to(case.dtype),
        D,
        rows[1] if case.gate else None,
        drawn(heads, seed=seed + 7, dtype=FP32) if case.bias else None,
        drawn(case.count, *row, state, seed=seed + 8, dtype=FP32) if case.initial else None,
    )


def upstream(case: Case, seed: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows and of the last states."""
    row = (case.heads[1], case.sizes[0])[: 1 if case.selective else 2]
    d_out = drawn(case.rows, *row, seed=seed, dtype=case.dtype)
    return d_out, drawn(case.count, *row, case.sizes[1], seed=seed + 1, dtype=FP32)


def given(case: Case, o) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """(Leaves by name, rows as [B, T, ...] or [B, ..., T]; other arguments) of a call."""
    leaves = {name: t for name, t in o._asdict().items() if t is not None}
    leaves |= {name: laid(case, t) for name, t in leaves.items() if name in case.op.of_rows}
    others = {"cu_seqlens": case.offsets} | case.flags
    return {name: t.detach().requires_grad_() for name, t in leaves.items()}, others


def laid(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """Rows [N, ...] in the layout of a call; one group of Mamba-1's B and C has no dimension."""
    t = rows.unflatten(0, (case.batch, case.lengths[0]) if case.batch else (1, case.rows))
    if not case.selective:
        return t
    t = t.movedim(1, -1)
    return t.squeeze(1) if t.dim() == 4 and case.heads[0] == 1 else t


def rows_in(case: Case, t: torch.Tensor, name: str = "") -> torch.Tensor:
    """The inverse of `laid`; B and C have a dimension of groups."""
    rows = t.movedim(-1, 1).flatten(0, 1) if case.selective else t.flatten(0, 1)
    return rows.unsqueeze(1) if name in ("B", "C") and rows.dim() == 2 else rows


def public(case: Case, arguments: dict[str, object]) -> dict[str, object]:
    """Arguments, of which operands and main_grads have an op's names, by the public names."""
    known = dict(zip(case.op.operands._fields, case.public[1], strict=True))
    known |= {f"{name}_main_grad": f"{known[name]}_main_grad" for name in case.op.summed}
    return {known.get(name, name): t for name, t in arguments.items()}


def called(case: Case, leaves: dict[str, torch.Tensor], **others):
    """Results of a case's function."""
    return getattr(ck, case.public[0])(**public(case, leaves | others))


def exact(
    case: Case, o: StateSpace
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """(out, last states, float64 leaves) by the recurrence, sequence by sequence."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in o]
    x, dt, A, B, C, D, z, dt_bias, initial = leaves
    outs, lasts = [], []
    for s, (first, end) in enumerate(case.sequences.bounds()):
        size = case.heads[1], *case.sizes
        state = x.new_zeros(size) if initial is None else initial[s].view(size)
        rows = [t[first:end] for t in (x.view(-1, *size[:2]), dt, B, C)]
        gate = None if z is None else z.view(-1, *size[:2])[first:end]
        out, last = oracle.state_space(*rows, A, D, gate, dt_bias, state, case.options)
        outs.append(out.view(-1, *x.shape[1:]))
        lasts.append(last.view(*x.shape[1:], -1))
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
_CHANNELS = {"selective": True, "limit": (-INF, INF)}
SELECTIVE_CASES = {
    "channels": Case((70,), batch=2, heads=(1, 12), sizes=(1, 16), **_CHANNELS),
    "channels of a pack": Case((5, 0, 33, 1), behind=3, heads=(2, 6), sizes=(1, 8), **_CHANNELS),
    "plain channels": Case(
        (9,), batch=3, heads=(1, 4), sizes=(1, 1), skip=0, gate=False, bias=False, initial=False,
        softplus=False, dtype=FP32, dt=FP32, **_CHANNELS,
    ),
}  # fmt: skip
#: Heads, and channels, that share a group.
SHARED = tuple(
    case._replace(lengths=(130,), batch=1, heads=(1, 3), dtype=FP32, dt=FP32)
    for case in (CASES["batch"], SELECTIVE_CASES["channels"])
)
