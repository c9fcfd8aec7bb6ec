"""Public calls of the recurrences, delta rules and scans, and checks that all of them pass."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from cute_kernels.linear_attn import op_delta, op_ssd
from tests.contract import same_bytes
from tests.oracles import linear_attn as oracle
from tests.runtime.cached_calls import drawn

from . import delta_cases, ssd_cases
from .ssd_cases import FP32, called, given, laid, rows_in

#: Names of operands that have rows.
ROWS = {*op_delta.RULE.of_rows, *op_ssd.SCAN.of_rows}
Case = delta_cases.Case | ssd_cases.Case


class Results(NamedTuple):
    """Results of both passes of a call on rows [N, ...], and gradients by the operands' names."""

    out: torch.Tensor
    final: torch.Tensor
    gradients: dict[str, torch.Tensor]


def operands(case: Case):
    return (ssd_cases if "A" in case.op.names else delta_cases).operands(case)


def upstream(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return (ssd_cases if "A" in case.op.names else delta_cases).upstream(case)


def run(case: Case, o, slopes=None, parameters=None, **options) -> Results:
    """Both passes of the public function; ``parameters``: other leaves, by name."""
    leaves, others = given(case, o)
    leaves |= {n: t.detach().requires_grad_() for n, t in (parameters or {}).items()}
    out, final = called(case, leaves, **others, **options)
    d_out, d_final = upstream(case) if slopes is None else slopes
    torch.autograd.backward((out, final), (laid(case, d_out), d_final))
    grads = {
        name: rows_in(case, t.grad, name) if name in ROWS else t.grad
        for name, t in leaves.items()
        if f"{name}_main_grad" not in options
    }
    return Results(rows_in(case, out).detach(), final.detach(), grads)


def same(a: Results, b: Results, names=None) -> bool:
    """Whether two have the same bytes, and gradients of these names, or of all."""
    assert a.gradients.keys() == b.gradients.keys()
    names = [n for n in a.gradients if names is None or n in names]
    pairs = [(a.gradients[name], b.gradients[name]) for name in names]
    return all(same_bytes(*each) for each in [*zip(a[:2], b[:2], strict=True), *pairs])


def rows_of(results: Results, rows: slice, states: slice = slice(None)) -> Results:
    """Results of some rows, and of the states of some sequences."""
    parts = dict.fromkeys(ROWS, rows) | {"initial": states}
    grads = {name: t[parts[name]] for name, t in results.gradients.items() if name in parts}
    return Results(results.out[rows], results.final[states], grads)


def within_bounds(got: Results, exact: tuple, case: Case, inside: float, sums: float) -> None:
    """Results within errors of float64's; what lies behind the pack is 0.

    exact: (out, last states, float64 leaves by name).  sums: Error of sums over rows.
    """
    want, last, leaves = exact
    (d_out, d_final), count = upstream(case), len(want)
    slopes = d_out[:count].double(), d_final.double()
    wanted = torch.autograd.grad((want, last), list(leaves.values()), slopes)
    assert got.final.dtype == FP32 and got.out.dtype == case.dtype
    assert got.gradients.keys() == leaves.keys()
    pairs = {n: (got.gradients[n], t) for n, t in zip(leaves, wanted, strict=True)}
    pairs |= {"out": (got.out, want), "final": (got.final, last)}
    for name, (actual, expected) in pairs.items():
        if name in ROWS or name == "out":
            assert not actual[count:].any()
            actual, expected = actual[:count], expected[:count]
        of_sum = name in ("A", "D", "dt_bias", "A_log")
        bound = oracle.delta_bound(expected, actual.dtype, sums if of_sum else inside)
        assert ((actual.double() - expected).abs() <= bound).all(), name


def slow(case: Case, o, factor: float):
    """Operands whose decays let rows of other chunks count."""
    name = "A" if "A" in case.op.names else "g"
    return o._replace(**{name: getattr(o, name) * factor})


def parts(cuts: tuple[int, ...], case: Case) -> tuple[Results, Results]:
    """(The whole, its parts by way of states and their gradients) of a sequence.

    The roundings of S between chunks reach the end.
    """
    o = slow(case, operands(case), 0.001)
    whole = run(case, o)
    leaves, others = given(case, o)
    state, outs, pieces = leaves["initial"], [], []
    axis, of_rows = 2 if case.selective else 1, case.op.of_rows
    fixed = {name: leaves[name] for name in case.op.summed}
    for first, end in itertools.pairwise((0, *cuts, case.rows)):
        piece = {n: leaves[n].detach().narrow(axis, first, end - first) for n in of_rows}
        piece = {n: t.requires_grad_() for n, t in piece.items()}
        out, state = called(case, piece | fixed, initial=state, **others)
        outs.append(out)
        pieces.append(piece)
    out, (d_out, d_final) = torch.cat(outs, axis), upstream(case)
    torch.autograd.backward((out, state), (laid(case, d_out), d_final))
    grads = {n: rows_in(case, torch.cat([p[n].grad for p in pieces], axis), n) for n in of_rows}
    grads |= {name: t.grad for name, t in (fixed | {"initial": leaves["initial"]}).items()}
    return whole, Results(rows_in(case, out).detach(), state.detach(), grads)


def parts_are_whole(cuts: tuple[int, ...], case: Case) -> bool:
    """Whether parts have the bytes of the whole; sums over rows start from zero in each."""
    return same(*parts(cuts, case), (*case.op.of_rows, "initial"))


def mains(case: Case) -> dict[str, torch.Tensor]:
    """main_grads that are not zero."""
    o = operands(case)
    return {
        f"{name}_main_grad": drawn(*getattr(o, name).shape, seed=30 + i, dtype=FP32)
        for i, name in enumerate(case.op.summed)
    }


def alone(case: Case, o, s: int, **options) -> tuple[Results, slice]:
    """Sequence ``s`` of a batch or a pack as a batch of one, and its rows."""
    first, end = case.sequences.bounds()[s]
    rows, (d_out, d_final) = slice(first, end), upstream(case)
    part = {n: t[rows] for n in case.op.of_rows if (t := getattr(o, n)) is not None}
    part = o._replace(**part, initial=o.initial[s : s + 1])
    single = case._replace(lengths=(end - first,), batch=1, behind=0)
    return run(single, part, (d_out[rows], d_final[s : s + 1]), **options), rows


def sequences_are_alone(case: Case) -> None:
    """Each sequence alone; sums over rows go on from micro-batch to micro-batch."""
    o, of_whole, of_parts = operands(case), mains(case), mains(case)
    whole = run(case, o, **of_whole)
    for s in range(case.count):
        single, rows = alone(case, o, s, **of_parts)
        assert same(rows_of(whole, rows, slice(s, s + 1)), single)
    assert all(map(same_bytes, of_whole.values(), of_parts.values()))
    assert not any(map(same_bytes, of_whole.values(), mains(case).values()))


def heads_are_alone(case: Case) -> None:
    """Heads that share operands: each has its bytes alone, and gradients add theirs, ascending.

    The first two are alike, with slopes that cancel, and so large that nothing else would be left
    of the third in another order.
    """
    o, slopes = operands(case), upstream(case)
    axes = {name: int(name in case.op.of_rows or name == "initial") for name in case.of_heads}
    for name, axis in axes.items():
        t = getattr(o, name)
        t.select(axis, 1).copy_(t.select(axis, 0))
    for t in slopes:
        t[:, 0] *= 2.0**40
        t[:, 1] = -t[:, 0]
    whole = run(case, o, slopes)
    for h in range(3):
        of_head = {n: getattr(o, n).narrow(axis, h, 1) for n, axis in axes.items()}
        slope = [t[:, h : h + 1] for t in slopes]
        single = run(case._replace(heads=(1, 1)), o._replace(**of_head), slope)
        pairs = [(single.out, whole.out[:, h : h + 1]), (single.final, whole.final[:, h : h + 1])]
        for n, axis in axes.items():
            pairs.append((single.gradients[n], whole.gradients[n].narrow(axis, h, 1)))
        assert all(same_bytes(*each) for each in pairs)
    for name in whole.gradients.keys() - axes.keys():
        assert same_bytes(single.gradients[name] + 0.0, whole.gradients[name])
