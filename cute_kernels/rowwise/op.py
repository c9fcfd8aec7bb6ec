"""The torch ops of rowwise: schemas, fakes, autograd.

    activation  f(x)                                        f: one of config.KINDS
    gated       f(gate) up, rounded once; in ``steps``: f(gate) rounded, then torch's product
    softmax, log_softmax         over the last dimension
    rotary_table, rotary         rotary is its own backward, with ``back`` the other way
    rotary_pair                  q and k in one launch, in the steps of torch's eager ops
    embedding                    weight[ids]; embedding_gradient adds dy in the order of tokens
    square_sum, add_sums, scale  of clip_grad_norm_

Each op that is differentiable has one more, ``..._backward``; what it is made of is not
differentiable again, but for rotary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from ..arch import CPU, TRITON
from ..cpu.ieee import ieee_on
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.operands import empty_rows_like, flat_rows
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_double, refuse_vmap
from . import checks, config

_C = torch._C
_DTYPES = dict.fromkeys((TRITON, CPU), dispatch.FLOATS)

#: The kind of an activation -> the public op whose contract covers it.
_OP_OF = {kind: kind for kind in config.KINDS} | {"gelu_tanh": "gelu"}

#: Entry of `dispatch` -> (the op whose contract covers it, the launchers' name).
_LAUNCHERS = {
    "embedding": ("embedding", "embedding"),
    "embedding_gradient": ("embedding", "embedding_gradient"),
    "softmax": ("softmax", "softmax"),
    "softmax_backward": ("softmax", "softmax_backward"),
    "log_softmax": ("log_softmax", "log_softmax"),
    "log_softmax_backward": ("log_softmax", "log_softmax_backward"),
    "rotary_table": ("rotary_table", "rotary_table"),
    "apply_rotary": ("apply_rotary", "rotary"),
    "apply_rotary_pos_emb": ("apply_rotary_pos_emb", "rotary_pair"),
    "clip_grad_norm_": ("clip_grad_norm_", "square_sum"),
    "clip_grad_norm_sums": ("clip_grad_norm_", "add_sums"),
    "clip_grad_norm_scale": ("clip_grad_norm_", "scale_"),
}
for _name in ("silu", "gelu", "sigmoid", "tanh"):
    _LAUNCHERS[_name] = (_name, "activation")
    _LAUNCHERS[f"{_name}_backward"] = (_name, "activation_backward")
for _name in ("silu", "gelu"):
    # The contract of a product in steps is the activation's: the product is torch's.
    for _entry, _contract in ((f"{_name}_mul", f"{_name}_mul"), (f"{_name}_mul_in_steps", _name)):
        _LAUNCHERS[_entry] = (_contract, "gated")
        _LAUNCHERS[f"{_entry}_backward"] = (_contract, "gated_backward")
    _LAUNCHERS[f"{_name}_mul_in_steps_rows"] = (_name, "gated_rows")

#: Launchers with a planner.
_PLANNED = ("activation", "activation_backward", "gated", "gated_backward", "rotary_pair")

for _entry, (_contract, _function) in _LAUNCHERS.items():
    _planned = (TRITON,) if _function in _PLANNED else ()
    _implementations = dispatch.named_alike(__package__, _function, _DTYPES, _planned)
    dispatch.register(_entry, _implementations, contract=_contract)

for _name, _kept in config.KEPT.items():
    _facts = config.FACTS.get(_name, config.contract_facts)
    dispatch.register_contracts((_name,), _kept, _facts, _name)


def _launcher(entry: str, t: torch.Tensor) -> Callable:
    return dispatch.launcher(entry, t.device, t.dtype)


def _rows_only(call: Callable) -> Callable:
    """Add a vmap rule for tensors of one shape: the mapped dimension becomes the first one."""

    def vmap(info, in_dims, *args):
        mapped = [
            a if not isinstance(a, torch.Tensor)
            else a.expand(info.batch_size, *a.shape) if dim is None
            else a.movedim(dim, 0)
            for a, dim in zip(args, in_dims, strict=True)
        ]  # fmt: skip
        results = call(*mapped)
        return results, (0,) * len(results) if isinstance(results, tuple) else 0

    return vmap


_vmap_refused = refuse_vmap("rowwise", "is not supported; leading dimensions do the same")


# ---- elementwise functions -----------------------------------------------------------------------


def _like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocate a contiguous tensor like ``x``: empty, or fake."""
    return x.new_empty(x.shape, dtype=dtype)


