"""Our ops of packed sequences on a problem, and what a new pack costs the host.

A problem's rows lie one behind another in a pack: [B, S, ..] seen as [1, B * S, ..], no copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from cute_kernels.sparse_attn import pack_op, packs, passes

from ..core.rival import Absent, Call
from ..core.timing import quantile
from .cases import Inputs, Problem, drawn_lengths, offsets_of

#: What a causal query sees of its sequence: all before it, nothing behind it.
CAUSAL = (None, 0)
_NEW_PACKS = 20


def in_a_row(*tensors: Tensor) -> Iterator[Tensor]:
    """[B, S, ..] as [B * S, ..]."""
    return (t.flatten(0, 1) for t in tensors)


def in_rows(problem: Problem, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """out [B * S, H, D] and lse [H, B * S] as [B, S, H, D] and [B, H, S]; no copies."""
    sizes = problem.case.batch, problem.case.s
    return out.unflatten(0, sizes), lse.unflatten(1, sizes).transpose(0, 1)


def offsets(problem: Problem) -> Tensor:
    """Where the sequences of a pack begin and end; Absent for any other mask."""
    if problem.offsets is None:
        raise Absent("it takes packed sequences alone")
    return problem.offsets


def forward(problem: Problem, each: bool = False) -> Call:
    """(out, lse) of an input set; `each`: by a launch for each sequence."""
    options = _options(problem)
    run = _one_by_one(pack_op.pack_attention) if each else pack_op.pack_attention

    def call(t: Inputs) -> tuple[Tensor, ...]:
        out, lse = run(*(x[None] for x in in_a_row(t.q, t.k, t.v)), *options)
        return in_rows(problem, out[0], lse[0])

    return call


def backward(problem: Problem, each: bool = False) -> Call:
    """(dq, dk, dv) of an input set; `each`: by a launch for each sequence."""
    options, sizes = _options(problem), (problem.case.batch, problem.case.s)
    run = pack_op.pack_attention_backward
    run = _one_by_one(run) if each else run

    def call(t: Inputs) -> tuple[Tensor, ...]:
        dout, q, k, v, out = (x[None] for x in in_a_row(t.dout, t.q, t.k, t.v, t.out))
        grads = run(dout, None, q, k, v, out, t.pack_lse, *options)
        return tuple(x[0].unflatten(0, sizes) for x in grads[:3])

    return call


def _options(problem: Problem) -> tuple:
    """What the ops take behind the tensors."""
    tokens = problem.case.batch * problem.case.s
    return pack_op.pack_offsets(offsets(problem), tokens), *CAUSAL, problem.case.scale, 0.0, None


def _one_by_one(run: Callable) -> Callable:
    """The op as it is where no launch takes a whole pack."""

    def apart(*operands):
        with mock.patch.object(passes, "at_once", lambda t: False):
            return run(*operands)

    return apart


def facts(problem: Problem, finish: Callable[[], None]) -> dict:
    """The record fields of our backward of a pack."""
    return {
        "sequences": len(offsets(problem)) - 1,
        "new_pack_host_us": new_pack_host_us(problem, finish),
    }


def new_pack_host_us(
    problem: Problem,
    finish: Callable[[], None],
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Host time for what the passes over a pack read that none has seen yet, microseconds.

    The median over drawn packs.  A pack of the same sequences from the last to the first is made
    before each, so that the schedules of all lengths are known, and nothing else.
    """
    times = []
    for number in range(1, 1 + _NEW_PACKS):
        lengths = drawn_lengths(problem.case, number)
        if lengths == lengths[::-1]:
            raise ValueError(f"pack {number} is the same from the last to the first: {lengths}")
        _made(problem, lengths[::-1])
        finish()
        start = now()
        _made(problem, lengths)
        times.append((now() - start) * 1e6)
    return quantile(times, 0.5)


def _made(problem: Problem, lengths: list[int]) -> packs.Order:
    """What a forward and a backward look up before their launches."""
    case, device = problem.case, str(problem.device)
    of = packs.layout(offsets_of(lengths).to(torch.int64), device)
    packs.lowered(of, CAUSAL, device)
    return packs.order(of, CAUSAL, (case.heads, case.kv_heads), case.dim, device)
