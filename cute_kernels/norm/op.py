"""The torch ops of norm: schemas, fakes, autograd.

    norm            (y, h, mean, rstd) of x [..., D]; h is empty without a residual
    norm_backward   (dx, dweight, dbias); a gradient is added to its main_grad if there is one

What is not there is empty: the mean of an RMS norm, a gradient that goes elsewhere.
"""

from __future__ import annotations

import math

import torch
from torch.compiler import is_dynamo_compiling

from .. import contracts, dispatch
from .. import main_grad as destination
from ..again import Calls
from ..arch import CPU, CUTE_SM90, TRITON
from ..dispatch import Implementation
from ..errors import UnsupportedTransformError
from ..operands import flat_rows
from ..torch_ops import define_op
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
                prepare=f"{__package__}.prepared:forward" if _function == "forward" else "",
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
    name: str, kind: str, given: Operands, eps: object, offset: object = 0.0
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y, or (y, h) of a call with a residual, of the function ``name``."""
    x, weight, bias, residual, main_grad, bias_main_grad = given
    options = kind, eps, offset, type(eps), type(offset)
    plain = main_grad is None and bias_main_grad is None and not is_dynamo_compiling()
    known = plain and calls.find(options, x, residual, weight, bias)
    if known:
        y, h, _, _ = known(x, residual, weight, bias, None, None, kind, eps, offset)
    else:
        rule = checks.norm(name, kind, given, eps, offset)
        if known is None:
            calls.keep(options, (x, residual, weight, bias), rule)
        y, h, _, _ = norm(x, residual, weight, bias, main_grad, bias_main_grad, *rule)
    return y if residual is None else (y, h)


def _of_rows(function: str, like: torch.Tensor):
    return dispatch.launcher(f"norm_{function}", like.device, like.dtype)


def _run(x, residual, weight, bias, main_grad, bias_main_grad, kind, eps, offset):
    # Here, for a compiled graph too: a tensor that is traced has no address.
    _apart(main_grad, bias_main_grad, x=x, residual=residual, weight=weight, bias=bias)
    if x.numel() == 0:
        return _fake(x, residual, weight, bias, main_grad, bias_main_grad, kind, eps, offset)
    rows = flat_rows(x, "norm")
    added = None if residual is None else flat_rows(residual, "norm")
    rule, scale = Rule(kind, eps, offset), Scale(weight, bias)
    made = _of_rows("forward", x)(rows, added, scale, rule)
    h = x.new_empty(0) if made.h is None else made.h.view(x.shape)
    mean = made.rstd.new_empty(0) if made.mean is None else made.mean
    return made.y if rows is x else made.y.view(x.shape), h, mean, made.rstd


def _apart(main_grad, bias_main_grad, **read):
    """Check that backward can add into both main_grads: neither aliases an operand or the other."""
    if main_grad is not None:
        destination.apart(main_grad, bias_main_grad=bias_main_grad, **read)
    if bias_main_grad is not None:
        destination.apart(bias_main_grad, "bias_main_grad", **read)


def _prepare(x, residual, weight, bias, rule):
    """`_run` without main_grads, for calls like this one."""
    strided = all(t is None or t.is_contiguous() for t in (x, residual))
    if x.numel() == 0 or not strided:
        return None
    scale = Scale(weight, bias)
    return dispatch.prepared("norm_forward", x.device, x.dtype, x, residual, scale, rule)


def _prepare_op(x, residual, weight, bias, main_grad, bias_main_grad, kind, eps, offset):
    if main_grad is not None or bias_main_grad is not None:
        return None
    launch = _prepare(x, residual, weight, bias, Rule(kind, eps, offset))

    def run(x, *others):
        y, h, mean, rstd = launch(x, *others)
        h = x.new_empty(0) if h is None else h
        return y, h, rstd.new_empty(0) if mean is None else mean, rstd

    return launch and run


#: Calls of both functions without a main_grad, by kind, eps and offset.
calls = Calls(lambda *call: norm.computer(_prepare(*call)))


def _fake(x, residual, weight, bias, main_grad, bias_main_grad, kind, eps, offset):
    rows = math.prod(x.shape[:-1])  # not Size.numel(), which fixes what torch.compile varies
    mean = x.new_empty(rows if kind == LAYER else 0, dtype=torch.float32)
    h = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape), h, mean, x.new_empty(rows, dtype=torch.float32)


def _run_backward(
    dy, dh, h, mean, rstd, weight, bias, main_grad, bias_main_grad, kind, eps, offset, needs
):
    _apart(main_grad, bias_main_grad, dy=dy, dh=dh)
    d_x, d_weight, d_bias = _fake_backward(
        dy, dh, h, mean, rstd, weight, bias, main_grad, bias_main_grad, kind, eps, offset, needs
    )
    if h.numel() == 0:
        return d_x, d_weight.zero_(), d_bias.zero_()
    rows = flat_rows(h, "norm")
    given = Upstream(*(None if g is None else flat_rows(g, "norm") for g in (dy, dh)))
    stats = (mean if kind == LAYER else None, rstd)
    wanted = any(needs[1:])
    launch = _of_rows("backward", h)
    d_rows, parts = launch(given, rows, stats, Scale(weight, bias), Rule(kind, eps, offset), wanted)
    if wanted:
        sums = (parts.weight, main_grad, weight), (parts.bias, bias_main_grad, bias)
        chosen = [at for at in (0, 1) if needs[1 + at]]
        made = _of_rows("add_parts", h)(*zip(*(sums[at] for at in chosen), strict=True))
        results = [d_weight, d_bias]
        for at, own in zip(chosen, made, strict=True):
            results[at] = results[at] if own is None else own
        d_weight, d_bias = results
    return d_rows.view(h.shape) if needs[0] else d_x, d_weight, d_bias


def _fake_backward(
    dy, dh, h, mean, rstd, weight, bias, main_grad, bias_main_grad, kind, eps, offset, needs
):
    own = (needs[0], needs[1] and main_grad is None, needs[2] and bias_main_grad is None)
    made = zip((h, weight, bias), own, strict=True)
    return tuple(t.new_empty(t.shape) if need else h.new_empty(0) for t, need in made)


def _setup(ctx, inputs, output):
    x, residual, weight, bias, main_grad, bias_main_grad, *ctx.numbers = inputs
    _, h, mean, rstd = output
    ctx.residual = residual is not None
    ctx.save_for_backward(h if ctx.residual else x, mean, rstd, weight, bias)
    # What is not there is empty, and None of a remembered call, which has no schema.
    numbers = (mean, rstd) if ctx.residual else (h, mean, rstd)
    # Not saved tensors: backward of an earlier micro-batch may write them before ours reads them.
    ctx.main_grads = {2: main_grad, 3: bias_main_grad}
    ctx.mark_non_differentiable(*(t for t in numbers if t is not None))
    # Zeros for statistics would be a kernel for each backward.
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
        # Not left out: 0 + -0 is 0, and compiled graphs have zeros here.
        dh = torch.zeros_like(h)
    inputs = h, h if ctx.residual else None, weight, bias
    targets = destination.targets(ctx, inputs, ctx.main_grads, (dy, dh))
    of_weight, of_bias = targets.get(2), targets.get(3)
    rows = any(ctx.needs_input_grad[:2])
    wanted = [t is not None and t.wanted for t in (of_weight, of_bias)]
    into = [None if t is None else t.into for t in (of_weight, of_bias)]
    d_x, *made = norm_backward(
        dy, dh, h, mean, rstd, weight, bias, *into, *ctx.numbers,
        [rows, *wanted],
    )  # fmt: skip
    given = [None, None]
    for at, (target, own) in enumerate(zip((of_weight, of_bias), made, strict=True)):
        if target is not None and target.wanted:
            target.written()
            given[at] = own if target.returned else None
    needs = ctx.needs_input_grad
    of_rows = [d_x if need else None for need in needs[:2]]
    return *of_rows, *given, None, None, None, None, None


def _vmap_refused(info, in_dims, *args):
    raise UnsupportedTransformError(
        "cute_kernels.norm: torch.func.vmap is not supported; leading dimensions of x do the same"
    )


norm = define_op(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? main_grad, "
    "Tensor? bias_main_grad, str kind, float eps, float offset) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=_vmap_refused,
    prepare=_prepare_op,
)
norm_backward = define_op(
    "norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, Tensor(a!)? main_grad, Tensor(b!)? bias_main_grad, str kind, float eps, "
    "float offset, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    fake=_fake_backward,
    vmap=_vmap_refused,
)