def _plan_elements(entry: str, *args) -> Plan:
    """Plan of a launcher for tensors of one shape; args: those of the op."""
    first = args[0]
    if not first.numel():
        # An activation has a kind; a product has two tensors before it, its backward three.
        fake = _fake_gated_backward if len(args) == 5 else lambda x, *_: _like(x)
        return Plan(fake, cacheable=False)
    return dispatch.plan(entry, first.device, first.dtype, *args)


def _plan_activation(x, kind):
    return _plan_elements(_OP_OF[kind], x, kind)


def _plan_activation_backward(dy, x, kind):
    return _plan_elements(f"{_OP_OF[kind]}_backward", dy, x, kind)


def _gated_entry(kind: str, steps: bool) -> str:
    return f"{_OP_OF[kind]}_mul" + "_in_steps" * steps


def _plan_gated(gate, up, kind, steps):
    return _plan_elements(_gated_entry(kind, steps), gate, up, kind, steps)


def _plan_gated_backward(dy, gate, up, kind, steps):
    return _plan_elements(f"{_gated_entry(kind, steps)}_backward", dy, gate, up, kind, steps)


def _fake_gated_backward(dy, gate, up, kind, steps):
    return _like(gate), _like(up)


def _backward_gated(ctx, dy):
    gradients = gated_backward(dy, *ctx.saved_tensors, *ctx.options)
    wanted = zip(gradients, ctx.needs_input_grad, strict=False)
    return *(g if need else None for g, need in wanted), None, None


activation = define_op(
    "activation(Tensor x, str kind) -> Tensor",
    check=lambda x, kind: checks.element(_OP_OF[kind], x),
    plan=_plan_activation,
    fake=lambda x, kind: _like(x),
    backward=lambda ctx, dy: (activation_backward(dy, *ctx.saved_tensors, *ctx.options), None),
    vmap=_rows_only(lambda *args: activation(*args)),
)
activation_backward = define_op(
    "activation_backward(Tensor dy, Tensor x, str kind) -> Tensor",
    plan=_plan_activation_backward,
    fake=lambda dy, x, kind: _like(x),
    vmap=_rows_only(lambda *args: activation_backward(*args)),
)
gated = define_op(
    "gated(Tensor gate, Tensor up, str kind, bool steps) -> Tensor",
    check=lambda gate, up, kind, steps: checks.gated(f"{_OP_OF[kind]}_mul", gate, up),
    plan=_plan_gated,
    fake=lambda gate, up, kind, steps: _like(gate),
    backward=_backward_gated,
    vmap=_rows_only(lambda *args: gated(*args)),
)
gated_backward = define_op(
    "gated_backward(Tensor dy, Tensor gate, Tensor up, str kind, bool steps) -> (Tensor, Tensor)",
    plan=_plan_gated_backward,
    fake=_fake_gated_backward,
    vmap=_rows_only(lambda *args: gated_backward(*args)),
)


