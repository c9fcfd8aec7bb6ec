"""Drawn cases of the public op against float64: by how much of its bound each result is off."""

from __future__ import annotations

import math

import torch

from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.oracles import sparse_attn as reference
from tests.sparse_attn import cases

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def exact(
    operands,
    allowed: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    scores: reference.Scores = reference.Scores(),
) -> tuple[tuple, tuple]:
    """(values, bounds) of `NAMES`: float64 by autograd, that of sinks if there are any.

    operands: q, k, v.  dlse: None if lse has no gradient.
    """
    sinks = () if scores.sinks is None else (scores.sinks.detach(),)
    plain = [t.detach() for t in operands]
    leaves = [t.double().requires_grad_() for t in (*plain, *sinks)]
    options = scores._replace(sinks=leaves[3]) if sinks else scores
    results = reference.attention(*leaves[:3], allowed, **options._asdict())
    upstream = (dout.double(), torch.zeros_like(results[1]) if dlse is None else dlse.double())
    grads = torch.autograd.grad(results, leaves, upstream)
    values = (*(t.detach() for t in results), *grads)
    bounds = reference.error_bounds(*plain, dout, allowed, dlse=dlse, scores=scores)
    if sinks:
        of_sinks = reference.sinks_bound(bounds, values[:2], (dout, dlse), sinks[0])
        bounds = (*bounds, of_sinks + torch.finfo(sinks[0].dtype).eps * values[5].abs())
    return values, bounds


def attended(
    x: cases.Inputs, mask=None, sinks=None, with_lse=True, device="cpu", **options
) -> list:
    """Return out, lse, dq, dk, dv, and dsinks of sinks, of the public op on ``device``."""
    tensors = *x.leaves(), *(() if sinks is None else (sinks,))
    leaves = [t.detach().to(device).requires_grad_() for t in tensors]
    options |= {"sinks": None if sinks is None else leaves[3], "return_lse": True}
    there = None if mask is None else mask.to(device)
    out = block_sparse_attention(*leaves[:3], there, **options)
    upstream = x.dout.to(device), x.dlse.to(device)
    wanted = (out, upstream) if with_lse else (out[:1], upstream[:1])
    grads = torch.autograd.grad(wanted[0], leaves, wanted[1])
    return [t.detach().cpu() for t in (*out, *grads)]


def excess(got, values, bounds) -> dict[str, float]:
    """Per result: the largest error as a multiple of its bound."""
    out = {}
    for name, g, e, bound in zip(NAMES[: len(bounds)], got, values, bounds, strict=True):
        error = torch.where(g == e, 0.0, (g.double() - e).abs())
        ratio = (error / bound).nan_to_num(math.inf, posinf=math.inf)
        out[name] = torch.where(error == 0, 0.0, ratio).max().item() if g.numel() else 0.0
    return out


def checked(case: cases.Case, device: str = "cpu") -> dict[str, float]:
    x = cases.inputs_of(case)
    allowed, scores = case.allowed(), reference.Scores(softcap=case.softcap)
    options = {"causal": case.causal, "softcap": case.softcap, "schedule": case.schedule}
    got = attended(x, case.mask, device=device, **options)
    values, bounds = exact(x.leaves(), allowed, x.dout, x.dlse, scores)
    # Empty rows are exact: no bound hides a wrong zero.
    empty = ~allowed.expand(*got[1].shape, case.kv_len).any(-1)
    assert (got[0].transpose(1, 2)[empty] == 0).all() and (got[2].transpose(1, 2)[empty] == 0).all()
    assert (got[1][empty] == -math.inf).all() and got[1][~empty].isfinite().all()
    return excess(got, values, bounds)
