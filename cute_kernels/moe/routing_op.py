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

import torch

from .. import contracts
from ..arch import CPU, TRITON
from ..cpu.ieee import halves, ieee_on
from ..errors import UnsupportedTransformError
from ..runtime import dispatch, products
from ..runtime.dispatch import Implementation
from ..runtime.torch_ops import define_op
from . import config

_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})

#: Entry of `dispatch` -> the launchers' name.
_LAUNCHERS = {
    "moe_select": "select",
    "moe_weights": "weights",
    "moe_slot_weights": "slot_weights",
    "moe_weights_backward": "weights_backward",
    "moe_sort": "sort",
    "moe_gather": "gather",
    "moe_combine": "combine",
    "moe_combine_backward": "combine_backward",
}

for _entry, _function in _LAUNCHERS.items():
    dispatch.register(
        _entry,
        {
            TRITON: Implementation(f"{__package__}.triton.routing:{_function}", _DTYPES),
            CPU: Implementation(f"{__package__}.cpu:{_function}", _DTYPES),
        },
        contract="moe",
    )


def _backend(device: torch.device, dtype: torch.dtype) -> str:
    return dispatch.backend("moe_select", device, dtype)


contracts.register(contracts.Contract("moe", config.KEPT_ROUTING, config.routing_facts, _backend))


def _launch(entry: str, device: torch.device, dtype: torch.dtype, *operands):
    return dispatch.launcher(entry, device, dtype)(*operands)


def _vmap_refused(info, in_dims, *args):
    raise UnsupportedTransformError(
        "cute_kernels.moe: torch.func.vmap is not supported, as tokens have one dimension"
    )


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


def _run_select(scores, bias, k, groups, topk_groups):
    if not scores.shape[0]:
        return _fake_select(scores, bias, k, groups, topk_groups)
    operands = scores, bias, k, groups, topk_groups
    return _launch("moe_select", scores.device, torch.float32, *operands)


def _fake_select(scores, bias, k, groups, topk_groups):
    return scores.new_empty(scores.shape[0], k, dtype=torch.int32)


def _run_weights(scores, indices, normalize, scale):
    if not scores.shape[0]:
        return _fake_weights(scores, indices, normalize, scale)
    operands = scores, indices, normalize, _fp32(scale)
    return _launch("moe_weights", scores.device, torch.float32, *operands)


def _fake_weights(scores, indices, normalize, scale):
    return scores.new_empty(indices.shape)


def _run_slot_weights(scores, indices, normalize, dtype):
    if not scores.shape[0]:
        return _fake_slot_weights(scores, indices, normalize, dtype)
    operands = scores, indices, normalize, dtype
    return _launch("moe_slot_weights", scores.device, torch.float32, *operands)


def _fake_slot_weights(scores, indices, normalize, dtype):
    return scores.new_empty(indices.shape, dtype=dtype)


def _run_weights_backward(dweights, scores, indices, normalize, scale):
    if not scores.shape[0]:
        return torch.empty_like(scores)
    operands = dweights, scores, indices, normalize, _fp32(scale)
    return _launch("moe_weights_backward", scores.device, torch.float32, *operands)


def _fp32(value: float) -> float:
    """The number as kernels have it."""
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


def _setup_weights(ctx, inputs, output):
    scores, indices, ctx.normalize, ctx.scale = inputs
    ctx.save_for_backward(scores, indices)


def _backward_weights(ctx, dweights):
    operands = *ctx.saved_tensors, ctx.normalize, ctx.scale
    return weights_backward(dweights, *operands), None, None, None


scores = define_op(
    "moe_scores(Tensor logits, str score) -> Tensor",
    _run_scores,
    fake=_fake_scores,
    setup=_setup_scores,
    backward=lambda ctx, g: (scores_backward(g, *ctx.saved_tensors, ctx.score), None),
    vmap=_vmap_refused,
)
scores_backward = define_op(
    "moe_scores_backward(Tensor d_scores, Tensor logits, Tensor scores, str score) -> Tensor",
    _run_scores_backward,
    fake=lambda d_scores, logits, scores, score: logits.new_empty(logits.shape),
    vmap=_vmap_refused,
)
select = define_op(
    "moe_select(Tensor scores, Tensor? bias, int k, int groups, int topk_groups) -> Tensor",
    _run_select,
    fake=_fake_select,
    vmap=_vmap_refused,
)
weights = define_op(
    "moe_weights(Tensor scores, Tensor indices, bool normalize, float scale) -> Tensor",
    _run_weights,
    fake=_fake_weights,
    setup=_setup_weights,
    backward=_backward_weights,
    vmap=_vmap_refused,
)
slot_weights = define_op(
    "moe_slot_weights(Tensor scores, Tensor indices, bool normalize, ScalarType dtype) -> Tensor",
    _run_slot_weights,
    fake=_fake_slot_weights,
    vmap=_vmap_refused,
)
weights_backward = define_op(
    "moe_weights_backward(Tensor dweights, Tensor scores, Tensor indices, bool normalize,"
    " float scale) -> Tensor",
    _run_weights_backward,
    fake=lambda dweights, scores, indices, normalize, scale: torch.empty_like(scores),
    vmap=_vmap_refused,
)


