"""Rivals of the attention bench: forward and backward of a problem as calls, for timing alone.

A forward takes an input set to (out, lse), a backward to (dq, dk, dv); all that the first call
does once (masks, schedules, compilation) is no part of the later ones.
"""

from __future__ import annotations

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


def _fa4(ordered: bool) -> dict[str, Start]:
    def forward(problem: Problem) -> Call:
        from . import fa4

        return fa4.forward(problem)

    def backward(problem: Problem) -> Call:
        from . import fa4

        return fa4.backward(problem, ordered)

    return {"bwd": backward} if ordered else {"fwd": forward, "bwd": backward}


def _pack(each: bool) -> dict[str, Start]:
    def forward(problem: Problem) -> Call:
        from . import pack

        return pack.forward(problem, each)

    def backward(problem: Problem) -> Call:
        from . import pack

        return pack.backward(problem, each)

    return {"fwd": forward, "bwd": backward}


def _fa4_varlen() -> dict[str, Start]:
    def forward(problem: Problem) -> Call:
        from . import fa4

        return fa4.varlen_forward(problem)

    def backward(problem: Problem) -> Call:
        from . import fa4

        return fa4.varlen_backward(problem)

    return {"fwd": forward, "bwd": backward}


def _cudnn() -> dict[str, Start]:
    def backward(problem: Problem) -> Call:
        from . import cudnn

        return cudnn.backward(problem)

    return {"bwd": backward}


def _flex() -> dict[str, Start]:
    def forward(problem: Problem) -> Call:
        from . import flex

        return flex.forward(problem)

    def backward(problem: Problem) -> Call:
        from . import flex

        return flex.backward(problem)

    return {"fwd": forward, "bwd": backward}


RIVALS = by_name(
    Rival("ours", _ours(ordered=True), promised=True, ordered=True),
    Rival("ours_unordered", _ours(ordered=False), promised=True),
    Rival("ours_pack", _pack(each=False), promised=True, ordered=True),
    Rival("ours_runs", _pack(each=True), promised=True, ordered=True),
    Rival("fa4", _fa4(ordered=False)),
    Rival("fa4_ordered", _fa4(ordered=True), ordered=True),
    Rival("fa4_varlen", _fa4_varlen()),
    Rival("cudnn", _cudnn()),
    Rival("flex", _flex(), ordered=True, short=False),
)
