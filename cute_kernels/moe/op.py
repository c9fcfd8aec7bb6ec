"""The torch ops of grouped products: schemas, fakes, autograd.

    grouped_linear     y[t]  = x[t] W[e]ᵀ + b[e]    x [T, K], W [E, N, K], b [E, N]  -> y [T, N]
    grouped_dx         dx[t] = dy[t] W[e]           dy [T, N], W [E, N, K]           -> dx [T, K]
    grouped_dw         dW[e] = Σ dy[t]ᵀ x[t]        dy [T, N], x [T, K]              -> dW [E, N, K]
    grouped_dw_        main_grad[e] += the same     the accumulator starts from it, in fp32
    grouped_dbias      db[e] = Σ dy[t]              dy [T, N]                        -> db [E, N]

    grouped_leaf_sums  the leaves of a[t] b[e]ᵀ     a [T, K'], b [E, N, K'], K' a slice of K
                                                                         -> fp32 [leaves, T, N]

Expert e has the rows offsets[e] to offsets[e + 1].  The set is closed under differentiation.  Each
expert's products are those of ``ck.linear``, byte for byte; no sum crosses experts.

``order`` is that of y and dx.  A sum over tokens is a chain under either order.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ..arch import CUTE_SM90, TRITON
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.dispatch import Implementation
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_double, refuse_vmap
from . import checks, config

for _kernel in (
    "grouped_gemm", "grouped_tree", "grouped_leaf_sums", "grouped_dw", "grouped_column_sum",
):  # fmt: skip
    _implementations = dispatch.named_alike(__package__, _kernel, dispatch.OF_PRODUCTS)
    if _kernel == "grouped_column_sum":  # SM90 has no kernel of its own
        _on_triton = _implementations[TRITON].launcher
        _implementations[CUTE_SM90] = Implementation(_on_triton, dispatch.HALF)
    dispatch.register(_kernel, _implementations, contract="grouped_linear")

dispatch.register_contracts(("grouped_linear",), config.KEPT, config.contract_facts, "grouped_gemm")


def _plan_kernel(kernel: str, first: torch.Tensor, *operands: object) -> Plan:
    return dispatch.plan(kernel, first.device, first.dtype, first, *operands)


def _check_values(offsets: torch.Tensor, rows: torch.Tensor) -> None:
    """Check offsets on a CPU, in each call: a CPU's plans are not cached."""
    checks.offset_values("expert_offsets", offsets, rows.shape[0])


def _plan_product(a, b, offsets, bias, order) -> Plan:
    """Plan of a [T, K] · b[e] [N, K]ᵀ + bias[e]; sizes of zero need no kernel."""
    _check_values(offsets, a)
    shape = a.shape[0], b.shape[1]
    if 0 in shape:
        return Plan(lambda a, *_: a.new_empty(shape), cacheable=False)
    if a.shape[1] == 0:
        return Plan(_without_products, cacheable=False)
    kernel = "grouped_tree" if order == config.TREE else "grouped_gemm"
    return _plan_kernel(kernel, a, b, offsets, bias)


def _without_products(a, b, offsets, bias) -> torch.Tensor:
    """The result for K = 0."""
    out = a.new_zeros(a.shape[0], b.shape[1])
    return out if bias is None else out.copy_(bias[expert_of_rows(offsets, len(out))])