# ---- permutation ---------------------------------------------------------------------------------


def _run_sort(indices, experts):
    if not indices.numel():
        offsets, order, positions = _fake_sort(indices, experts)
        return offsets.zero_(), order, positions
    return _launch("moe_sort", indices.device, torch.float32, indices, experts)


def _fake_sort(indices, experts):
    def new(*shape):
        return indices.new_empty(shape, dtype=torch.int32)

    return new(experts + 1), new(indices.numel()), new(*indices.shape)


def _run_gather(x, offsets, order, positions):
    if not x.numel():
        return _fake_gather(x, offsets, order, positions)
    return _launch("moe_gather", x.device, x.dtype, x, offsets, order, positions)


def _fake_gather(x, offsets, order, positions):
    return x.new_empty(order.shape[0], x.shape[1])


def _setup_gather(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _backward_gather(ctx, dy):
    return combine(dy, None, *ctx.saved_tensors), None, None, None


def _run_combine(rows, weights, offsets, order, positions):
    if not rows.numel():
        return rows.new_zeros(positions.shape[0], rows.shape[1])
    return _launch("moe_combine", rows.device, rows.dtype, rows, weights, offsets, positions)


def _fake_combine(rows, weights, offsets, order, positions):
    return rows.new_empty(positions.shape[0], rows.shape[1])


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
        d_weights = weights.new_zeros(weights.shape, dtype=torch.float32)
        return rows.new_empty(rows.shape), d_weights
    operands = dy, rows, weights, offsets, order, positions
    return _launch("moe_combine_backward", rows.device, rows.dtype, *operands)


def _fake_combine_backward(dy, rows, weights, offsets, order, positions):
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape, dtype=torch.float32)


sort = define_op(
    "moe_sort(Tensor indices, int experts) -> (Tensor, Tensor, Tensor)",
    _run_sort,
    fake=_fake_sort,
    vmap=_vmap_refused,
)
gather = define_op(
    "moe_gather(Tensor x, Tensor offsets, Tensor order, Tensor positions) -> Tensor",
    _run_gather,
    fake=_fake_gather,
    setup=_setup_gather,
    backward=_backward_gather,
    vmap=_vmap_refused,
)
combine = define_op(
    "moe_combine(Tensor rows, Tensor? weights, Tensor offsets, Tensor order, Tensor positions)"
    " -> Tensor",
    _run_combine,
    fake=_fake_combine,
    setup=_setup_combine,
    backward=_backward_combine,
    vmap=_vmap_refused,
)
combine_backward = define_op(
    "moe_combine_backward(Tensor dy, Tensor rows, Tensor weights, Tensor offsets, Tensor order,"
    " Tensor positions) -> (Tensor, Tensor)",
    _run_combine_backward,
    fake=_fake_combine_backward,
    vmap=_vmap_refused,
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
        return _padded_sum(products.column_sum(scores) * factors)


def _run_balance_backward(d_loss, scores, indices):
    factors = _factors(scores, indices)
    with ieee_on(scores):
        return (factors * d_loss).expand(scores.shape).contiguous()


def _padded_sum(values: torch.Tensor) -> torch.Tensor:
    """Σ of [N]: each half onto half, of the power of two that holds them."""
    size = 1 << (len(values) - 1).bit_length()
    return halves(torch.nn.functional.pad(values, (0, size - len(values))), 0)


def _setup_balance(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


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


def _setup_z_loss(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


balance_loss = define_op(
    "moe_balance_loss(Tensor scores, Tensor indices) -> Tensor",
    _run_balance,
    fake=lambda scores, indices: scores.new_empty(()),
    setup=_setup_balance,
    backward=lambda ctx, g: (balance_loss_backward(g, *ctx.saved_tensors), None),
    vmap=_vmap_refused,
)
balance_loss_backward = define_op(
    "moe_balance_loss_backward(Tensor d_loss, Tensor scores, Tensor indices) -> Tensor",
    _run_balance_backward,
    fake=lambda d_loss, scores, indices: scores.new_empty(scores.shape),
    vmap=_vmap_refused,
)
z_loss = define_op(
    "moe_z_loss(Tensor logits) -> Tensor",
    _run_z_loss,
    fake=lambda logits: logits.new_empty((), dtype=torch.float32),
    setup=_setup_z_loss,
    backward=lambda ctx, g: (z_loss_backward(g, *ctx.saved_tensors),),
    vmap=_vmap_refused,
)
z_loss_backward = define_op(
    "moe_z_loss_backward(Tensor d_loss, Tensor logits) -> Tensor",
    _run_z_loss_backward,
    fake=lambda d_loss, logits: logits.new_empty(logits.shape),
    vmap=_vmap_refused,
)
