"""Rivals of the mHC bench: functions of the operands through autograd, one direction alone.

A site is mix_and_aggregate, a sublayer that costs nothing (it returns f and is differentiable in
its input), and expand_combine; ours is `connect`.  TransformerEngine's ops are its Triton kernels
in the mode that adds with atomics (``te``) and in the one that does not in the projection
(``te_ordered``); they are looked for in the folder that MHC_RIVALS names.  Its post_pre is
expand_combine, then mix_and_aggregate.  ``site_by_site`` is our multilayer_recompute by
expand_combine, a launch for each site.
"""

from __future__ import annotations

import os
import sys

import torch

from ..core.passes import DIRECTIONS, Inputs, Op, Suite, copied, starts
from ..core.rival import Absent, Call, Rival, Start, by_name, module
from .cases import ALL_OPS, SITES, Case

#: Streams that TransformerEngine has kernels for.
_N = 4


class _Sublayer(torch.autograd.Function):
    """A sublayer that returns f whatever its input; the gradient of f goes to both."""

    @staticmethod
    def forward(ctx, out, f):
        return f.view_as(f)

    @staticmethod
    def backward(ctx, d_f):
        return d_f, d_f


def _layout(t: Inputs) -> str:
    return "cn" if t["x"].shape[-1] in (2, 4) else "nc"


def _count(t: Inputs) -> int:
    """Number of streams."""
    return t["x"].shape[-1 if _layout(t) == "cn" else -2]


def _ours() -> dict[str, Op]:
    import cute_kernels as ck

    mhc = ck.mhc

    def projection(t: Inputs):
        options = {"norm_weight": t.get("norm_weight"), "layout": _layout(t)}
        return mhc.projection(t["x"], t["phi"], **options)

    def scale_sinkhorn(t: Inputs):
        n = {24: 4, 8: 2}[t["beta"].numel()]
        pre, post, res = mhc.scale(t["h"], t["alpha"], t["beta"], t["ms"], n)
        return pre, post, mhc.sinkhorn(res.view(-1, 1, n, n), n)

    def site(t: Inputs):
        sublayer = lambda out: _Sublayer.apply(out, t["f"])  # noqa: E731
        weights = (t["phi"], t["alpha"], t["beta"])
        return (mhc.connect(t["x"], sublayer, *weights, options=mhc.Options(layout=_layout(t))),)

    def aggregate(t: Inputs):
        return (mhc.aggregate(t["x"], t["pre"], _count(t), layout=_layout(t)),)

    def expand(t: Inputs):
        operands = (t["f"], t.get("bias"), t["post"], t["x"], t["res"], _count(t))
        return (mhc.expand_combine(*operands, layout=_layout(t)),)

    def multilayer_recompute(t: Inputs):
        return tuple(mhc.multilayer_recompute(t["x"], _sites(t), _count(t), layout=_layout(t)))

    def head(t: Inputs):
        weights = (t["phi"], t["alpha"], t["beta"])
        return (mhc.head(t["x"], *weights, options=mhc.Options(layout=_layout(t))),)

    def post_pre(t: Inputs):
        operands = (t["f"], None, t["post"], t["x"], t["res"], t["phi"], t["alpha"], t["beta"])
        options = mhc.Options(layout=_layout(t))
        return mhc.post_pre(*operands, H_pre=t.get("pre"), options=options)[:2]

    return {
        "projection": projection,
        "projection_norm": projection,
        "scale_sinkhorn": scale_sinkhorn,
        "aggregate": aggregate,
        "expand": expand,
        "expand_bias": expand,
        "head": head,
        "multilayer_recompute": multilayer_recompute,
        "post_pre": post_pre,
        "post_pre_shifted": post_pre,
        "site": site,
    }


def _sites(t: Inputs) -> list[tuple[torch.Tensor, None, torch.Tensor, torch.Tensor]]:
    """(f, bias, H_post, H_res) of each site."""
    return [(t[f"f{s}"], None, t[f"post{s}"], t[f"res{s}"]) for s in range(SITES)]


def _site_by_site() -> dict[str, Op]:
    """multilayer_recompute as expand_combine of one site after another."""
    import cute_kernels as ck

    def multilayer_recompute(t: Inputs):
        x, streams = t["x"], []
        for f, bias, post, res in _sites(t):
            x = ck.mhc.expand_combine(f, bias, post, x, res, _count(t), layout=_layout(t))
            streams.append(x)
        return tuple(streams)

    return {"multilayer_recompute": multilayer_recompute}


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

    def expand(t: Inputs):
        operands = (t["f"], t.get("bias"), t["post"], t["x"], t["res"], _N)
        return (te.mhc_fused_expand_combine(*operands),)

    def post_pre(t: Inputs):
        (y,) = expand(t)
        weights = (t["phi"], t["alpha"], t["beta"])
        return y, te.mhc_generate_mix_and_aggregate(y, *weights, use_split_k=split_k)[0]

    return {
        "projection": projection,
        "projection_norm": projection,
        "scale_sinkhorn": scale_sinkhorn,
        "aggregate": lambda t: (te.mhc_fused_aggregate(t["x"], t["pre"], _N),),
        "expand": expand,
        "expand_bias": expand,
        "post_pre": post_pre,
        "site": site,
    }


def _theirs(split_k: bool) -> dict[str, Start]:
    """TransformerEngine's passes, of the streams that it has kernels for."""
    there = starts(ALL_OPS, lambda: _te(split_k))

    def checked(product: str) -> Start:
        def start(case: Case) -> Call:
            if case.n != _N or case.layout != "cn":
                raise Absent("TransformerEngine has 4 streams, (..., C, n)")
            return there[product](case)

        return start

    return {product: checked(product) for product in there}


RIVALS = by_name(
    Rival("ours", starts(ALL_OPS, _ours), promised=True, ordered=True),
    Rival("site_by_site", starts(ALL_OPS, _site_by_site)),
    Rival("te", _theirs(True)),
    Rival("te_ordered", _theirs(False)),
    Rival("copy", {f"{op} {way}": copied for op in ALL_OPS for way in DIRECTIONS}),
)
SUITE = Suite("mhc", "mhc", RIVALS)
