"""Rivals of the norm bench: torch eager and compiled, Liger, quack, and a copy."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ..core.passes import DIRECTIONS, Inputs, Op, Suite, copied, starts
from ..core.rival import Rival, by_name, module
from .cases import OPS

EPS = 1e-6


def _ours() -> dict[str, Op]:
    import cute_kernels as ck

    return {
        "rms_norm": lambda t: (ck.rms_norm(t["x"], t["weight"], EPS),),
        "add_rms_norm": lambda t: ck.rms_norm(t["x"], t["weight"], EPS, residual=t["residual"]),
        "layer_norm": lambda t: (ck.layer_norm(t["x"], t["weight"], t["bias"], EPS),),
    }


def _rms(t: Inputs):
    return (F.rms_norm(t["x"], t["weight"].shape, t["weight"], EPS),)


def _add_rms(t: Inputs):
    h = t["x"] + t["residual"]
    return F.rms_norm(h, t["weight"].shape, t["weight"], EPS), h


def _layer(t: Inputs):
    return (F.layer_norm(t["x"], t["weight"].shape, t["weight"], t["bias"], EPS),)


_TORCH: dict[str, Op] = {"rms_norm": _rms, "add_rms_norm": _add_rms, "layer_norm": _layer}


@functools.cache
def _compiled() -> dict[str, Op]:
    return {name: torch.compile(run) for name, run in _TORCH.items()}


def _liger() -> dict[str, Op]:
    rms = module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    layer = module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    add = module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    # One rounding at the end ("gemma") and gradients in tensors of their own, as ours.
    options = (EPS, 0.0, "gemma", False)
    return {
        "rms_norm": lambda t: (rms.apply(t["x"], t["weight"], *options),),
        "add_rms_norm": lambda t: add.apply(t["x"], t["residual"], t["weight"], *options),
        "layer_norm": lambda t: (layer.apply(t["x"], t["weight"], t["bias"], EPS),),
    }


def _quack() -> dict[str, Op]:
    run = module("quack.rmsnorm").rmsnorm

    def add(t: Inputs):
        return run(t["x"], t["weight"], residual=t["residual"], eps=EPS, prenorm=True)

    return {"rms_norm": lambda t: (run(t["x"], t["weight"], eps=EPS),), "add_rms_norm": add}


RIVALS = by_name(
    Rival("ours", starts(OPS, _ours), promised=True, ordered=True),
    Rival("torch", starts(OPS, lambda: _TORCH)),
    Rival("compiled", starts(OPS, _compiled), short=False),
    Rival("liger", starts(OPS, _liger)),
    Rival("quack", starts(OPS, _quack)),
    Rival("copy", {f"{op} {way}": copied for op in OPS for way in DIRECTIONS}),
)
SUITE = Suite("norm", "rms_norm", RIVALS)
