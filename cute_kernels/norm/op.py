"""The torch ops of norm: schemas, fakes, autograd.

    norm            (y, h, mean, rstd) of x [..., D]; h is empty without a residual
    norm_in_steps   the same with a residual; its gradient has the bytes of norm(x + residual)
    norm_gradients  (dx, dweight, dbias)
    norm_backward   the same; a gradient is added to its main_grad if there is one

What is not there is empty: the mean of an RMS norm, a gradient that goes elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..arch import BACKENDS
from ..compile.call import Program, allocator
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_double, refuse_vmap
from . import checks, config
from .checks import Operands
from .config import LAYER, RMS
from .tensors import Rule, Scale, Upstream

for _function in ("forward", "backward", "add_parts"):
    _dtypes = dict.fromkeys(BACKENDS, dispatch.FLOATS)
    _implementations = dispatch.named_alike(__package__, _function, _dtypes)
    dispatch.register(f"norm_{_function}", _implementations, contract="rms_norm")

dispatch.register_contracts(checks.OPS.values(), config.KEPT, config.contract_facts, "norm_forward")


def _check(*args):
    checks.norm(Operands(*args[:6]), *args[6:])


def _check_each(x, residual, weight, bias, main_grad, bias_main_grad, *_):
    # Memory of main_grads, and what reduces their parameters, is in no signature.
    return main_grad is not None or bias_main_grad is not None


def _plan(x, residual, weight, bias, main_grad, bias_main_grad, kind, eps, offset):
    """Plan of `norm`."""
    if x.numel() == 0:
        return Plan(_run_empty, cacheable=False)
    rule = Rule(kind, float(eps), float(offset))
    operands = x, residual, Scale(weight, bias), rule
    plan = dispatch.plan("norm_forward", x.device, x.dtype, *operands)
    launch, no_h, no_mean = plan.run, _nothing(x.dtype, x), _nothing(torch.float32, x)

    def run(x, residual, weight, bias, *_):
        y, h, mean, rstd = launch(x, residual, Scale(weight, bias), rule)
        h = no_h() if h is None else h
        return y, h, no_mean() if mean is None else mean, rstd

    def run_checked(x, residual, weight, bias, main_grad, bias_main_grad, *_):
        # Checked at run time, in a compiled graph too: a traced tensor has no address.
        destination.check_no_aliases(
            main_grad, bias_main_grad, x=x, residual=residual, weight=weight, bias=bias
        )
        return run(x, residual, weight, bias)

    # Which of the main_grads there are is part of a call's signature.
    if main_grad is not None or bias_main_grad is not None:
        return replace(plan, run=run_checked)
    program = plan.program and plan.program.with_arguments(run, *_SAME[:4])
    return replace(plan, run=run, program=_filled(program, run, (None, no_h, no_mean, None)))


def _filled(
    program: Program | None, run: Callable, empty: Sequence[Callable | None]
) -> Program | None:
    """``program`` of ``run``, with what ``empty`` makes in place of each result that is None."""
    if program is None:
        return None
    results, missing = list(program.results), []
    for i, position in enumerate(results):
        if position is None:
            results[i] = len(program.outputs) + len(missing)
            missing.append(empty[i])
    return program.with_outputs(*missing)._replace(run=run, results=tuple(results))


#: Sources of a program whose arguments are those of another one.
_SAME = tuple([(i, 0) for i in range(7)])


def _nothing(dtype: torch.dtype, like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what makes the empty tensor of a result that is not there."""
    return allocator((0,), dtype, like.device)


def _run_empty(x, residual, weight, bias, main_grad, bias_main_grad, *options):
    destination.check_no_aliases(
        main_grad, bias_main_grad, x=x, residual=residual, weight=weight, bias=bias
    )
    return _fake(x, residual, weight, bias, main_grad, bias_main_grad, *options)


def _fake(x, residual, weight, bias, main_grad, bias_main_grad, kind, eps, offset):
    rows = math.prod(x.shape[:-1])  # not Size.numel(), which fixes what torch.compile varies
    mean = x.new_empty(rows if kind == LAYER else 0, dtype=torch.float32)
    h = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape), h, mean, x.new_empty(rows, dtype=torch.float32)


