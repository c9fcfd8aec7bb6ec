"""Drawn cases of the public op against float64: by how much of its bound each result is off."""

from __future__ import annotations

import math

import torch

from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.oracles import sparse_attn as reference
from tests.sparse_attn import cases

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def exact_of(x: cases.Inputs, allowed: torch.Tensor, softcap: float) -> tuple[torch.Tensor, ...]:
    """Reference in float64, by autograd: out, lse, dq, dk, dv."""
    leaves = [t.detach().double().requires_grad_() for t in x.leaves()]
    results = reference.attention(*leaves, allowed, softcap=softcap)
    grads = torch.autograd.grad(results, leaves, (x.dout.double(), x.dlse.double()))
    return (*(t.detach() for t in results), *grads)


def ours_of(x: cases.Inputs, case: cases.Case) -> tuple[torch.Tensor, ...]:
    """Results of the CPU backend: out, lse, dq, dk, dv."""
    options = {"causal": case.causal, "softcap": case.softcap, "schedule": case.schedule}
    results = block_sparse_attention(*x.leaves(), case.mask, return_lse=True, **options)
    grads = torch.autograd.grad(results, x.leaves(), (x.dout, x.dlse))
    return (*(t.detach() for t in results), *grads)


def excess(got, exact, bounds) -> dict[str, float]:
    """Per result: the largest error as a multiple of its bound."""
    out = {}
    for name, g, e, bound in zip(NAMES[: len(bounds)], got, exact, bounds, strict=True):
        error = torch.where(g == e, 0.0, (g.double() - e).abs())
        ratio = (error / bound).nan_to_num(math.inf, posinf=math.inf)
        out[name] = torch.where(error == 0, 0.0, ratio).max().item() if g.numel() else 0.0
    return out


def checked(case: cases.Case) -> dict[str, float]:
    x = cases.inputs_of(case)
    allowed, plain = case.allowed(), [t.detach() for t in x.leaves()]
    bounds = reference.error_bounds(
        *plain, x.dout, allowed, dlse=x.dlse, scores=reference.Scores(softcap=case.softcap)
    )
    got, exact = ours_of(x, case), exact_of(x, allowed, case.softcap)
    # Empty rows are exact: no bound hides a wrong zero.
    empty = ~allowed.expand(*got[1].shape, case.kv_len).any(-1)
    assert (got[0].transpose(1, 2)[empty] == 0).all() and (got[2].transpose(1, 2)[empty] == 0).all()
    assert (got[1][empty] == -math.inf).all() and got[1][~empty].isfinite().all()
    return excess(got, exact, bounds)
