"""The torch ops before a gated delta rule: norms of q and k, and the decay of its gate.

    l2norm               y = x / √(Σ x² + eps), rows of the last dimension, dtype of x
    l2norm_backward      dx = rstd (dy - x̂ Σ dy x̂)
    decay_gate           g = -e^A_log softplus(a + dt_bias), or, with a lower bound,
                         lower_bound sigmoid(e^A_log (a + dt_bias)), fp32; a [B, T, H] or
                         [B, T, H, K], A_log [H], dt_bias [H] or [H K]
    decay_gate_backward  (da, dA_log, d_dt_bias)

Rows may lie apart: a last dimension without gaps is read where it lies, another one is copied.
Results are dense.  Rows of a pack behind its last sequence are 0 in g and da; rows of l2norm know
of no pack.  A gradient that goes to its main_grad, or that nobody needs, is empty.  The rule's
contract, which `op_delta` registers, covers them.
"""

from __future__ import annotations

import torch

from ..arch import CPU, TRITON
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.dispatch import Implementation
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_vmap
from . import checks, config
from .op import sequences_of, sum_of
from .tensors import Gate, GateGradients

_DTYPES = frozenset(config.DTYPE_NAMES)

for _name in ("l2norm", "l2norm_backward", "decay_gate", "decay_gate_backward"):
    dispatch.register(
        _name,
        {
            TRITON: Implementation(f"{__package__}.triton.gate:{_name}", _DTYPES),
            CPU: Implementation(f"{__package__}.cpu_gate:{_name}", _DTYPES),
        },
        contract="chunk_gated_delta_rule",
    )

_vmap = refuse_vmap("chunk_gated_delta_rule", "is not supported; its batch dimension does the same")


def _dense(like: torch.Tensor, *_) -> torch.Tensor:
    return like.new_empty(like.shape)


# ---- l2norm --------------------------------------------------------------------------------------


def _heads(x: torch.Tensor) -> torch.Tensor:
    """x as rows [N, H, K]: a view where two strides reach them, else a copy."""
    return x.reshape(-1, *x.shape[-2:]) if x.dim() > 1 else x.view(1, 1, -1)


def _plan_l2norm(x, eps):
    if not x.numel():
        return Plan(_dense, cacheable=False)
    launch = dispatch.launcher("l2norm", x.device, x.dtype)

    def run(x, eps):
        y = _dense(x)
        launch(_heads(x), eps, _heads(y))
        return y

    return Plan(run)


def _fake_l2norm_backward(dy, x, eps):
    return _dense(x)


def _plan_l2norm_backward(dy, x, eps):
    if not x.numel():
        return Plan(_fake_l2norm_backward, cacheable=False)
    launch = dispatch.launcher("l2norm_backward", x.device, x.dtype)

    def run(dy, x, eps):
        dx = _dense(x)
        launch(_heads(dy), _heads(x), eps, _heads(dx))
        return dx

    return Plan(run)


def _setup_l2norm(ctx, inputs, output):
    x, ctx.eps = inputs
    ctx.save_for_backward(x)


def _backward_l2norm(ctx, dy):
    return l2norm_backward(dy, *ctx.saved_tensors, ctx.eps), None


l2norm = define_op(
    "l2norm(Tensor x, float eps) -> Tensor",
    check=checks.l2norm,
    plan=_plan_l2norm,
    fake=_dense,
    setup=_setup_l2norm,
    backward=_backward_l2norm,
    vmap=_vmap,
)
l2norm_backward = define_op(
    "l2norm_backward(Tensor dy, Tensor x, float eps) -> Tensor",
    plan=_plan_l2norm_backward,
    fake=_fake_l2norm_backward,
    vmap=_vmap,
)


# ---- decay ---------------------------------------------------------------------------------------


def _check_each(a, A_log, dt_bias, offsets, A_log_main_grad, dt_bias_main_grad, lower_bound):
    # Memory of main_grads, and what reduces their parameters, is in no signature.
    return A_log_main_grad is not None or dt_bias_main_grad is not None


def _rows(a: torch.Tensor) -> torch.Tensor:
    """a [B, T, ...] as rows [B T, C]: a view where one stride reaches them, else a copy."""
    return a.reshape(a.shape[0] * a.shape[1], -1)


def _fake_decay_gate(a, *_):
    return a.new_empty(a.shape, dtype=torch.float32)


