"""Is a result right, does it repeat, do both orders agree?  Before any timing.

Two checks against float64.  The whole result of a short case of the same mask class, by the error
bound of ``sparse_attn.reference``; and at full size, where no [S, S] matrix fits, some rows of out
and dQ and some of dK and dV, each of which needs one row or column of scores only.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracles import sparse_attn as reference

from ..core.rival import Rival
from .cases import Case, Inputs, Problem

REL_ERROR = 1e-2  # bf16 operands, results, P and dS: between 1e-3 and 5e-3
SAMPLES = 24
_NAMES = {"fwd": ("out", "lse"), "bwd": ("dq", "dk", "dv")}
# Two bf16 values of one fp32 sum differ by an ulp; sums in two orders by far less than this.
_ULP, _ORDER = 2.0**-7, 2.0**-10


@dataclass(frozen=True)
class Exact:
    """A short problem, an input set with the rounded float64 forward, results and their bounds."""

    problem: Problem
    inputs: Inputs
    values: dict[str, Tensor]
    bounds: dict[str, Tensor]


@functools.lru_cache(maxsize=1)
def exact(case: Case, device: str) -> Exact:
    """The float64 reference of one short case; the last one is kept, since rivals share it."""
    problem = Problem(case, device)
    q, k, v, dout = problem.drawn(0)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    allowed = problem.mask.to_dense()
    with torch.enable_grad():
        out, lse = reference.attention(*leaves, allowed, scale=case.scale)
        grads = torch.autograd.grad(out, leaves, dout.double())
    bounds = reference.error_bounds(
        q, k, v, dout, allowed, scores=reference.Scores(case.scale)
    )._asdict()
    names = (*_NAMES["fwd"], *_NAMES["bwd"])
    values = dict(zip(names, (out.detach(), lse.detach(), *grads), strict=True))
    rounded = values["out"].bfloat16(), values["lse"].float()
    inputs = problem.inputs((q, k, v, dout), *rounded)
    return Exact(problem, inputs, values, bounds)


def whole(rival: Rival, which: str, case: Case, device: str) -> dict:
    """One pass of a short case against float64: the fields of a record's `check`."""
    if not rival.short:
        return {}
    reference = exact(case.small, device)
    got = rival.start[which](reference.problem)(reference.inputs)
    errors = {"rel_error": 0.0, "beyond_bound": 0, "of_bound": 0.0, "nan": 0}
    for name, value in zip(_NAMES[which], got, strict=True):
        want, bound = reference.values[name], reference.bounds[name]
        error = (value.double() - want).abs()
        error = torch.where(value == want, 0.0, error)  # -inf of an empty row
        errors["nan"] += int(error.isnan().sum())
        errors["rel_error"] = max(errors["rel_error"], _relative(value, want))
        errors["beyond_bound"] += int((error > bound).sum())
        share = torch.where(error > 0, error / bound, 0.0).max().item()
        errors["of_bound"] = max(errors["of_bound"], share)
    return errors


def wrong(rival: Rival, check: dict) -> str:
    """Why a result is wrong, or nothing.  The bound counts for a rival that promises it."""
    if check.get("nan"):
        return f"{check['nan']} outputs are NaN"
    for name in ("rel_error", "sampled_error"):
        # A NaN is not below the limit either.
        if name in check and not check[name] < REL_ERROR:
            return f"{name} {check[name]:.2e}, expected below {REL_ERROR:g}"
    if rival.promised and check.get("beyond_bound"):
        return f"{check['beyond_bound']} outputs beyond the bound (by {check['of_bound']:.2f}x)"
    return ""


def _relative(got: Tensor, want: Tensor) -> float:
    got, want = (torch.where(want.isinf() & (got == want), 0.0, t.double()) for t in (got, want))
    scale = want.norm().item()
    return (got - want).norm().item() / (scale or 1.0)


def sampled(problem: Problem, which: str, t: Inputs, got: tuple[Tensor, ...]) -> float:
    """The largest relative error of sampled rows, at full size: of out, or of dQ, dK and dV."""
    generator = torch.Generator().manual_seed(1)
    case, group = problem.case, problem.case.heads // problem.case.kv_heads
    sizes = (case.batch, case.kv_heads, group, case.s)
    places = [
        [int(torch.randint(n, (1,), generator=generator)) for n in sizes] for _ in range(SAMPLES)
    ]
    pairs_by_name: dict[str, list[Tensor]] = {}
    for b, kv_head, g, i in places:
        head = kv_head * group + g
        row = _row(problem, t, b, head, kv_head, i)
        if which == "fwd":
            pairs_by_name.setdefault("out", []).append(_pair(got[0][b, i, head], row["out"]))
            continue
        pairs_by_name.setdefault("dq", []).append(_pair(got[0][b, i, head], row["dq"]))
        dk, dv = _column(problem, t, b, kv_head, group, i)
        pairs_by_name.setdefault("dk", []).append(_pair(got[1][b, i, kv_head], dk))
        pairs_by_name.setdefault("dv", []).append(_pair(got[2][b, i, kv_head], dv))
    worst = 0.0
    for pairs in pairs_by_name.values():
        error, value = torch.stack(pairs).sum(0).sqrt().tolist()
        worst = max(worst, error / value) if not math.isnan(error) else math.nan
    return worst


def _pair(got: Tensor, want: Tensor) -> Tensor:
    """(squared error, squared value) of one row."""
    return torch.stack(((got.double() - want).square().sum(), want.square().sum()))


def _row(problem: Problem, t: Inputs, b: int, head: int, kv_head: int, i: int) -> dict:
    """Reference of one query, from all its keys: out, and dq with the out that is given."""
    positions, scale = torch.arange(problem.case.s, device=problem.device), problem.case.scale
    keys, values = t.k[b, :, kv_head].double(), t.v[b, :, kv_head].double()
    query, dout = t.q[b, i, head].double(), t.dout[b, i, head].double()
    allowed = problem.allowed(b, head, positions[i : i + 1], positions)
    p = torch.softmax((keys @ query * scale).masked_fill(~allowed, -math.inf), 0).nan_to_num(0.0)
    ds = p * (values @ dout - dout @ t.out[b, i, head].double())
    return {"out": p @ values, "dq": scale * (ds @ keys)}


def _column(problem: Problem, t: Inputs, b: int, kv_head: int, group: int, j: int):
    """Reference of one key, from all queries of its group: dk and dv with the out that is given."""
    positions, scale = torch.arange(problem.case.s, device=problem.device), problem.case.scale
    key, value = t.k[b, j, kv_head].double(), t.v[b, j, kv_head].double()
    dk, dv = torch.zeros_like(key), torch.zeros_like(value)
    for head in range(kv_head * group, (kv_head + 1) * group):
        queries, dout = t.q[b, :, head].double(), t.dout[b, :, head].double()
        allowed = problem.allowed(b, head, positions, positions[j : j + 1])
        score = queries @ key * scale - t.lse[b, head].double()
        p = torch.where(allowed, score.exp(), 0.0)
        ds = p * (dout @ value - (dout * t.out[b, :, head].double()).sum(1))
        dk, dv = dk + scale * (ds @ queries), dv + p @ dout
    return dk, dv


def apart(one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> int:
    """How many elements two orders of the same sums set further apart than roundings do."""
    count = 0
    for x, y in zip(one, two, strict=True):
        x, y = x.float(), y.float()
        bound = _ULP * torch.maximum(x.abs(), y.abs()) + _ORDER * x.square().mean().sqrt()
        count += int((~((x - y).abs() <= bound)).sum())
    return count
