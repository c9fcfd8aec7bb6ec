"""FlexAttention (torch, compiled to Triton) on a problem: today's deterministic sparse backward."""

from __future__ import annotations

import functools

from torch import Tensor

from ..core.rival import Absent
from . import graphs
from .cases import BLOCK, Problem
from .targets import PACK


def rule(problem: Problem):
    """The mask as a FlexAttention ``mask_mod``, or None for no mask."""
    case, ids, blocks = problem.case, problem.ids, problem.blocks
    if case.mask == PACK:
        raise Absent("a pack is measured against FA4's varlen kernels alone")
    return {
        "full": lambda: None,
        "causal": lambda: lambda b, h, q, kv: kv <= q,
        "window": lambda: lambda b, h, q, kv: (kv <= q) & (kv > q - case.window),
        "document": lambda: lambda b, h, q, kv: ids[b, q] == ids[b, kv],
        "prefix": lambda: lambda b, h, q, kv: (kv <= q) | (kv < case.prefix),
        "random": lambda: lambda b, h, q, kv: blocks[q // BLOCK, kv // BLOCK],
    }[case.mask]()


@functools.cache
def _compiled():
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    # A backward that may take its saved tensors' memory could run once only.
    torch._functorch.config.donated_buffer = False
    return torch.compile(flex_attention, dynamic=False)


def _call(problem: Problem):
    from torch.nn.attention.flex_attention import create_block_mask

    case, mask_mod, block_mask = problem.case, rule(problem), None
    if mask_mod is not None:
        batch = case.batch if problem.ids is not None else None
        device = str(problem.mask.device)
        block_mask = create_block_mask(mask_mod, batch, None, case.s, case.s, device)
    run, gqa = _compiled(), case.heads != case.kv_heads

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        options = {"block_mask": block_mask, "scale": case.scale, "enable_gqa": gqa}
        out, lse = run(*heads_first, return_lse=True, **options)
        return out.transpose(1, 2), lse

    return call


def forward(problem: Problem):
    """(out, lse) of an input set."""
    run = _call(problem)
    return lambda t: run(t.q, t.k, t.v)


def backward(problem: Problem):
    """(dq, dk, dv) of an input set."""
    run = _call(problem)
    return graphs.backward(lambda *operands: run(*operands)[0])
