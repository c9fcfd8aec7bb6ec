"""The torch ops of norm: schemas, fakes, autograd.

    norm            (y, h, mean, rstd) of x [..., D]; h is empty without a residual
    norm_backward   (dx, dweight, dbias); a gradient is added to its main_grad if there is one

What is not there is empty: the mean of an RMS norm, a gradient that goes elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.compiler import is_dynamo_compiling

from .. import contracts
from ..arch import CPU, CUTE_SM90, TRITON
from ..errors import UnsupportedTransformError
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.dispatch import Implementation
from ..runtime.plan_cache import Plan, PlanCache
from ..runtime.torch_ops import define_op
from . import checks, config
from .checks import DTYPES, Operands
from .config import LAYER, RMS
from .tensors import Rule, Scale, Upstream

_OPS = {"rms_norm": RMS, "layer_norm": LAYER}
for _function in ("forward", "backward", "add_parts"):
    dispatch.register(
        f"norm_{_function}",
        {
            CUTE_SM90: Implementation(
                f"{__package__}.launch:{_function}",
                frozenset(DTYPES),
                planner=f"{__package__}.launch:plan_{_function}",
            ),
            TRITON: Implementation(f"{__package__}.triton.launch:{_function}", frozenset(DTYPES)),
            CPU: Implementation(f"{__package__}.cpu:{_function}", frozenset(DTYPES)),
        },
        contract="rms_norm",
    )


def _backend(device: torch.device, dtype: torch.dtype) -> str:
    return dispatch.backend("norm_forward", device, dtype)


for _name in _OPS:
    contracts.register(contracts.Contract(_name, config.KEPT, config.plan, _backend))


def apply(
    name: str, kind: str, operands: Operands, eps: object, offset: object = 0.0
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Call the function ``name``: y, or (y, h) with a residual."""
    x, weight, bias, residual, main_grad, bias_main_grad = operands
    options = kind, eps, offset, type(eps), type(offset)
    plain = main_grad is None and bias_main_grad is None and not is_dynamo_compiling()
    cached_run = plain and checked.find(options, x, residual, weight, bias)
    if cached_run:
        y, h, _, _ = cached_run(x, residual, weight, bias, None, None, kind, eps, offset)
    else:
        rule = checks.norm(name, kind, operands, eps, offset)
        if cached_run is None:
            bound = norm.bind_plan(_plan_bare(x, residual, Scale(weight, bias), rule))
            checked.add(options, (x, residual, weight, bias), bound)
        y, h, _, _ = norm(x, residual, weight, bias, main_grad, bias_main_grad, *rule)
    return y if residual is None else (y, h)


def _check_aliases(main_grad, bias_main_grad, **operands):
    """Check that backward can add into both main_grads: neither aliases an operand or the other."""
    if main_grad is not None:
        destination.apart(main_grad, bias_main_grad=bias_main_grad, **operands)
    if bias_main_grad is not None:
        destination.apart(bias_main_grad, "bias_main_grad", **operands)


def _plan_bare(x, residual, scale, rule):
    """Plan of `norm` without main_grads, with None for results that a norm does not have."""
    if x.numel() == 0:
        return Plan(_run_empty, cacheable=False)
    plan = dispatch.plan("norm_forward", x.device, x.dtype, x, residual, scale, rule)
    launch = plan.run

    def run(x, residual, weight, bias, *_):
        return tuple(launch(x, residual, Scale(weight, bias), rule))

    return replace(plan, run=run)


def _plan(x, residual, weight, bias, main_grad, bias_main_grad, kind, eps, offset):
    """Plan of `norm`."""
    if x.numel() == 0:
        return Plan(_run_empty, cacheable=False)
    plan = _plan_bare(x, residual, Scale(weight, bias), Rule(kind, eps, offset))
    launch = plan.run

    def run(x, residual, weight, bias, main_grad, bias_main_grad, *_):
        # Checked at run time, in a compiled graph too: a traced tensor has no address.
        _check_aliases(main_grad, bias_main_grad, x=x, residual=residual, weight=weight, bias=bias)
        y, h, mean, rstd = launch(x, residual, weight, bias)
        h = x.new_empty(0) if h is None else h
        return y, h, rstd.new_empty(0) if mean is None else mean, rstd

    return replace(plan, run=run)


def _run_empty(x, residual, weight, bias, main_grad, bias_main_grad, *numbers):
    _check_aliases(main_grad, bias_main_grad, x=x, residual=residual, weight=weight, bias=bias)
    return _fake(x, residual, weight, bias, main_grad, bias_main_grad, *numbers)


#: Calls of both functions that passed their checks, without a main_grad, by kind, eps and offset.
checked = PlanCache()


def _fake(x, residual, weight, bias, main_grad, bias_main_grad, kind, eps, offset):
    rows = math.prod(x.shape[:-1])  # not Size.numel(), which fixes what torch.compile varies
    mean = x.new_empty(rows if kind == LAYER else 0, dtype=torch.float32)
    h = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape), h, mean, x.new_empty(rows, dtype=torch.float32)


