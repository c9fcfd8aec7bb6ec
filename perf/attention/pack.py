"""Our ops of packed sequences on a problem, and what a new pack costs the host and the device.

A problem's rows lie one behind another in a pack: [B, S, ..] seen as [1, B * S, ..], no copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from cute_kernels.sparse_attn import launch
from cute_kernels.sparse_attn import op as attention_op
from cute_kernels.sparse_attn.varlen import layout

from ..core import timing
from ..core.rival import Absent, Call
from .cases import Inputs, Problem, drawn_lengths, offsets_of

#: What a causal query sees of its sequence: all before it, nothing behind it.
CAUSAL = (None, 0)
_NEW_PACKS = 20


def in_a_row(*tensors: Tensor) -> Iterator[Tensor]:
    """[B, S, ..] as [B * S, ..]."""
    return (t.flatten(0, 1) for t in tensors)


def in_rows(problem: Problem, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """View out [B * S, H, D] and lse [H, B * S] as [B, S, H, D] and [B, H, S]."""
    sizes = problem.case.batch, problem.case.s
    return out.unflatten(0, sizes), lse.unflatten(1, sizes).transpose(0, 1)


def offsets(problem: Problem) -> Tensor:
    """Offsets of the sequences of a pack; Absent for any other mask."""
    if problem.offsets is None:
        raise Absent("it takes packed sequences alone")
    return problem.offsets


def forward(problem: Problem, each: bool = False) -> Call:
    """(out, lse) of an input set; `each`: by a launch for each sequence."""
    options = _options(problem, each)
    run = _one_by_one(attention_op._attend_each) if each else attention_op.varlen_attention

    def call(t: Inputs) -> tuple[Tensor, ...]:
        out, lse = run(*(x[None] for x in in_a_row(t.q, t.k, t.v)), *options)
        return in_rows(problem, out[0], lse[0])

    return call


def backward(problem: Problem, each: bool = False) -> Call:
    """(dq, dk, dv) of an input set; `each`: by a launch for each sequence."""
    options, sizes = _options(problem, each), (problem.case.batch, problem.case.s)
    run = attention_op.varlen_attention_backward
    run = _one_by_one(attention_op._differentiate_each) if each else run

    def call(t: Inputs) -> tuple[Tensor, ...]:
        dout, q, k, v, out = (x[None] for x in in_a_row(t.dout, t.q, t.k, t.v, t.out))
        grads = run(dout, None, q, k, v, out, t.pack_lse, *options)
        return tuple(x[0].unflatten(0, sizes) for x in grads[:3])

    return call


def _options(problem: Problem, each: bool) -> tuple:
    """Arguments of the ops after the tensors; a launch for each sequence has offsets on the CPU."""
    device_offsets = offsets(problem).to(torch.int64) if each else _where(problem, offsets(problem))
    return device_offsets, *CAUSAL, problem.case.scale, 0.0, None


def _where(problem: Problem, begins: Tensor) -> Tensor:
    """Offsets where our launch for a whole pack reads them."""
    return begins.to(problem.device) if _in_place(problem) else begins.to(torch.int64)


def _in_place(problem: Problem) -> bool:
    return attention_op.reads_keys_on_device(str(problem.device))


def _queries(problem: Problem) -> Tensor:
    """[1, B * S, H, D], of one element."""
    case = problem.case
    element = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, device=problem.device)
    return element.expand(1, case.batch * case.s, case.heads, case.dim)


def _one_by_one(run: Callable) -> Callable:
    """The op as it is where no launch takes a whole pack."""

    def apart(*operands):
        with mock.patch.object(attention_op, "is_one_launch", lambda t: False):
            return run(*operands)

    return apart


def facts(
    problem: Problem, medians: dict[str, float], finish: Callable[[], None], clock: object = None
) -> dict:
    """The record fields of our backward of a pack, timed as `medians` (microseconds) say."""
    body = {
        "sequences": len(offsets(problem)) - 1,
        "new_pack_host_us": new_pack_host_us(problem, finish),
    }
    if not _in_place(problem):
        return body
    placed_us = table_us(problem, clock)
    return body | {"table_us": placed_us, "table_share": placed_us / medians["ours_pack"]}


def table_us(problem: Problem, clock: object = None) -> float:
    """Device time of the kernel that makes a backward's table and tickets, microseconds."""
    bounds = layout.from_offsets(_where(problem, offsets(problem)))
    operands = bounds, _queries(problem), problem.case.kv_heads, CAUSAL
    make_table = launch.plan_varlen_tables(*operands).run
    calls = {"table": lambda number: make_table(bounds)}
    timing.warm_up(calls, 1)
    return timing.interleave(calls, clock=clock)["table"].median


def new_pack_host_us(
    problem: Problem,
    finish: Callable[[], None],
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Host time for what the passes over a pack need that none has seen yet, microseconds.

    The median over drawn packs; their offsets are where kernels read them.  A pack of the same
    sequences from the last to the first is made before each, so that what follows from lengths
    alone is known, and nothing else.
    """
    times = []
    for number in range(1, 1 + _NEW_PACKS):
        lengths = drawn_lengths(problem.case, number)
        if lengths == lengths[::-1]:
            raise ValueError(f"pack {number} is the same from the last to the first: {lengths}")
        _make_lists(problem, _where(problem, offsets_of(lengths[::-1])))
        device_offsets = _where(problem, offsets_of(lengths))
        finish()
        start = now()
        _make_lists(problem, device_offsets)
        times.append((now() - start) * 1e6)
    return timing.quantile(times, 0.5)


def _make_lists(problem: Problem, device_offsets: Tensor) -> None:
    """Make, or look up, the lists that a forward and a backward need before their launches."""
    case, device, bounds = problem.case, str(problem.device), layout.from_offsets(device_offsets)
    if _in_place(problem):
        q = _queries(problem)
        launch.plan_varlen_tables(bounds, q).run(bounds)
        launch.plan_varlen_tables(bounds, q, case.kv_heads, CAUSAL).run(bounds)
        return
    row_layout = layout.layout(bounds, case.batch * case.s, device)
    layout.lowered(row_layout, CAUSAL, device)
    layout.order(row_layout, CAUSAL, (case.heads, case.kv_heads), case.dim, device)
