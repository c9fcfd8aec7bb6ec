"""The torch ops of gemm: schemas, fakes, autograd.

    linear      y  = x Wᵀ + b          x [..., K], W [N, K], b [N]   -> y [..., N]
    linear_dx   dx = dy W              dy [..., N], W [N, K]         -> dx [..., K]
    linear_dw   dW = dyᵀ x             dy [..., N], x [..., K]       -> dW [N, K]
    linear_dw_  main_grad += dyᵀ x     the accumulator starts from main_grad (fp32)
    linear_dbias  db = Σ dy            dy [..., N]                   -> db [N]
    linear_gradients  (dx, dW, db)     those of ``needs``, in one call; the others are empty

    skinny_linear  y = x Wᵀ + b        x [..., K] of few rows, b [N] or [rows, N]

    leaf_sums   the leaves of a bᵀ     a [M, K'], b [N, K'], K' a slice of K -> fp32 [leaves, M, N]
    add_leaves  their sum, ascending   parts [L, M, N], b [N]        -> [M, N]

The set is closed under differentiation, so double backward works.  Every product is one launcher,
``gemm(a [..., K], b [N, K], bias, accumulator, order)``, on views: no transposing copy; but for
``skinny(x, weight, bias [M, N], deterministic)``, whose order is ``tree``.

A sum over tokens is a chain under either order: a tree's leaves would follow their number, and a
chain is what a token stream can be cut in.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

import torch

from .. import contracts
from ..compile.call import TRANSPOSED, Program, allocator, rows_layout
from ..cpu import ieee
from ..errors import UnsupportedTransformError
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.operands import flat_rows
from ..runtime.plan_cache import LEGACY_VMAP, Plan
from ..runtime.torch_ops import define_op, refuse_double, refuse_vmap
from . import checks, config

_C = torch._C

for _kernel, _contract in (
    ("gemm", "linear"),
    ("column_sum", "linear"),
    ("skinny", "skinny_linear"),
    ("leaf_sums", "linear"),
):
    _implementations = dispatch.named_alike(__package__, _kernel, dispatch.OF_PRODUCTS)
    dispatch.register(_kernel, _implementations, contract=_contract)

_OPS = ("linear", "matmul", "skinny_linear")
dispatch.register_contracts(_OPS, config.KEPT, config.contract_facts, "gemm")


def _rows(x: torch.Tensor) -> torch.Tensor:
    return flat_rows(x, "gemm")


def _plan_product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, order: str) -> Plan:
    """Plan of a [..., K] · b [N, K]ᵀ + bias -> [..., N]; sizes of zero need no kernel."""
    shape = *a.shape[:-1], b.shape[0]
    if 0 in shape:
        return Plan(lambda a, *_: a.new_empty(shape), cacheable=False)
    if a.shape[-1] == 0:
        return Plan(lambda a, b, bias, *_: _without_products(a, bias, shape), cacheable=False)
    return dispatch.plan("gemm", a.device, a.dtype, a, b, bias, None, order)


def _without_products(a, bias, shape) -> torch.Tensor:
    """The result for K = 0."""
    out = a.new_zeros(shape)
    return out if bias is None else out.copy_(bias)


def _plan_linear(x, weight, bias, main_grad, order):
    """Plan of `linear`."""
    plan = _plan_product(x, weight, bias, order)
    run_product = plan.run
    if main_grad is None:

        def run_alone(x, weight, bias, *_):
            return run_product(x, weight, bias, None, order)

        return _replaced(plan, run_alone, (0, 0), (1, 0), (2, 0))

    def run(x, weight, bias, main_grad, order):
        # Here, for a compiled graph too: a tensor that is traced has no address.
        destination.check_no_alias(main_grad, x=x, weight=weight, bias=bias)
        return run_product(x, weight, bias, None, order)

    return replace(plan, run=run)


def _plan_dx(dy, weight, order):
    """Plan of `linear_dx`."""
    plan = _plan_product(dy, weight.mT, None, order)
    run_product = plan.run

    def run(dy, weight, order):
        return run_product(dy, weight.mT, None, None, order)

    return _replaced(plan, run, (0, 0), (1, TRANSPOSED))


def _plan_dw(dy, x, order):
    """Plan of `linear_dw`: the sum over tokens is a chain under either order."""
    plan = _plan_product(_rows(dy).mT, _rows(x).mT, None, config.ORDER)
    run_product = plan.run

    def run(dy, x, order):
        return run_product(_rows(dy).mT, _rows(x).mT, None, None, config.ORDER)

    layouts = rows_layout(dy), rows_layout(x)
    if None in layouts:
        return replace(plan, run=run)
    return _replaced(plan, run, *((i, layout | TRANSPOSED) for i, layout in enumerate(layouts)))


def _replaced(plan: Plan, run: Callable, *sources: tuple[int, int]) -> Plan:
    """``plan`` with another ``run``; ``sources``: of its operands, as `Program.with_arguments`."""
    return replace(
        plan, run=run, program=plan.program and plan.program.with_arguments(run, *sources)
    )


def _plan_dw_(dy, x, main_grad, order):
    """Plan of `linear_dw_`."""
    run_product = None
    if dy.numel() and x.numel():
        operands = _rows(dy).mT, _rows(x).mT, None, main_grad, config.ORDER
        run_product = dispatch.plan("gemm", dy.device, dy.dtype, *operands).run

    def run(dy, x, main_grad, order):
        # The gradient that comes in is known only here: y.backward(main_grad) passes main_grad.
        destination.check_no_alias(main_grad, dy=dy)
        if run_product is not None:
            run_product(_rows(dy).mT, _rows(x).mT, None, main_grad, config.ORDER)

    return Plan(run)


def _plan_dbias(dy, order):
    """Plan of `linear_dbias`."""
    if dy.numel() == 0:
        return Plan(lambda dy, order: dy.new_zeros(dy.shape[-1]), cacheable=False)
    plan = dispatch.plan("column_sum", dy.device, dy.dtype, _rows(dy))
    run_sum = plan.run

    def run(dy, order):
        return run_sum(_rows(dy))

    layout = rows_layout(dy)
    return replace(plan, run=run) if layout is None else _replaced(plan, run, (0, layout))


def _plan_skinny(x, weight, bias, deterministic):
    """Plan of `skinny_linear`."""
    n = weight.shape[0]
    rows = _rows(x)
    shape, m = (*x.shape[:-1], n), rows.shape[0]
    expanded = None if bias is None else bias.expand(m, n)
    if 0 in (*rows.shape, n):
        plan = Plan(lambda rows, weight, bias, _: _without_products(rows, bias, (m, n)))
        plan = replace(plan, cacheable=False)
    else:
        operands = rows, weight, expanded, deterministic
        plan = dispatch.plan("skinny", x.device, x.dtype, *operands)
    run_product, flat = plan.run, x.dim() == 2

    def run(x, weight, bias, deterministic):
        if not deterministic:
            # Here, for a compiled graph too: torch's flag is read at every call.
            contracts.refuse_if_deterministic(*checks.FAST)
        bias = None if bias is None else bias.expand(m, n)
        y = run_product(_rows(x), weight, bias, deterministic)
        return y if flat else y.view(shape)

    return replace(plan, run=run, fresh=plan.fresh and flat)


def _plan_leaf_sums(a, b, length):
    """Plan of `leaf_sums`."""
    if 0 in (*a.shape, b.shape[0]):
        return Plan(_fake_leaf_sums, cacheable=False)
    return dispatch.plan("leaf_sums", a.device, a.dtype, a, b, length)


def _fake_leaf_sums(a, b, length):
    (m, k), n = a.shape, b.shape[0]
    return a.new_empty(-(-k // length), m, n, dtype=torch.float32)


def _run_add_leaves(parts, bias, dtype):
    return add_leaves_into(parts.new_empty(parts.shape[1:], dtype=dtype), (parts,), bias)


def add_leaves_into(
    out: torch.Tensor, sums: Sequence[torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """out [M, N] = the leaves of every tensor of ``sums`` in ascending order + bias, rounded once.

    Args:
        out: Contiguous; it may be the memory of the first leaf, and of no other.
        sums: One to three tensors [leaves, M, N] in fp32, in the order of their leaves; tensors
            without a leaf are left out.
        bias: [N] or None.

    Returns:
        ``out``.

    Elementwise fp32 adds have one result on every device, so this is no backend's; of NaN the
    payload is the device's.  A GPU adds in one Triton launch; without the package triton, in one
    of torch's for each leaf.
    """
    sums = [part for part in sums if len(part)]
    if out.numel() and _adds_by_triton(out.device):
        sums = [part if part[0].is_contiguous() else part.contiguous() for part in sums]
        return _triton_launcher().add_leaves(out, sums, bias)
    first, *rest = (leaf for part in sums for leaf in part)
    # A CPU thread may flush subnormals.
    with ieee.ieee_on(out):
        # The sum begins with a leaf: from +0, a sum of -0 would become +0.
        total = out.copy_(first) if out.dtype == torch.float32 else first.clone()
        for leaf in rest:
            total += leaf
        if bias is not None:
            total += bias.to(torch.float32)
        return out if total is out else out.copy_(total)


def _adds_by_triton(device: torch.device) -> bool:
    return device.type == "cuda" and _triton_installed()


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton_launcher() -> ModuleType:
    return importlib.import_module(f"{__package__}.triton.launch")


def _setup_linear(ctx, inputs, output):
    x, weight, _, main_grad, ctx.order = inputs
    needs_weight = ctx.needs_input_grad[1]
    ctx.save_for_backward(x if needs_weight else None, weight)
    # Not a saved tensor: backward of an earlier micro-batch may write it before ours reads it.
    ctx.main_grad = main_grad if needs_weight else None


def _backward_linear(ctx, dy):
    x, weight = ctx.saved_tensors
    if ctx.main_grad is not None:
        refuse_double("linear", destination.NO_SECOND_GRADIENT)
    needs = ctx.needs_input_grad[:3]
    at_once = ctx.main_grad is None and sum(needs) > 1 and not torch.is_grad_enabled()
    if at_once and not _C._dispatch_tls_is_dispatch_key_included(LEGACY_VMAP):
        grads = linear_gradients(dy, x, weight, ctx.order, list(needs))
        return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None
    dx = dw = db = None
    if needs[0]:
        dx = linear_dx(dy, weight, ctx.order)
    if needs[1]:
        dw = weight_gradient(ctx, dy, x)
    if needs[2]:
        db = linear_dbias(dy, ctx.order)
    return dx, dw, db, None, None


def _plan_linear_gradients(dy, x, weight, order, needs):
    """Plan of `linear_gradients`."""
    plans = (
        _plan_dx(dy, weight, order) if needs[0] else None,
        _plan_dw(dy, x, order) if needs[1] else None,
        _plan_dbias(dy, order) if needs[2] else None,
    )
    run_dx, run_dw, run_dbias = (None if plan is None else plan.run for plan in plans)
    nothing = allocator((0,), dy.dtype, dy.device)

    def run(dy, x, weight, order, needs):
        dx = nothing() if run_dx is None else run_dx(dy, weight, order)
        dw = nothing() if run_dw is None else run_dw(dy, x, order)
        return dx, dw, nothing() if run_dbias is None else run_dbias(dy, order)

    parts = [plan for plan in plans if plan is not None]
    program = _program_of_gradients(run, plans, nothing)
    return Plan(run, all(p.fresh for p in parts), all(p.cacheable for p in parts), program)


def _program_of_gradients(run, plans, nothing) -> Program | None:
    """Program of `linear_gradients` by the plans of dx, dw and dbias; None if one has none."""
    needed = [plan for plan in plans if plan is not None]
    if not needed or not all(p.program is not None and p.program.run is p.run for p in needed):
        return None
    sources = ((0, 0), (2, 0)), ((0, 0), (1, 0)), ((0, 0),)
    program = Program(run, needed[0].program.device, (), (), (0, 1, 2))
    for plan, positions in zip(plans, sources, strict=True):
        if plan is None:
            program = program.with_outputs(nothing)
        else:
            program = program.then(plan.program, *positions)
    return program


def _fake_linear_gradients(dy, x, weight, order, needs):
    shapes = (*dy.shape[:-1], weight.shape[1]), weight.shape, (dy.shape[-1],)
    return tuple(dy.new_empty(s if need else 0) for s, need in zip(shapes, needs, strict=True))


def weight_gradient(ctx, dy, x):
    """dW, or None where it went into main_grad, which stands for the parameter's ``grad``.

    For a node whose second input is the weight, and that has ``main_grad`` and ``order``.
    """
    target = destination.targets(ctx, (True, True), {1: ctx.main_grad}, (dy,))[1]
    if target.into is not None:
        linear_dw_(dy, x, target.into, ctx.order)
        target.written()
    return linear_dw(dy, x, ctx.order) if target.returned else None


def _setup_skinny(ctx, inputs, output):
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
    ctx.bias_per_row = bias is not None and bias.dim() == 2


def _backward_skinny(ctx, dy):
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dx = linear_dx(dy, weight, "tree") if needs_x else None
    dw = linear_dw(dy, x, "tree") if needs_weight else None
    db = None
    if needs_bias:
        db = _rows(dy) if ctx.bias_per_row else linear_dbias(dy, "tree")
    return dx, dw, db, None


def _backward_dx(ctx, g):
    dy, weight = ctx.saved_tensors
    needs_dy, needs_weight = ctx.needs_input_grad[:2]
    d_dy = linear(g, weight, None, None, *ctx.options) if needs_dy else None
    d_weight = linear_dw(dy, g, *ctx.options) if needs_weight else None
    return d_dy, d_weight, None


def _backward_dw(ctx, g):
    dy, x = ctx.saved_tensors
    needs_dy, needs_x = ctx.needs_input_grad[:2]
    d_dy = linear(x, g, None, None, *ctx.options) if needs_dy else None
    d_x = linear_dx(dy, g, *ctx.options) if needs_x else None
    return d_dy, d_x, None


def _setup_dbias(ctx, inputs, output):
    ctx.shape = inputs[0].shape


def _backward_dbias(ctx, g):
    return g.expand(ctx.shape), None


def _vmap_rows(call):
    """vmap over the rows' tensor only: the mapped dimension becomes one more of the row's."""

    def vmap(info, in_dims, rows, *others):
        if any(dim is not None for dim in in_dims[1:]):
            raise UnsupportedTransformError(
                "cute_kernels.linear: torch.func.vmap may map x (or dy) only; weight, bias and "
                "main_grad are shared by all rows.  Loop over the mapped dimension instead."
            )
        return call(rows.movedim(in_dims[0], 0), *others), 0

    return vmap


_vmap_refused = refuse_vmap(
    "linear",
    "over a weight or bias gradient is not supported: it is one ordered sum over all tokens.  Loop "
    "over the mapped dimension instead.",
)
_vmap_refused_of_rows = refuse_vmap(
    "skinny_linear",
    "is not supported, as the mapped dimension would add rows; call "
    "cute_kernels.linear(order='tree'), whose bytes are the same",
)


linear = define_op(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? main_grad, str order) -> Tensor",
    plan=_plan_linear,
    check=checks.linear,
    # Which memory main_grad has, and what reduces its parameter, is in no signature.
    check_each=lambda x, weight, bias, main_grad, order: main_grad is not None,
    fake=lambda x, w, bias, main_grad, order: x.new_empty(*x.shape[:-1], w.shape[0]),
    setup=_setup_linear,
    backward=_backward_linear,
    vmap=_vmap_rows(lambda *args: linear(*args)),
    autocast_args=(0, 1, 2),
)
skinny_linear = define_op(
    "skinny_linear(Tensor x, Tensor weight, Tensor? bias, bool deterministic) -> Tensor",
    plan=_plan_skinny,
    check=checks.skinny,
    fake=lambda x, w, bias, deterministic: x.new_empty(*x.shape[:-1], w.shape[0]),
    setup=_setup_skinny,
    backward=_backward_skinny,
    vmap=_vmap_refused_of_rows,
    autocast_args=(0, 1, 2),
)
linear_dx = define_op(
    "linear_dx(Tensor dy, Tensor weight, str order) -> Tensor",
    plan=_plan_dx,
    fake=lambda dy, w, order: dy.new_empty(*dy.shape[:-1], w.shape[1]),
    backward=_backward_dx,
    vmap=_vmap_rows(lambda *args: linear_dx(*args)),
)
linear_dw = define_op(
    "linear_dw(Tensor dy, Tensor x, str order) -> Tensor",
    plan=_plan_dw,
    fake=lambda dy, x, order: dy.new_empty(dy.shape[-1], x.shape[-1]),
    backward=_backward_dw,
    vmap=_vmap_refused,
)
linear_dw_ = define_op(
    "linear_dw_(Tensor dy, Tensor x, Tensor(a!) main_grad, str order) -> ()",
    plan=_plan_dw_,
    fake=lambda dy, x, main_grad, order: None,
    vmap=_vmap_refused,
)
linear_dbias = define_op(
    "linear_dbias(Tensor dy, str order) -> Tensor",
    plan=_plan_dbias,
    fake=lambda dy, order: dy.new_empty(dy.shape[-1]),
    setup=_setup_dbias,
    backward=_backward_dbias,
    vmap=_vmap_refused,
)
linear_gradients = define_op(
    "linear_gradients(Tensor dy, Tensor? x, Tensor weight, str order, bool[] needs) "
    "-> (Tensor, Tensor, Tensor)",
    plan=_plan_linear_gradients,
    fake=_fake_linear_gradients,
    vmap=_vmap_refused,
)
leaf_sums = define_op(
    "leaf_sums(Tensor a, Tensor b, int length) -> Tensor",
    plan=_plan_leaf_sums,
    fake=_fake_leaf_sums,
)
add_leaves = define_op(
    "add_leaves(Tensor parts, Tensor? bias, ScalarType dtype) -> Tensor",
    _run_add_leaves,
    fake=lambda parts, bias, dtype: parts.new_empty(parts.shape[1:], dtype=dtype),
)