def _plan_decay_gate(a, A_log, dt_bias, offsets, A_log_main_grad, dt_bias_main_grad, lower_bound):
    if not a.numel():
        return Plan(_fake_decay_gate, cacheable=False)
    launch = dispatch.launcher("decay_gate", a.device, a.dtype)

    def run(a, A_log, dt_bias, offsets, A_log_main_grad, dt_bias_main_grad, lower_bound):
        read = {"a": a, "A_log": A_log, "dt_bias": dt_bias}
        destination.check_no_aliases(A_log_main_grad, dt_bias_main_grad, **read)
        g, gate = _fake_decay_gate(a), Gate(_rows(a), A_log, dt_bias, lower_bound)
        launch(gate, sequences_of(*a.shape[:2], offsets), _rows(g))
        return g

    return Plan(run)


def _fake_decay_gate_backward(
    dg, a, A_log, dt_bias, offsets, A_log_main_grad, dt_bias_main_grad, lower_bound, needs
):
    of_a, of_A_log, of_dt_bias = needs
    wanted = of_a, of_A_log and A_log_main_grad is None, of_dt_bias and dt_bias_main_grad is None
    return tuple(
        like.new_empty(like.shape) if want else a.new_empty(0)
        for like, want in zip((a, A_log, dt_bias), wanted, strict=True)
    )


def _plan_decay_gate_backward(dg, a, *others):
    if not a.numel():
        return Plan(_run_backward_of_nothing, cacheable=False)
    launch = dispatch.launcher("decay_gate_backward", a.device, a.dtype)

    def run(dg, a, A_log, dt_bias, offsets, A_log_main_grad, dt_bias_main_grad, lower_bound, needs):
        destination.check_no_aliases(A_log_main_grad, dt_bias_main_grad, dg=dg)
        of_a, *of_parameters = needs
        da = _dense(a) if of_a else None
        parameters = (A_log, A_log_main_grad), (dt_bias, dt_bias_main_grad)
        sums = [
            sum_of(*each) if want else None
            for each, want in zip(parameters, of_parameters, strict=True)
        ]
        gradients = GateGradients(None if da is None else _rows(da), *sums)
        gate = Gate(_rows(a), A_log, dt_bias, lower_bound)
        launch(_rows(dg), gate, sequences_of(*a.shape[:2], offsets), gradients)
        results = [da] + [
            total.to(parameter.dtype) if total is not None and main_grad is None else None
            for total, (parameter, main_grad) in zip(sums, parameters, strict=True)
        ]
        return tuple([a.new_empty(0) if t is None else t for t in results])

    return Plan(run)


def _run_backward_of_nothing(*args):
    return tuple(t.zero_() for t in _fake_decay_gate_backward(*args))


def _setup_decay_gate(ctx, inputs, output):
    a, A_log, dt_bias, offsets, A_log_main_grad, dt_bias_main_grad, ctx.lower_bound = inputs
    ctx.save_for_backward(a, A_log, dt_bias, offsets)
    # Not saved tensors: backward of an earlier micro-batch may write them before ours reads them.
    ctx.main_grads = {1: A_log_main_grad, 2: dt_bias_main_grad}


def _backward_decay_gate(ctx, dg):
    inputs = ctx.saved_tensors
    targets = destination.targets(ctx, inputs, ctx.main_grads, (dg,)).values()
    needs = [ctx.needs_input_grad[0], *(t.wanted for t in targets)]
    into = (t.into for t in targets)
    results = decay_gate_backward(dg, *inputs, *into, ctx.lower_bound, needs)
    for target in targets:
        if target.wanted:
            target.written()
    returned = needs[0], *(t.returned for t in targets)
    gradients = [t if want else None for t, want in zip(results, returned, strict=True)]
    return (*gradients, None, None, None, None)


_PARAMETERS = "Tensor A_log, Tensor? dt_bias, Tensor? offsets"
decay_gate = define_op(
    f"decay_gate(Tensor a, {_PARAMETERS}, Tensor? A_log_main_grad, Tensor? dt_bias_main_grad, "
    "float? lower_bound) -> Tensor",
    check=checks.decay_gate,
    check_each=_check_each,
    plan=_plan_decay_gate,
    fake=_fake_decay_gate,
    setup=_setup_decay_gate,
    backward=_backward_decay_gate,
    vmap=_vmap,
)
decay_gate_backward = define_op(
    f"decay_gate_backward(Tensor dg, Tensor a, {_PARAMETERS}, Tensor(a!)? A_log_main_grad, "
    "Tensor(b!)? dt_bias_main_grad, float? lower_bound, bool[] needs) -> (Tensor, Tensor, Tensor)",
    plan=_plan_decay_gate_backward,
    fake=_fake_decay_gate_backward,
    vmap=_vmap,
)