def expert_of_rows(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """The expert of each row: [T], int64."""
    index = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    experts = torch.searchsorted(offsets[1:].contiguous(), index, right=True)
    return experts.clamp(max=len(offsets) - 2)


def _plan_linear(x, weight, offsets, bias, main_grad, order):
    """Plan of `grouped_linear`."""
    plan = _plan_product(x, weight, offsets, bias, order)
    run_product = plan.run

    def run(x, weight, offsets, bias, main_grad, order):
        if main_grad is not None:
            # Here, for a compiled graph too: a tensor that is traced has no address.
            destination.check_no_alias(main_grad, x=x, weight=weight, bias=bias)
        return run_product(x, weight, offsets, bias)

    return replace(plan, run=run)


def _plan_dx(dy, weight, offsets, order):
    """Plan of `grouped_dx`."""
    plan = _plan_product(dy, weight.mT, offsets, None, order)
    run_product = plan.run
    return replace(plan, run=lambda dy, w, offsets, order: run_product(dy, w.mT, offsets, None))


def _plan_leaf_sums(a, b, offsets, length):
    """Plan of `grouped_leaf_sums`."""
    _check_values(offsets, a)
    if 0 in (*a.shape, b.shape[1]):
        return Plan(_fake_leaf_sums, cacheable=False)
    return _plan_kernel("grouped_leaf_sums", a, b, offsets, length)


def _fake_leaf_sums(a, b, offsets, length):
    (t, k), n = a.shape, b.shape[1]
    return a.new_empty(-(-k // length), t, n, dtype=torch.float32)


def _plan_dw(dy, x, offsets, order):
    """Plan of `grouped_dw`."""
    _check_values(offsets, dy)
    if not dy.numel() or not x.numel():
        shape = _weight_shape(dy, x, offsets)
        return Plan(lambda dy, *_: dy.new_zeros(shape), cacheable=False)
    plan = _plan_kernel("grouped_dw", dy, x, offsets, None)
    run_product = plan.run
    return replace(plan, run=lambda dy, x, offsets, order: run_product(dy, x, offsets, None))


def _plan_dw_(dy, x, offsets, main_grad):
    """Plan of `grouped_dw_`."""
    _check_values(offsets, dy)
    run_product = None
    if dy.numel() and x.numel():
        run_product = _plan_kernel("grouped_dw", dy, x, offsets, main_grad).run

    def run(dy, x, offsets, main_grad):
        # The gradient that comes in is known only here: y.backward(main_grad) passes main_grad.
        destination.check_no_alias(main_grad, dy=dy)
        if run_product is not None:
            run_product(dy, x, offsets, main_grad)

    return Plan(run)


def _plan_dbias(dy, offsets):
    """Plan of `grouped_dbias`."""
    _check_values(offsets, dy)
    if not dy.numel():
        shape = len(offsets) - 1, dy.shape[1]
        return Plan(lambda dy, offsets: dy.new_zeros(shape), cacheable=False)
    return _plan_kernel("grouped_column_sum", dy, offsets)


def _weight_shape(dy, x, offsets) -> tuple[int, int, int]:
    return offsets.shape[0] - 1, dy.shape[1], x.shape[1]


def _setup_linear(ctx, inputs, output):
    x, weight, offsets, _, main_grad, ctx.order = inputs
    needs_weight = ctx.needs_input_grad[1]
    ctx.save_for_backward(x if needs_weight else None, weight, offsets)
    # Not a saved tensor: backward of an earlier micro-batch may write it before ours reads it.
    ctx.main_grad = main_grad if needs_weight else None


def _backward_linear(ctx, dy):
    x, weight, offsets = ctx.saved_tensors
    if ctx.main_grad is not None:
        refuse_double("grouped_linear", destination.NO_SECOND_GRADIENT)
    needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
    dx = grouped_dx(dy, weight, offsets, ctx.order) if needs_x else None
    dw = weight_gradient(ctx, dy, x, offsets) if needs_weight else None
    db = grouped_dbias(dy, offsets) if needs_bias else None
    return dx, dw, None, db, None, None


def weight_gradient(ctx, dy, x, offsets) -> torch.Tensor | None:
    """dW, or None where it went into main_grad, which stands for the parameter's ``grad``.

    For a node whose second input is the weight, and that has ``main_grad`` and ``order``.
    """
    target = destination.targets(ctx, (True, True), {1: ctx.main_grad}, (dy,))[1]
    if target.into is not None:
        grouped_dw_(dy, x, offsets, target.into)
        target.written()
    return grouped_dw(dy, x, offsets, ctx.order) if target.returned else None


def _backward_dx(ctx, g):
    dy, weight, offsets = ctx.saved_tensors
    needs_dy, needs_weight = ctx.needs_input_grad[:2]
    d_dy = grouped_linear(g, weight, offsets, None, None, *ctx.options) if needs_dy else None
    d_weight = grouped_dw(dy, g, offsets, *ctx.options) if needs_weight else None
    return d_dy, d_weight, None, None


def _backward_dw(ctx, g):
    dy, x, offsets = ctx.saved_tensors
    needs_dy, needs_x = ctx.needs_input_grad[:2]
    d_dy = grouped_linear(x, g, offsets, None, None, *ctx.options) if needs_dy else None
    d_x = grouped_dx(dy, g, offsets, *ctx.options) if needs_x else None
    return d_dy, d_x, None, None


def _setup_dbias(ctx, inputs, output):
    dy, offsets = inputs
    ctx.rows = dy.shape[0]
    ctx.save_for_backward(offsets)


def _backward_dbias(ctx, g):
    (offsets,) = ctx.saved_tensors
    return g[expert_of_rows(offsets, ctx.rows)], None


_no_vmap = refuse_vmap(
    "grouped_linear",
    "is not supported, as the mapped dimension would add rows to every expert; call it for each "
    "part",
)
define = functools.partial(define_op, vmap=_no_vmap)
grouped_linear = define(
    "grouped_linear(Tensor x, Tensor weight, Tensor offsets, Tensor? bias, Tensor? main_grad, "
    "str order) -> Tensor",
    check=checks.grouped_linear,
    # Which memory main_grad has, and what reduces its parameter, is in no signature.
    check_each=lambda x, weight, offsets, bias, main_grad, order: main_grad is not None,
    plan=_plan_linear,
    fake=lambda x, w, offsets, bias, main_grad, order: x.new_empty(x.shape[0], w.shape[1]),
    setup=_setup_linear,
    backward=_backward_linear,
    autocast_args=(0, 1, 3),
)
grouped_dx = define(
    "grouped_dx(Tensor dy, Tensor weight, Tensor offsets, str order) -> Tensor",
    plan=_plan_dx,
    fake=lambda dy, w, offsets, order: dy.new_empty(dy.shape[0], w.shape[2]),
    backward=_backward_dx,
)
grouped_dw = define(
    "grouped_dw(Tensor dy, Tensor x, Tensor offsets, str order) -> Tensor",
    plan=_plan_dw,
    fake=lambda dy, x, offsets, order: dy.new_empty(_weight_shape(dy, x, offsets)),
    backward=_backward_dw,
)
grouped_dw_ = define(
    "grouped_dw_(Tensor dy, Tensor x, Tensor offsets, Tensor(a!) main_grad) -> ()",
    plan=_plan_dw_,
    fake=lambda dy, x, offsets, main_grad: None,
)
grouped_dbias = define(
    "grouped_dbias(Tensor dy, Tensor offsets) -> Tensor",
    plan=_plan_dbias,
    fake=lambda dy, offsets: dy.new_empty(offsets.shape[0] - 1, dy.shape[1]),
    setup=_setup_dbias,
    backward=_backward_dbias,
)
grouped_leaf_sums = define_op(
    "grouped_leaf_sums(Tensor a, Tensor b, Tensor offsets, int length) -> Tensor",
    plan=_plan_leaf_sums,
    fake=_fake_leaf_sums,
)
