"""The torch ops before a gated delta rule: norms of q and k, and the decay of its gate.

    l2norm               y = x / √(Σ x² + eps), rows of the last dimension, dtype of x
    l2norm_backward      dx = rstd (dy - x̂ Σ dy x̂)
    decay_gate           g = -e^A_log softplus(a + dt_bias), or, with a lower bound,
                         lower_bound sigmoid(e^A_log (a + dt_bias)), fp32; a [B, T, H] or
                         [B, T, H, K], A_log [H], dt_bias [H] or [H K]
    decay_gate_backward  (da, dA_log, d_dt_bias)

Rows may lie apart: a last dimension without gaps is read where it lies, another one is copied.
Results are dense.  Rows of a pack after its last sequence are 0 in g and da; rows of l2norm know
of no pack.  The rule's contract, which `op_delta` registers, covers both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..runtime import dispatch
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_vmap
from . import checks
from .op import RowsOp, launched_by, register
from .tensors import Gate

_PUBLIC = "chunk_gated_delta_rule"


# ---- l2norm --------------------------------------------------------------------------------------

register("l2norm", _PUBLIC, launched_by("gate:l2norm*", "cpu_gate:l2norm*"))
_vmap = refuse_vmap(_PUBLIC, "is not supported; its batch dimension does the same")


def _dense(like: torch.Tensor, *_) -> torch.Tensor:
    return like.new_empty(like.shape)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """x as rows [N, H, K]: a view where two strides reach them, else a copy."""
    return x.reshape(-1, *x.shape[-2:]) if x.dim() > 1 else x.view(1, 1, -1)


def _plan_l2norm(entry: str) -> Callable[..., Plan]:
    """Planner of a pass: rows of tensors, eps -> rows of one result."""

    def plan(x, *others):
        if not x.numel():
            return Plan(_dense, cacheable=False)
        launch = dispatch.launcher(entry, x.device, x.dtype)

        def run(*args):
            *tensors, eps = args
            out = _dense(tensors[-1])
            launch(*map(_heads, tensors), eps, _heads(out))
            return out

        return Plan(run)

    return plan


def _setup_l2norm(ctx, inputs, output):
    x, ctx.eps = inputs
    ctx.save_for_backward(x)


def _backward_l2norm(ctx, dy):
    return l2norm_backward(dy, *ctx.saved_tensors, ctx.eps), None


l2norm = define_op(
    "l2norm(Tensor x, float eps) -> Tensor",
    check=checks.l2norm,
    plan=_plan_l2norm("l2norm"),
    fake=_dense,
    setup=_setup_l2norm,
    backward=_backward_l2norm,
    vmap=_vmap,
)
l2norm_backward = define_op(
    "l2norm_backward(Tensor dy, Tensor x, float eps) -> Tensor",
    plan=_plan_l2norm("l2norm_backward"),
    fake=_dense,
    vmap=_vmap,
)


# ---- decay ---------------------------------------------------------------------------------------


class _Decay(RowsOp):
    entry, public = "decay_gate", _PUBLIC
    launchers = launched_by("gate:decay_gate*", "cpu_gate:decay_gate*")
    operands = Gate
    optional, of_rows, summed = ("dt_bias",), ("a",), ("A_log", "dt_bias")
    upstream, options = ("dg",), ("float? lower_bound",)
    check = staticmethod(checks.decay_gate)

    def rows(self, t: torch.Tensor) -> torch.Tensor:
        """Rows [B T, C] of [B, T, ...]: a view where one stride reaches them, else a copy."""
        return t.reshape(t.shape[0] * t.shape[1], -1)

    def allocate(self, operands: Gate, offsets, options, on_cpu: bool) -> tuple[torch.Tensor]:
        return (operands.a.new_empty(operands.a.shape, dtype=torch.float32),)


decay_gate, decay_gate_backward = _Decay().define()
