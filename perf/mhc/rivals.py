"""Rivals of the mHC bench: functions of the operands through autograd, one direction alone.

A site is mix_and_aggregate, a sublayer that costs nothing (it returns f and is differentiable in
its input), and expand_combine; ours is `connect`.  TransformerEngine's ops are its Triton kernels
in the mode that adds with atomics (``te``) and in the one that does not in the projection
(``te_ordered``); they are looked for in the folder that MHC_RIVALS names.
"""

from __future__ import annotations

import os
import sys

import torch

from ..core.passes import Inputs, Op, starts
from ..core.rival import Absent, Rival, by_name, module
from .cases import N_STREAMS, OPS

_N = N_STREAMS


class _Sublayer(torch.autograd.Function):
    """A sublayer that returns f whatever its input; the gradient of f goes to both."""

    @staticmethod
    def forward(ctx, out, f):
        return f.view_as(f)

    @staticmethod
    def backward(ctx, d_f):
        return d_f, d_f


def _ours() -> dict[str, Op]:
    import cute_kernels as ck

    mhc = ck.mhc

    def layout(t: Inputs) -> str:
        return "cn" if t["x"].shape[-1] == _N else "nc"

    def projection(t: Inputs):
        options = {"norm_weight": t.get("norm_weight"), "layout": layout(t)}
        return mhc.projection(t["x"], t["phi"], **options)

    def scale_sinkhorn(t: Inputs):
        pre, post, res = mhc.scale(t["h"], t["alpha"], t["beta"], t["ms"], _N)
        return pre, post, mhc.sinkhorn(res.view(-1, 1, _N, _N), _N)

    def site(t: Inputs):
        sublayer = lambda out: _Sublayer.apply(out, t["f"])  # noqa: E731
        weights = (t["phi"], t["alpha"], t["beta"])
        return (mhc.connect(t["x"], sublayer, *weights, options=mhc.Options(layout=layout(t))),)

    def aggregate(t: Inputs):
        return (mhc.aggregate(t["x"], t["pre"], _N, layout=layout(t)),)

    def expand(t: Inputs):
        operands = (t["f"], None, t["post"], t["x"], t["res"], _N)
        return (mhc.expand_combine(*operands, layout=layout(t)),)

    return {
        "projection": projection,
        "projection_norm": projection,
        "scale_sinkhorn": scale_sinkhorn,
        "aggregate": aggregate,
        "expand": expand,
        "site": site,
    }


def _te(split_k: bool) -> dict[str, Op]:
    folder = os.environ.get("MHC_RIVALS")
    if not folder:
        raise Absent("MHC_RIVALS names no folder with TransformerEngine's Triton kernels")
    if folder not in sys.path:
        sys.path.append(folder)
    te = module("transformer_engine.pytorch.triton.mhc")

    def projection(t: Inputs):
        rows = t["x"].view(-1, t["phi"].shape[1])
        norm = t.get("norm_weight")
        return te.mhc_fused_projection(rows, t["phi"], norm_weight=norm, use_split_k=split_k)

    def scale_sinkhorn(t: Inputs):
        pre, post, res = te.mhc_fused_scale(t["h"], t["alpha"], t["beta"], t["ms"], _N)
        return pre, post, te.mhc_fused_sinkhorn(res.view(-1, 1, _N, _N), _N)

    def site(t: Inputs):
        out, post, res = te.mhc_generate_mix_and_aggregate(
            t["x"], t["phi"], t["alpha"], t["beta"], use_split_k=split_k
        )
        f = _Sublayer.apply(out, t["f"])
        return (te.mhc_fused_expand_combine(f, None, post, t["x"], res, _N),)

    return {
        "projection": projection,
        "projection_norm": projection,
        "scale_sinkhorn": scale_sinkhorn,
        "aggregate": lambda t: (te.mhc_fused_aggregate(t["x"], t["pre"], _N),),
        "expand": lambda t: (
            te.mhc_fused_expand_combine(t["f"], None, t["post"], t["x"], t["res"], _N),
        ),
        "site": site,
    }


RIVALS = by_name(
    Rival("ours", starts(OPS, _ours), promised=True, ordered=True),
    Rival("te", starts(OPS, lambda: _te(True))),
    Rival("te_ordered", starts(OPS, lambda: _te(False))),
)
