"""The torch ops of routing: schemas, fakes, autograd.

    moe_scores         softmax or sigmoid of the logits, in fp32           [T, E] -> fp32 [T, E]
    moe_select         experts of the largest scores                       [T, E] -> int32 [T, k]
    moe_weights        their scores, normalised and scaled                 [T, E] -> fp32 [T, k]
    moe_slot_weights   as routers of transformers make them; no gradient   [T, E] -> [T, k]
    moe_sort           the slots t k + j in the order of experts, stable   [T, k] -> int32
    moe_gather         the row of each slot's token; 0 without an expert   [T, D] -> [T k, D]
    moe_combine        Σ weight · row of a token's slots with an expert    [T k, D] -> [T, D]
    moe_balance_loss   E / T² Σ_e (slots of e) Σ_t s[t, e]
    moe_z_loss         1 / T Σ_t (ln Σ_e e^(logit))²

The ops of gradients are not differentiable again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..arch import CPU, TRITON
from ..cpu.ieee import halves, ieee_on
from ..runtime import dispatch, products
from ..runtime.dispatch import Implementation
from ..runtime.torch_ops import define_op, refuse_vmap
from . import config

#: Launchers; those on Triton have the names of those on a CPU, entries of `dispatch` ``moe_...``.
_LAUNCHERS = (
    "select", "weights", "slot_weights", "weights_backward", "sort", "gather", "combine",
    "combine_backward",
)  # fmt: skip

for _function in _LAUNCHERS:
    _implementations = {
        TRITON: Implementation(f"{__package__}.triton.routing:{_function}", dispatch.FLOATS),
        CPU: Implementation(f"{__package__}.cpu:{_function}", dispatch.FLOATS),
    }
    dispatch.register(f"moe_{_function}", _implementations, contract="moe")

dispatch.register_contracts(("moe",), config.KEPT_ROUTING, config.routing_facts, "moe_select")


def _launch(entry: str, device: torch.device, dtype: torch.dtype, *operands):
    return dispatch.launcher(entry, device, dtype)(*operands)


_no_vmap = refuse_vmap("moe", "is not supported, as tokens have one dimension")
define = functools.partial(define_op, vmap=_no_vmap)


def _define_launch(schema: str, *, fake: Callable, **transforms: Callable) -> Callable:
    """Define an op that is one launch, of its own name; of an empty first tensor it is its fake."""
    entry = schema.split("(", 1)[0]

    def run(first, *others):
        if not first.numel():
            return fake(first, *others)
        dtype = first.dtype if first.is_floating_point() else torch.float32
        # Numbers as kernels have them.
        others = [_fp32(a) if isinstance(a, float) else a for a in others]
        return _launch(entry, first.device, dtype, first, *others)

    return define(schema, run, fake=fake, **transforms)


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


# ---- choice and weights --------------------------------------------------------------------------


def _run_scores(logits, score):
    if not logits.shape[0]:
        return _fake_scores(logits, score)
    if score == config.SOFTMAX:
        return _launch("softmax", logits.device, logits.dtype, logits, torch.float32)
    return _launch("sigmoid", logits.device, torch.float32, logits.float(), score)


def _fake_scores(logits, score):
    return logits.new_empty(logits.shape, dtype=torch.float32)


def _run_scores_backward(d_scores, logits, scores, score):
    if not logits.shape[0]:
        return torch.empty_like(logits)
    device = logits.device
    if score == config.SOFTMAX:
        operands = d_scores, scores, logits.dtype
        return _launch("softmax_backward", device, torch.float32, *operands)
    operands = d_scores, logits.float(), score
    return _launch("sigmoid_backward", device, torch.float32, *operands).to(logits.dtype)


def _setup_scores(ctx, inputs, output):
    logits, ctx.score = inputs
    ctx.save_for_backward(logits, output)


def _backward_weights(ctx, dweights):
    return weights_backward(dweights, *ctx.saved_tensors, *ctx.options), None, None, None


scores = define(
    "moe_scores(Tensor logits, str score) -> Tensor",
    _run_scores,
    fake=_fake_scores,
    setup=_setup_scores,
    backward=lambda ctx, g: (scores_backward(g, *ctx.saved_tensors, ctx.score), None),
)
scores_backward = define(
    "moe_scores_backward(Tensor d_scores, Tensor logits, Tensor scores, str score) -> Tensor",
    _run_scores_backward,
    fake=lambda d_scores, logits, scores, score: logits.new_empty(logits.shape),
)
select = _define_launch(
    "moe_select(Tensor scores, Tensor? bias, int k, int groups, int topk_groups) -> Tensor",
    fake=lambda scores, bias, k, *_: scores.new_empty(scores.shape[0], k, dtype=torch.int32),
)
weights = _define_launch(
    "moe_weights(Tensor scores, Tensor indices, bool normalize, float scale) -> Tensor",
    fake=lambda scores, indices, normalize, scale: scores.new_empty(indices.shape),
    backward=_backward_weights,
)
slot_weights = _define_launch(
    "moe_slot_weights(Tensor scores, Tensor indices, bool normalize, ScalarType dtype) -> Tensor",
    fake=lambda scores, indices, _, dtype: scores.new_empty(indices.shape, dtype=dtype),
)
weights_backward = _define_launch(
    "moe_weights_backward(Tensor dweights, Tensor scores, Tensor indices, bool normalize,"
    " float scale) -> Tensor",
    fake=lambda dweights, scores, indices, normalize, scale: torch.empty_like(scores),
)


# ---- permutation ---------------------------------------------------------------------------------


def _fake_sort(indices, experts):
    shapes = (experts + 1,), (indices.numel(),), indices.shape
    return tuple(indices.new_zeros(shape, dtype=torch.int32) for shape in shapes)


def _setup_gather(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _backward_gather(ctx, dy):
    return combine(dy, None, *ctx.saved_tensors), None, None, None


def _run_combine(rows, weights, offsets, order, positions):
    if not rows.numel():
        return _fake_combine(rows, weights, offsets, order, positions)
    return _launch("moe_combine", rows.device, rows.dtype, rows, weights, offsets, positions)


def _fake_combine(rows, weights, offsets, order, positions):
    return rows.new_zeros(positions.shape[0], rows.shape[1])


def _setup_combine(ctx, inputs, output):
    rows, weights, *permutation = inputs
    ctx.save_for_backward(None if weights is None else rows, weights, *permutation)


def _backward_combine(ctx, dy):
    rows, weights, *permutation = ctx.saved_tensors
    if weights is None:
        return gather(dy, *permutation), None, None, None, None
    d_rows, d_weights = combine_backward(dy, rows, weights, *permutation)
    needs_rows, needs_weights = ctx.needs_input_grad[:2]
    d_weights = d_weights.to(weights.dtype) if needs_weights else None
    return d_rows if needs_rows else None, d_weights, None, None, None


def _run_combine_backward(dy, rows, weights, offsets, order, positions):
    if not rows.numel():
        return _fake_combine_backward(dy, rows, weights)
    operands = dy, rows, weights, offsets, order, positions
    return _launch("moe_combine_backward", rows.device, rows.dtype, *operands)


def _fake_combine_backward(dy, rows, weights, *permutation):
    return rows.new_empty(rows.shape), weights.new_zeros(weights.shape, dtype=torch.float32)


sort = _define_launch(
    "moe_sort(Tensor indices, int experts) -> (Tensor, Tensor, Tensor)",
    fake=_fake_sort,
)
gather = _define_launch(
    "moe_gather(Tensor x, Tensor offsets, Tensor order, Tensor positions) -> Tensor",
    fake=lambda x, offsets, order, positions: x.new_empty(order.shape[0], x.shape[1]),
    setup=_setup_gather,
    backward=_backward_gather,
)
combine = define(
    "moe_combine(Tensor rows, Tensor? weights, Tensor offsets, Tensor order, Tensor positions)"
    " -> Tensor",
    _run_combine,
    fake=_fake_combine,
    setup=_setup_combine,
    backward=_backward_combine,
)
combine_backward = define(
    "moe_combine_backward(Tensor dy, Tensor rows, Tensor weights, Tensor offsets, Tensor order,"
    " Tensor positions) -> (Tensor, Tensor)",
    _run_combine_backward,
    fake=_fake_combine_backward,
)


# ---- losses --------------------------------------------------------------------------------------


def _factors(scores, indices) -> torch.Tensor:
    """E / T² times the slots of each expert: fp32 [E]."""
    tokens, experts = scores.shape
    offsets, _, _ = sort(indices, experts)
    counts = offsets[1:] - offsets[:-1]
    return counts.to(torch.float32) * _fp32(experts / tokens**2)


def _run_balance(scores, indices):
    factors = _factors(scores, indices)
    with ieee_on(scores):
        return halves(products.column_sum(scores) * factors, 0)


def _run_balance_backward(d_loss, scores, indices):
    factors = _factors(scores, indices)
    with ieee_on(scores):
        return (factors * d_loss).expand(scores.shape).contiguous()


def _log_sums(logits: torch.Tensor) -> torch.Tensor:
    """ln Σ e^x of each row: the largest x less the largest log-probability; fp32 [T, 1]."""
    log_p = _launch("log_softmax", logits.device, logits.dtype, logits, torch.float32)
    with ieee_on(logits):
        return logits.float().amax(1, keepdim=True) - log_p.amax(1, keepdim=True)


def _run_z_loss(logits):
    log_sums = _log_sums(logits)
    with ieee_on(logits):
        return products.column_sum(log_sums * log_sums)[0] / logits.shape[0]


def _run_z_loss_backward(d_loss, logits):
    log_sums = _log_sums(logits)
    p = _launch("softmax", logits.device, logits.dtype, logits, torch.float32)
    with ieee_on(logits):
        factor = log_sums * (2.0 * d_loss / logits.shape[0])
        return (p * factor).to(logits.dtype)


balance_loss = define(
    "moe_balance_loss(Tensor scores, Tensor indices) -> Tensor",
    _run_balance,
    fake=lambda scores, indices: scores.new_empty(()),
    backward=lambda ctx, g: (balance_loss_backward(g, *ctx.saved_tensors), None),
)
balance_loss_backward = define(
    "moe_balance_loss_backward(Tensor d_loss, Tensor scores, Tensor indices) -> Tensor",
    _run_balance_backward,
    fake=lambda d_loss, scores, indices: scores.new_empty(scores.shape),
)
z_loss = define(
    "moe_z_loss(Tensor logits) -> Tensor",
    _run_z_loss,
    fake=lambda logits: logits.new_empty((), dtype=torch.float32),
    backward=lambda ctx, g: (z_loss_backward(g, *ctx.saved_tensors),),
)
z_loss_backward = define(
    "moe_z_loss_backward(Tensor d_loss, Tensor logits) -> Tensor",
    _run_z_loss_backward,
    fake=lambda d_loss, logits: logits.new_empty(logits.shape),
)