def _plan_backward(
    dy, dh, h, mean, rstd, weight, bias, main_grad, bias_main_grad, kind, eps, offset, needs
):
    """Plan of `norm_backward`."""
    if h.numel() == 0:
        return Plan(_run_backward_of_nothing, cacheable=False)
    main_grads = main_grad, bias_main_grad
    rule = Rule(kind, float(eps), float(offset))
    plan = _plan_gradients(dy, dh, h, mean, rstd, weight, bias, main_grads, rule, needs)
    run_gradients, no_gradient = plan.run, _nothing(h.dtype, h)

    def run(dy, dh, h, mean, rstd, weight, bias, main_grad, bias_main_grad, *_):
        destination.check_no_aliases(main_grad, bias_main_grad, dy=dy, dh=dh)
        main_grads = main_grad, bias_main_grad
        gradients = run_gradients(dy, dh, h, mean, rstd, weight, bias, main_grads)
        return tuple([no_gradient() if t is None else t for t in gradients])

    return replace(plan, run=run)


def _plan_gradients(dy, dh, h, mean, rstd, weight, bias, main_grads, rule, needs):
    """Plan of (dx, dweight, dbias): the gradient of rows, then the sums of the parts.

    None for a gradient that is not in ``needs``, or that is added to its main_grad.
    """
    needs_rows, *needs_sums = needs
    wanted, layer = any(needs_sums), rule.kind == LAYER
    target = h.device, h.dtype
    stats = mean if layer else None, rstd
    operands = Upstream(dy, dh), h, stats, Scale(weight, bias), rule, wanted
    rows = dispatch.plan("norm_backward", *target, *operands)
    run_rows, both = rows.run, all(needs_sums)
    run_sums: Callable | None = None

    def run(dy, dh, h, mean, rstd, weight, bias, main_grads=(None, None)):
        nonlocal run_sums
        stats = mean if layer else None, rstd
        d_x, parts = run_rows(Upstream(dy, dh), h, stats, Scale(weight, bias), rule, wanted)
        d_weight = d_bias = None
        if wanted:
            operands = (parts.weight, parts.bias), main_grads, (weight, bias)
            if not both:
                only = 0 if needs_sums[0] else 1
                operands = tuple((pair[only],) for pair in operands)
            if run_sums is None:
                # Parts are alike in all calls of this signature.
                run_sums = dispatch.plan("norm_add_parts", *target, *operands).run
            sums = run_sums(*operands)
            if both:
                d_weight, d_bias = sums
            elif needs_sums[0]:
                (d_weight,) = sums
            else:
                (d_bias,) = sums
        return d_x if needs_rows else None, d_weight, d_bias

    program = None
    if rows.program is not None and main_grads == (None, None):
        program = _program_of_gradients(rows.program.with_arguments(run, *_SAME), operands, needs)
    return replace(rows, run=run, program=program)


def _program_of_gradients(program, operands, needs) -> Program | None:
    """Program of `_plan_gradients`: that of the rows, then that of the sums, if it has one."""
    needs_rows, *needs_sums = needs
    (_, h, _, scale, *_), count = operands, len(program.outputs)
    wanted = [i for i in (0, 1) if needs_sums[i]]
    results: list[int | None] = [0 if needs_rows else None, None, None]
    if wanted:
        # Partial sums for the plan, of which it reads shapes and alignment.
        parts = tuple([program.outputs[1 + i]() for i in wanted])
        like = tuple([scale[i] for i in wanted])
        sums = dispatch.plan("norm_add_parts", h.device, h.dtype, parts, (None,) * len(like), like)
        if sums.program is None:
            return None
        program = program.then(sums.program, *[(-2 - i, 0) for i in wanted])
        for position, i in enumerate(wanted):
            results[1 + i] = count + position
    return program._replace(results=tuple(results))


def _plan_backward_alone(dy, dh, h, mean, rstd, weight, bias, kind, eps, offset, needs):
    """Plan of `norm_gradients`."""
    operands = dy, dh, h, mean, rstd, weight, bias
    if h.numel() == 0:
        run_empty = _run_backward_of_nothing
        return Plan(lambda *args: run_empty(*args[:7], None, None, *args[7:]), cacheable=False)
    rule = Rule(kind, float(eps), float(offset))
    plan = _plan_gradients(*operands, (None, None), rule, needs)
    run_gradients, no_gradient = plan.run, _nothing(h.dtype, h)

    def run(dy, dh, h, mean, rstd, weight, bias, *_):
        gradients = run_gradients(dy, dh, h, mean, rstd, weight, bias)
        return tuple([no_gradient() if t is None else t for t in gradients])

    return replace(plan, run=run, program=_filled(plan.program, run, (no_gradient,) * 3))


