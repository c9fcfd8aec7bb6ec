"""The torch ops of gated_rms_norm.

    gated_norm           (y [..., D], rstd [..., D / group_size] in fp32)
    gated_norm_backward  (dx, dweight, dgate)

A gradient that goes to its main_grad, or that nobody needs, is empty.
"""

from __future__ import annotations

import torch

from .. import contracts
from ..arch import CPU, TRITON
from ..errors import UnsupportedTransformError
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.dispatch import Implementation
from ..runtime.operands import flat_rows
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_vmap
from . import checks, config
from .op import sum_of
from .tensors import Gated, GatedGradients, GatedRule

_DTYPES = frozenset(config.DTYPE_NAMES)

for _function in ("gated_norm", "gated_norm_backward"):
    dispatch.register(
        _function,
        {
            TRITON: Implementation(f"{__package__}.triton.gated_norm:{_function}", _DTYPES),
            CPU: Implementation(f"{__package__}.cpu_gated_norm:{_function}", _DTYPES),
        },
        contract="gated_rms_norm",
    )


def _backend(device: torch.device, dtype: torch.dtype) -> str:
    return dispatch.backend("gated_norm", device, dtype)


contracts.register(
    contracts.Contract("gated_rms_norm", config.KEPT, config.gated_norm_facts, _backend)
)


def _rule(x, activation, eps, norm_before_gate, group_size) -> GatedRule:
    width = x.shape[-1] if group_size is None else group_size
    return GatedRule(activation, float(eps), norm_before_gate, width)


def _operands(x, weight, gate) -> Gated:
    return Gated(flat_rows(x, "gated_norm"), weight, flat_rows(gate, "gated_norm"))


def _fake(x, weight, gate, main_grad, activation, eps, norm_before_gate, group_size):
    groups = 1 if group_size is None else x.shape[-1] // group_size
    rstd = x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)
    return x.new_empty(x.shape), rstd


def _plan(x, weight, gate, main_grad, *options):
    launch = dispatch.launcher("gated_norm", x.device, x.dtype) if x.numel() else None
    rule = _rule(x, *options)

    def run(x, weight, gate, main_grad, *_):
        destination.check_no_aliases(main_grad, None, x=x, weight=weight, gate=gate)
        y, rstd = _fake(x, weight, gate, main_grad, *options)
        if launch is not None:
            rows = y.view(-1, y.shape[-1]), rstd.view(-1, rstd.shape[-1])
            launch(_operands(x, weight, gate), rule, *rows)
        return y, rstd

    return Plan(run, cacheable=launch is not None)


def _fake_backward(dy, x, weight, gate, rstd, main_grad, *options):
    of_x, of_weight, of_gate = options[-1]
    wanted = of_x, of_weight and main_grad is None, of_gate
    return tuple(
        like.new_empty(like.shape) if want else x.new_empty(0)
        for like, want in zip((x, weight, gate), wanted, strict=True)
    )


def _plan_backward(dy, x, weight, gate, rstd, main_grad, *options):
    launch = dispatch.launcher("gated_norm_backward", x.device, x.dtype) if x.numel() else None
    *rest, (of_x, of_weight, of_gate) = options
    rule = _rule(x, *rest)

    def run(dy, x, weight, gate, rstd, main_grad, *_):
        destination.check_no_aliases(main_grad, None, dy=dy)
        dx, d_gate = (x.new_empty(x.shape) if need else None for need in (of_x, of_gate))
        into = sum_of(weight, main_grad) if of_weight else None
        if launch is not None:
            rows = [None if t is None else t.view(-1, t.shape[-1]) for t in (dx, d_gate)]
            launch(
                flat_rows(dy, "gated_norm"), _operands(x, weight, gate),
                rstd.view(-1, rstd.shape[-1]), rule, GatedGradients(rows[0], into, rows[1]),
            )  # fmt: skip
        d_weight = into.to(weight.dtype) if of_weight and main_grad is None else None
        return tuple([x.new_empty(0) if t is None else t for t in (dx, d_weight, d_gate)])

    return Plan(run, cacheable=launch is not None)


def _setup(ctx, inputs, output):
    x, weight, gate, main_grad, *ctx.options = inputs
    ctx.save_for_backward(x, weight, gate, output[1])
    # Not a saved tensor: backward of an earlier micro-batch may write it before ours reads it.
    ctx.main_grads = {1: main_grad}
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, _):
    if torch.is_grad_enabled():
        raise UnsupportedTransformError(
            "cute_kernels.gated_rms_norm: double backward (create_graph=True) is not available"
        )
    x, weight, gate, rstd = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    target = destination.targets(ctx, (x, weight, gate), ctx.main_grads, (dy,))[1]
    needs = [ctx.needs_input_grad[0], target.wanted, ctx.needs_input_grad[2]]
    dx, d_weight, d_gate = gated_norm_backward(
        dy, x, weight, gate, rstd, target.into, *ctx.options, needs
    )
    if target.wanted:
        target.written()
    return (
        dx if needs[0] else None,
        d_weight if target.returned else None,
        d_gate if needs[2] else None,
        *[None] * 5,
    )


_OPTIONS = "str activation, float eps, bool norm_before_gate, int? group_size"
_vmap = refuse_vmap("gated_rms_norm", "is not supported; leading dimensions of x do the same")
gated_norm = define_op(
    f"gated_norm(Tensor x, Tensor? weight, Tensor gate, Tensor? main_grad, {_OPTIONS}) "
    "-> (Tensor, Tensor)",
    check=checks.gated_norm,
    # Memory of a main_grad, and what reduces its parameter, is in no signature.
    check_each=lambda x, weight, gate, main_grad, *_: main_grad is not None,
    plan=_plan,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=_vmap,
)
gated_norm_backward = define_op(
    "gated_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor gate, Tensor rstd, "
    f"Tensor(a!)? main_grad, {_OPTIONS}, bool[] needs) -> (Tensor, Tensor, Tensor)",
    plan=_plan_backward,
    fake=_fake_backward,
    vmap=_vmap,
)