def _plan_backward(
    dy, dh, h, mean, rstd, weight, bias, main_grad, bias_main_grad, kind, eps, offset, needs
):
    """Plan of `norm_backward`: the gradient of rows, then the sums of the parts."""
    if h.numel() == 0:
        return Plan(_run_backward_of_nothing, cacheable=False)
    rule, needs_parts = Rule(kind, eps, offset), any(needs[1:])
    device_dtype, layer = (h.device, h.dtype), kind == LAYER
    stats = mean if layer else None, rstd
    operands = Upstream(dy, dh), h, stats, Scale(weight, bias), rule, needs_parts
    rows = dispatch.plan("norm_backward", *device_dtype, *operands)
    indices = [i for i in (0, 1) if needs[1 + i]]
    add: Plan | None = None

    def run(dy, dh, h, mean, rstd, weight, bias, main_grad, bias_main_grad, *_):
        nonlocal add
        _check_aliases(main_grad, bias_main_grad, dy=dy, dh=dh)
        stats = mean if layer else None, rstd
        scale = Scale(weight, bias)
        d_x, parts = rows.run(Upstream(dy, dh), h, stats, scale, rule, needs_parts)
        sums = [None, None]
        if needs_parts:
            all_sums = (parts.weight, main_grad, weight), (parts.bias, bias_main_grad, bias)
            chosen = [list(column) for column in zip(*(all_sums[i] for i in indices), strict=True)]
            if add is None:
                # The partial sums have the same layout in all calls of this signature.
                add = dispatch.plan("norm_add_parts", *device_dtype, *chosen)
            for i, total in zip(indices, add.run(*chosen), strict=True):
                sums[i] = total
        d_weight, d_bias = (h.new_empty(0) if t is None else t for t in sums)
        return d_x if needs[0] else h.new_empty(0), d_weight, d_bias

    return replace(rows, run=run)


def _run_backward_of_nothing(dy, dh, *args):
    _check_aliases(*args[5:7], dy=dy, dh=dh)
    d_x, d_weight, d_bias = _fake_backward(dy, dh, *args)
    return d_x, d_weight.zero_(), d_bias.zero_()


def _fake_backward(
    dy, dh, h, mean, rstd, weight, bias, main_grad, bias_main_grad, kind, eps, offset, needs
):
    needed = (needs[0], needs[1] and main_grad is None, needs[2] and bias_main_grad is None)
    results = zip((h, weight, bias), needed, strict=True)
    return tuple(t.new_empty(t.shape) if need else h.new_empty(0) for t, need in results)


def _setup(ctx, inputs, output):
    x, residual, weight, bias, main_grad, bias_main_grad, *ctx.numbers = inputs
    _, h, mean, rstd = output
    ctx.residual = residual is not None
    ctx.save_for_backward(h if ctx.residual else x, mean, rstd, weight, bias)
    # A missing result is empty, or None of a bound plan, which has no schema.
    numbers = (mean, rstd) if ctx.residual else (h, mean, rstd)
    # Not saved tensors: backward of an earlier micro-batch may write them before ours reads them.
    ctx.main_grads = {2: main_grad, 3: bias_main_grad}
    ctx.mark_non_differentiable(*(t for t in numbers if t is not None))
    # Zeros for the statistics would launch a kernel in each backward.
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dh, *_):
    if torch.is_grad_enabled():
        raise UnsupportedTransformError(
            "cute_kernels.norm: double backward (create_graph=True) is not available"
        )
    h, mean, rstd, weight, bias = ctx.saved_tensors
    mean = rstd.new_empty(0) if mean is None else mean
    dy = torch.zeros_like(h) if dy is None else dy
    if not ctx.residual:
        dh = None
    elif dh is None:
        # Zeros, as compiled graphs have here: 0 + -0 is 0.
        dh = torch.zeros_like(h)
    inputs = h, h if ctx.residual else None, weight, bias
    targets = destination.targets(ctx, inputs, ctx.main_grads, (dy, dh))
    of_weight, of_bias = targets.get(2), targets.get(3)
    rows = any(ctx.needs_input_grad[:2])
    needs_sums = [t is not None and t.wanted for t in (of_weight, of_bias)]
    into = [None if t is None else t.into for t in (of_weight, of_bias)]
    d_x, *sums = norm_backward(
        dy, dh, h, mean, rstd, weight, bias, *into, *ctx.numbers,
        [rows, *needs_sums],
    )  # fmt: skip
    scale_grads = [None, None]
    for index, (target, grad) in enumerate(zip((of_weight, of_bias), sums, strict=True)):
        if target is not None and target.wanted:
            target.written()
            scale_grads[index] = grad if target.returned else None
    needs = ctx.needs_input_grad
    of_rows = [d_x if need else None for need in needs[:2]]
    return *of_rows, *scale_grads, None, None, None, None, None


def _vmap_refused(info, in_dims, *args):
    raise UnsupportedTransformError(
        "cute_kernels.norm: torch.func.vmap is not supported; leading dimensions of x do the same"
    )


norm = define_op(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? main_grad, "
    "Tensor? bias_main_grad, str kind, float eps, float offset) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    plan=_plan,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=_vmap_refused,
)
norm_backward = define_op(
    "norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, Tensor(a!)? main_grad, Tensor(b!)? bias_main_grad, str kind, float eps, "
    "float offset, bool[] needs) -> (Tensor, Tensor, Tensor)",
    plan=_plan_backward,
    fake=_fake_backward,
    vmap=_vmap_refused,
)