def gated_rows(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute f(x[..., :N]) x[..., N:] in steps, contiguous; no gradient.

    Halves of a row are views with gaps, which `gated` would copy.
    """
    if not x.numel():
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    return _launcher(f"{_gated_entry(kind, True)}_rows", x)(x, kind)


# ---- softmax -------------------------------------------------------------------------------------


def _over_rows(
    entry: str, first: torch.Tensor, operands: tuple, dtype: torch.dtype
) -> torch.Tensor:
    """Run a launcher of rows [M, N]; ``operands``: an optional second tensor, and options."""
    like = next((t for t in operands if isinstance(t, torch.Tensor)), first)
    if not like.numel():
        return _like(like, dtype)
    rows = [flat_rows(a, entry) if isinstance(a, torch.Tensor) else a for a in (first, *operands)]
    return _launcher(entry, like)(*rows).view(like.shape)


def _setup_softmax(ctx, inputs, output):
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(output)


softmax = define_op(
    "softmax(Tensor x, ScalarType dtype) -> Tensor",
    lambda x, dtype: _over_rows("softmax", x, (dtype,), dtype),
    fake=_like,
    setup=_setup_softmax,
    backward=lambda ctx, dy: (softmax_backward(dy, *ctx.saved_tensors, ctx.dtype), None),
    vmap=_rows_only(lambda *args: softmax(*args)),
)
softmax_backward = define_op(
    "softmax_backward(Tensor dy, Tensor y, ScalarType dtype) -> Tensor",
    lambda dy, y, dtype: _over_rows("softmax_backward", dy, (y, dtype), dtype),
    fake=lambda dy, y, dtype: _like(y, dtype),
    vmap=_rows_only(lambda *args: softmax_backward(*args)),
)
log_softmax = define_op(
    "log_softmax(Tensor x, ScalarType dtype) -> Tensor",
    lambda x, dtype: _over_rows("log_softmax", x, (dtype,), dtype),
    fake=_like,
    backward=lambda ctx, dy: (log_softmax_backward(dy, *ctx.saved_tensors), None),
    vmap=_rows_only(lambda *args: log_softmax(*args)),
)
log_softmax_backward = define_op(
    "log_softmax_backward(Tensor dy, Tensor x) -> Tensor",
    lambda dy, x: _over_rows("log_softmax_backward", dy, (x,), x.dtype),
    fake=lambda dy, x: _like(x),
    vmap=_rows_only(lambda *args: log_softmax_backward(*args)),
)


# ---- rotary --------------------------------------------------------------------------------------


def _fake_rotary_table(positions, inv_freq, scaling, dtype):
    shape = (*positions.shape, 2 * inv_freq.shape[0])
    return tuple(inv_freq.new_empty(shape, dtype=dtype) for _ in range(2))


def _plan_rotary_table(positions, inv_freq, scaling, dtype):
    if not positions.numel() or not inv_freq.numel():
        return Plan(_fake_rotary_table, cacheable=False)
    # A kernel's numbers are fp32.
    rounded = torch.tensor(scaling, dtype=torch.float32, device="cpu").item()
    operands = positions.reshape(-1), inv_freq, rounded, dtype
    launch = dispatch.plan("rotary_table", inv_freq.device, dtype, *operands).run
    shape = *positions.shape, -1

    def run(positions, inv_freq, *_):
        tables = launch(positions.reshape(-1), inv_freq, rounded, dtype)
        return tuple([t.view(shape) for t in tables])

    return Plan(run, fresh=False)


def _run_rotary(x, cos, sin, back):
    if not x.numel():
        return _like(x)
    lead = x.shape[:-1]
    tables = [t.expand(*lead, t.shape[-1]) for t in (cos, sin)]
    four = [t[(None,) * (4 - t.dim())] for t in (x, *tables)]
    return _launcher("apply_rotary", x)(*four, back).view(x.shape)


def _setup_rotary(ctx, inputs, output):
    _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _backward_rotary(ctx, dy):
    return rotary(dy, *ctx.saved_tensors, not ctx.back), None, None, None


rotary_table = define_op(
    "rotary_table(Tensor positions, Tensor inv_freq, float scaling, ScalarType dtype) "
    "-> (Tensor, Tensor)",
    plan=_plan_rotary_table,
    fake=_fake_rotary_table,
    vmap=_vmap_refused,
)
rotary = define_op(
    "rotary(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor",
    _run_rotary,
    fake=lambda x, cos, sin, back: _like(x),
    setup=_setup_rotary,
    backward=_backward_rotary,
    vmap=_vmap_refused,
)


def _fake_rotary_pair(q, k, cos, sin, dim, dtype):
    dtype = dtype or config.promoted(q.dtype, cos.dtype)
    return empty_rows_like(q, dtype), empty_rows_like(k, dtype)


def _plan_rotary_pair(q, k, cos, sin, dim, dtype):
    """Plan of `rotary_pair`; ``dtype``: of the results, or None."""
    dtype = dtype or config.promoted(q.dtype, cos.dtype)
    return _plan_pair(q.dtype, q, k, cos, sin, dim, dtype, False)


def _plan_rotary_pair_backward(dq, dk, cos, sin, dim, dtype):
    """Plan of `rotary_pair_backward`; ``dtype``: of q and k in the forward."""
    return _plan_pair(dtype, dq, dk, cos, sin, dim, dtype, True)


def _plan_pair(dtype_of_q, q, k, cos, sin, *options):
    """Plan of the rotation of q and k, or of their gradients."""
    if not (q.numel() or k.numel()):
        return Plan(_fake_rotary_pair, cacheable=False)
    operands = q, k, cos, sin, *options
    plan = dispatch.plan("apply_rotary_pos_emb", q.device, dtype_of_q, *operands)
    launch = plan.run
    return replace(plan, run=lambda q, k, cos, sin, *_: launch(q, k, cos, sin, *options))


def _setup_rotary_pair(ctx, inputs, output):
    q, _, cos, sin, ctx.dim, _ = inputs
    ctx.dtype = q.dtype
    ctx.save_for_backward(cos, sin)
    ctx.set_materialize_grads(False)


def _backward_rotary_pair(ctx, dq, dk):
    # A gradient that is missing stays so; the launch takes two.
    present = [g is not None for g in (dq, dk)]
    gradients = None, None
    if any(present):
        pair = dq if present[0] else dk, dk if present[1] else dq
        gradients = rotary_pair_backward(*pair, *ctx.saved_tensors, ctx.dim, ctx.dtype)
    wanted = [a and b for a, b in zip(present, ctx.needs_input_grad, strict=False)]
    return *(g if want else None for g, want in zip(gradients, wanted, strict=True)), *[None] * 4


def _have_gradient(q, k, cos, sin, *_) -> bool:
    """Whether tables, which have none, ask for a gradient: no signature says so."""
    return getattr(cos, "requires_grad", False) or getattr(sin, "requires_grad", False)


rotary_pair = define_op(
    "rotary_pair(Tensor q, Tensor k, Tensor cos, Tensor sin, int dim, ScalarType? dtype) "
    "-> (Tensor, Tensor)",
    check=checks.rotary_pos_emb,
    check_each=_have_gradient,
    plan=_plan_rotary_pair,
    fake=_fake_rotary_pair,
    setup=_setup_rotary_pair,
    backward=_backward_rotary_pair,
    vmap=_vmap_refused,
)
rotary_pair_backward = define_op(
    "rotary_pair_backward(Tensor dq, Tensor dk, Tensor cos, Tensor sin, int dim, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    plan=_plan_rotary_pair_backward,
    fake=_fake_rotary_pair,
    vmap=_vmap_refused,
)


def rotate_if_taken(*args) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`rotary_pair`, or None for a call that it refuses and torch's own ops take."""
    if is_dynamo_compiling() or _have_gradient(*args):
        return _rotate_if_taken(*args)
    return _rotate_by_plan(*args)


def _rotate_if_taken(*args):
    if not is_dynamo_compiling() and (
        _C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        return None
    return rotary_pair(*args) if checks.is_rotary_pos_emb(*args) else None


_rotate_by_plan = rotary_pair.or_else(_rotate_if_taken)


# ---- embedding -----------------------------------------------------------------------------------


def _plan_embedding(ids, weight, main_grad, padding):
    plan = Plan(lambda ids, weight: _fake_embedding(ids, weight, None, padding), cacheable=False)
    if ids.numel() and weight.shape[1]:
        plan = dispatch.plan("embedding", weight.device, weight.dtype, ids, weight)
    look_up = plan.run

    def run(ids, weight, main_grad, padding):
        # Which memory it shares is no part of a call's signature.
        if main_grad is not None:
            destination.check_no_alias(main_grad, ids=ids, weight=weight)
        return look_up(ids, weight)

    return replace(plan, run=run)


def _fake_embedding(ids, weight, main_grad, padding):
    return weight.new_empty(*ids.shape, weight.shape[1])


def _add_gradient(dy, ids, padding, into):
    if dy.numel():
        launch = _launcher("embedding_gradient", dy)
        launch(flat_rows(dy, "embedding_gradient"), ids.reshape(-1).to(torch.int64), padding, into)


def _plan_embedding_gradient(dy, ids, padding, vocab):
    def run(dy, ids, padding, vocab):
        into = dy.new_zeros(vocab, dy.shape[-1])
        _add_gradient(dy, ids, padding, into)
        return into

    return Plan(run)


def _run_embedding_gradient_(dy, ids, padding, main_grad):
    destination.check_no_alias(main_grad, dy=dy)
    _add_gradient(dy, ids, padding, main_grad)


def _setup_embedding(ctx, inputs, output):
    ids, weight, main_grad, ctx.padding = inputs
    ctx.vocab = weight.shape[0]
    ctx.save_for_backward(ids)
    # Not a saved tensor: backward of an earlier micro-batch may write it before ours reads it.
    ctx.main_grad = main_grad if ctx.needs_input_grad[1] else None


def _backward_embedding(ctx, dy):
    if ctx.main_grad is not None:
        refuse_double("embedding", " with main_grad")
    (ids,) = ctx.saved_tensors
    target = destination.targets(ctx, (True, True), {1: ctx.main_grad}, (dy,))[1]
    if target.into is not None:
        embedding_gradient_(dy, ids, ctx.padding, target.into)
        target.written()
    gradient = embedding_gradient(dy, ids, ctx.padding, ctx.vocab) if target.returned else None
    return None, gradient, None, None


embedding = define_op(
    "embedding(Tensor ids, Tensor weight, Tensor? main_grad, int padding) -> Tensor",
    plan=_plan_embedding,
    fake=_fake_embedding,
    setup=_setup_embedding,
    backward=_backward_embedding,
    vmap=_vmap_refused,
)
embedding_gradient = define_op(
    "embedding_gradient(Tensor dy, Tensor ids, int padding, SymInt vocab) -> Tensor",
    plan=_plan_embedding_gradient,
    fake=lambda dy, ids, padding, vocab: dy.new_empty(vocab, dy.shape[-1]),
    vmap=_vmap_refused,
)
embedding_gradient_ = define_op(
    "embedding_gradient_(Tensor dy, Tensor ids, int padding, Tensor(a!) main_grad) -> ()",
    _run_embedding_gradient_,
    fake=lambda dy, ids, padding, main_grad: None,
    vmap=_vmap_refused,
)


# ---- clip_grad_norm_ -----------------------------------------------------------------------------


def _run_square_sum(x):
    if not x.numel():
        return x.new_zeros((), dtype=torch.float64)
    return _launcher("clip_grad_norm_", x)(x.reshape(-1))


def _run_add_sums(sums):
    # Sums are fp64 for every dtype: one contract with fp32 gradients.
    return dispatch.launcher("clip_grad_norm_sums", sums.device, torch.float32)(sums)


def _run_scale_(x, factor):
    if x.numel():
        _launcher("clip_grad_norm_scale", x)(x, factor)


square_sum = define_op(
    "square_sum(Tensor x) -> Tensor",
    _run_square_sum,
    fake=lambda x: x.new_empty((), dtype=torch.float64),
    vmap=_vmap_refused,
)
add_sums = define_op(
    "add_sums(Tensor sums) -> Tensor",
    _run_add_sums,
    fake=lambda sums: sums.new_empty(()),
    vmap=_vmap_refused,
)
scale_ = define_op(
    "scale_(Tensor(a!) x, Tensor factor) -> ()",
    _run_scale_,
    fake=lambda x, factor: None,
    vmap=_vmap_refused,
)


def total_norm(gradients: tuple[torch.Tensor, ...], largest: bool) -> torch.Tensor:
    """Return the norm of tensors in fp64, in their order: root of squares, or the maximum."""
    with ieee_on(gradients[0]):
        if largest:
            # A maximum has no order.
            sizes = [t.abs().amax().to(torch.float64) for t in gradients if t.numel()]
            return torch.stack([gradients[0].new_zeros((), dtype=torch.float64), *sizes]).amax()
        return add_sums(torch.stack([square_sum(t) for t in gradients])).sqrt()


def fp32_norm(total: torch.Tensor) -> torch.Tensor:
    """Convert a norm to fp32, rounded to nearest whatever the thread's rounding mode is."""
    with ieee_on(total):
        return total.to(torch.float32)


def clip(gradients: tuple[torch.Tensor, ...], total: torch.Tensor, max_norm: float) -> None:
    """Scale gradients by min(1, max_norm / (total + 1e-6)), the factor rounded to fp32."""
    with ieee_on(total):
        factor = (max_norm / (total + config.EPSILON)).clamp(max=1.0).to(torch.float32)
    for gradient in gradients:
        scale_(gradient, factor)
