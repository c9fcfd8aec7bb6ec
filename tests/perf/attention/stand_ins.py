"""Attention systems for a CPU: one that is right, and mutants that break one thing each."""

from __future__ import annotations

import itertools

import torch

from perf.attention.cases import Case, Inputs, Problem
from perf.attention.rivals import RIVALS
from perf.core.rival import Absent, Rival
from tests.oracles import sparse_attn as reference


def case(mask: str, *, s: int = 256, heads: int = 2, kv_heads: int = 1) -> Case:
    return Case(mask, s, 64, heads, kv_heads, 2 * s)


def inputs(problem: Problem, seed: int = 0) -> Inputs:
    """Random inputs with the out and lse of our forward."""
    drawn = problem.drawn(seed)
    out, lse = RIVALS["ours"].start["fwd"](problem)(Inputs(*drawn, None, None))
    return problem.inputs(drawn, out, lse)


def dense(problem: Problem, t: Inputs, which: str, allowed: torch.Tensor):
    """One pass by float64, rounded at the end, under a mask of its own."""
    leaves = [x.double().requires_grad_() for x in (t.q, t.k, t.v)]
    with torch.enable_grad():
        out, lse = reference.attention(*leaves, allowed, scale=problem.case.scale)
        if which == "fwd":
            return out.detach().bfloat16(), lse.detach().float()
        return tuple(g.bfloat16() for g in torch.autograd.grad(out, leaves, t.dout.double()))


def right(which: str):
    """Starts the float64 implementation of the true mask."""

    def start(problem: Problem):
        allowed = problem.mask.to_dense()
        return lambda t: dense(problem, t, which, allowed)

    return start


def changed(which: str, change):
    """The right implementation with its results changed in place."""

    def start(problem: Problem):
        call = right(which)(problem)

        def run(t: Inputs):
            got = tuple(x.clone() for x in call(t))
            change(*got)
            return got

        return run

    return start


def with_mask(which: str, allow):
    """The right implementation of another mask, `allow(dense mask)`."""

    def start(problem: Problem):
        allowed = allow(problem.mask.to_dense())
        return lambda t: dense(problem, t, which, allowed)

    return start


def every_third_differs(which: str):
    """Right, but one bit of its first result differs in every third call."""

    def start(problem: Problem):
        call, calls = right(which)(problem), itertools.count(1)

        def run(t: Inputs):
            got = tuple(x.clone() for x in call(t))
            if next(calls) % 3 == 0:
                got[0].view(torch.int16)[0, 0, 0, 0] ^= 1
            return got

        return run

    return start


def raises(problem: Problem):
    raise RuntimeError("no such tile")


def absent(problem: Problem):
    raise Absent("it has no such mask")


def slightly_off(*got: torch.Tensor) -> None:
    """Within the relative error, beyond the bound of a few elements."""
    got[0][0, 0, 0, :4] += 0.05


def system(name: str, start, **options) -> Rival:
    """A system of both passes; `start(pass)` gives what starts one."""
    return Rival(name, {which: start(which) for which in ("fwd", "bwd")}, **options)
