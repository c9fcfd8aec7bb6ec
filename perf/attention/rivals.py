"""Rivals of the attention bench: forward and backward of a problem as calls, for timing alone.

A forward takes an input set to (out, lse), a backward to (dq, dk, dv); all that the first call
does once (masks, schedules, compilation) is no part of the later ones.
"""

from __future__ import annotations

import importlib

from ..core.rival import Call, Rival, Start, by_name
from .cases import Problem


def _operands(problem: Problem):
    from cute_kernels.sparse_attn import lowering

    case = problem.case
    sizes = (case.batch, case.s, case.s, case.heads, case.kv_heads, case.dim)
    return lowering.build_lists(
        problem.mask.handle, False, "auto", True, sizes, str(problem.mask.device)
    )


def _ours(ordered: bool) -> dict[str, Start]:
    def forward(problem: Problem) -> Call:
        from cute_kernels.sparse_attn import op

        options = (*_operands(problem), True, problem.case.scale, 0.0, None)
        return lambda t: op.block_sparse_attention(t.q, t.k, t.v, *options)

    def backward(problem: Problem) -> Call:
        from cute_kernels.sparse_attn import op

        options = (*_operands(problem), ordered, problem.case.scale, 0.0, None)
        run = op.block_sparse_attention_backward
        return lambda t: run(t.dout, None, t.q, t.k, t.v, t.out, t.lse, *options)[:3]

    return {"fwd": forward, "bwd": backward} if ordered else {"bwd": backward}


def _of(module: str, function: str, *options: object) -> Start:
    """A function of a module of this folder, which is imported when a problem is started."""

    def start(problem: Problem) -> Call:
        loaded = importlib.import_module(f"{__package__}.{module}")
        return getattr(loaded, function)(problem, *options)

    return start


def _both(module: str, *options: object, prefix: str = "") -> dict[str, Start]:
    """Both passes of a module."""
    names = {"fwd": "forward", "bwd": "backward"}
    return {which: _of(module, prefix + name, *options) for which, name in names.items()}


RIVALS = by_name(
    Rival("ours", _ours(ordered=True), promised=True, ordered=True),
    Rival("ours_unordered", _ours(ordered=False), promised=True),
    Rival("ours_pack", _both("pack", False), promised=True, ordered=True),
    Rival("ours_runs", _both("pack", True), promised=True, ordered=True),
    Rival("fa4", {"fwd": _of("fa4", "forward"), "bwd": _of("fa4", "backward", False)}),
    Rival("fa4_ordered", {"bwd": _of("fa4", "backward", True)}, ordered=True),
    Rival("fa4_varlen", _both("fa4", prefix="varlen_")),
    Rival("cudnn", {"bwd": _of("cudnn", "backward")}),
    Rival("flex", _both("flex"), ordered=True, short=False),
)