def _run_backward_of_nothing(dy, dh, *args):
    destination.check_no_aliases(*args[5:7], dy=dy, dh=dh)
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
    # A missing result is empty.
    statistics = (mean, rstd) if ctx.residual else (h, mean, rstd)
    # Not saved tensors: backward of an earlier micro-batch may write them before ours reads them.
    ctx.main_grads = {2: main_grad, 3: bias_main_grad}
    ctx.mark_non_differentiable(*statistics)
    # Zeros for the statistics would launch a kernel in each backward.
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dh, *_):
    saved = ctx.saved_tensors  # read once: gradient checkpointing computes them again
    dy = torch.zeros_like(saved[0]) if dy is None else dy
    if not ctx.residual:
        dh = None
    elif dh is None:
        # Zeros, as compiled graphs have here: 0 + -0 is 0.
        dh = torch.zeros_like(saved[0])
    return _node_gradients(ctx, dy, dh, saved)


def _backward_in_steps(ctx, dy, dh, *_):
    # dx = round(round(gradient through the norm) + dh), as autograd adds what two uses of h send.
    if dy is None:
        return dh, dh, *[None] * 7
    d_x, d_residual, *others = _node_gradients(ctx, dy, None, ctx.saved_tensors)
    total = d_residual if d_x is None else d_x
    if dh is not None and total is not None:
        total.add_(dh)
    return d_x, d_residual, *others


def _node_gradients(ctx, dy, dh, saved):
    """Return the gradients of a node's inputs."""
    refuse_double("norm")
    h, mean, rstd, weight, bias = saved
    if ctx.numbers[0] == RMS:
        # Not by its size, which a compiled graph need not know.
        mean = None
    needs_rows = any(ctx.needs_input_grad[:2])
    if ctx.main_grads[2] is None and ctx.main_grads[3] is None:
        needs = [needs_rows, *ctx.needs_input_grad[2:4]]
        gradients = norm_gradients(dy, dh, h, mean, rstd, weight, bias, *ctx.numbers, needs)
        d_x, *sums = [t if need else None for t, need in zip(gradients, needs, strict=True)]
    else:
        d_x, sums = _add_gradients(ctx, dy, dh, h, mean, rstd, weight, bias, needs_rows)
    of_rows = [d_x if need else None for need in ctx.needs_input_grad[:2]]
    return *of_rows, *sums, None, None, None, None, None


def _add_gradients(ctx, dy, dh, h, mean, rstd, weight, bias, needs_rows):
    """(dx, [dweight, dbias]) of a node with main_grads; None for what was added to one."""
    inputs = h, h if ctx.residual else None, weight, bias
    targets = destination.targets(ctx, inputs, ctx.main_grads, (dy, dh))
    targets = targets.get(2), targets.get(3)
    wanted = [t is not None and t.wanted for t in targets]
    into = [None if t is None else t.into for t in targets]
    d_x, *sums = norm_backward(
        dy, dh, h, mean, rstd, weight, bias, *into, *ctx.numbers,
        [needs_rows, *wanted],
    )  # fmt: skip
    for i, target in enumerate(targets):
        if target is not None and target.wanted:
            target.written()
        if target is None or not target.returned:
            sums[i] = None
    return d_x, sums


_vmap_refused = refuse_vmap("norm", "is not supported; leading dimensions of x do the same")


_OPERANDS = (
    "Tensor? weight, Tensor? bias, Tensor? main_grad, Tensor? bias_main_grad, "
    "str kind, float eps, float offset"
)
norm = define_op(
    f"norm(Tensor x, Tensor? residual, {_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)",
    check=_check,
    check_each=_check_each,
    plan=_plan,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=_vmap_refused,
)
norm_in_steps = define_op(
    f"norm_in_steps(Tensor x, Tensor residual, {_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)",
    check=_check,
    check_each=_check_each,
    plan=_plan,
    fake=_fake,
    setup=_setup,
    backward=_backward_in_steps,
    vmap=_vmap_refused,
)
_SAVED = "Tensor h, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias"
_RULE = "str kind, float eps, float offset, bool[] needs"
norm_gradients = define_op(
    f"norm_gradients(Tensor dy, Tensor? dh, {_SAVED}, {_RULE}) -> (Tensor, Tensor, Tensor)",
    plan=_plan_backward_alone,
    fake=lambda *args: _fake_backward(*args[:7], None, None, *args[7:]),
    vmap=_vmap_refused,
)
norm_backward = define_op(
    f"norm_backward(Tensor dy, Tensor? dh, {_SAVED}, Tensor(a!)? main_grad, "
    f"Tensor(b!)? bias_main_grad, {_RULE}) -> (Tensor, Tensor, Tensor)",
    plan=_plan_backward,
    fake=_fake_backward,
    vmap=_vmap_refused,
)
