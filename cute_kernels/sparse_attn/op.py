"""The torch ops of block-sparse attention: schemas, fakes, autograd.

    block_sparse_attention            q, k, v -> out, lse
    block_sparse_attention_backward   dout, dlse, q, k, v, out, lse -> dq, dk, dv

A mask and a schedule are tensors and numbers here (``masks.LoweredMask``, ``masks.Order``), built
once by ``prepared`` and then shared by every layer and step.  ``order`` is empty where no gradient
is asked for.  A backend's launchers are

    forward(q, k, v, mask, scale, softcap) -> (out, lse)
    backward(dout, dlse, q, k, v, out, lse, mask, order, scale, softcap, deterministic)
        -> (dq, dk, dv)

with a ``LoweredMask``, an ``Order`` and tensors of any strides; dlse is None or fp32 [B, Hq, Sq].
No size is zero there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .. import contracts, dispatch
from ..arch import CPU, CUTE_SM90, TRITON
from ..dispatch import Implementation
from ..errors import ArgumentValueError, UnsupportedTransformError, expected
from ..schedulers.mask import BlockMask
from ..torch_ops import define_op
from . import checks, config, masks
from .masks import Order

NAME = "block_sparse_attention"
_HALF = frozenset({torch.bfloat16, torch.float16})

for _name, _function in ((NAME, "forward"), (f"{NAME}_backward", "backward")):
    dispatch.register(
        _name,
        {
            CUTE_SM90: Implementation(f"{__package__}.launch:{_function}", _HALF),
            TRITON: Implementation(f"{__package__}.triton_launch:{_function}", _HALF),
            CPU: Implementation(f"{__package__}.cpu:{_function}", _HALF),
        },
    )

contracts.register(
    contracts.Contract(
        NAME,
        config.KEPT,
        config.plan,
        lambda device, dtype: dispatch.backend(NAME, device, dtype),
    )
)

_KEPT = 64
_masks: OrderedDict[tuple, BlockMask] = OrderedDict()
_orders: OrderedDict[tuple, Order] = OrderedDict()


class Operands(NamedTuple):
    """What the ops take besides q, k and v."""

    mask: list[Tensor]
    facts: list[int]
    order: list[Tensor]


def prepared(
    block_mask: BlockMask | None,
    causal: bool,
    schedule: object,
    needs_order: bool,
    sizes: tuple[int, int, int, int, int, int],
    device: str,
) -> Operands:
    """The operands of one problem, all caches hit from the second call on.

    sizes: (batch, q_len, kv_len, query heads, KV heads, head size).  Under torch.compile it runs
    while tracing, and the compiled code is guarded by the identity of the mask and the Schedule.
    """
    batch, q_len, kv_len, heads, kv_heads, head_dim = sizes
    # Lists depend on data: under fake tensors, too, they are made of true ones.
    with _disable_current_modes():
        mask = _whole_mask(block_mask, causal, q_len, kv_len, _where(device))
        lowered = masks.lower(mask)
        if needs_order:
            checks.gradient(device, lowered.mask.shape[1], heads, kv_heads)
        order: list[Tensor] = []
        asked = not isinstance(schedule, str) or schedule != checks.AUTO
        if batch and (needs_order or asked):
            count = config.schedule_heads(lowered.mask.shape[1], batch, heads, kv_heads)
            group = batch * heads // count
            made = checks.admitted(lowered, schedule, count, head_dim, group)
            order = list(_order(lowered, made)) if needs_order else []
    return Operands(lowered.tensors(), lowered.numbers(), order)


# As torch.compiler.assume_constant_result does, which imports all of dynamo (2 s, and triton).
prepared._dynamo_marked_constant = True


def _where(device: str) -> str:
    """Where the lists of a mask that is not given are: a meta device holds no data."""
    return "cpu" if device == "meta" else device


def _whole_mask(
    mask: BlockMask | None, causal: bool, q_len: int, kv_len: int, device: str
) -> BlockMask:
    """``mask``, and the causal rule if asked for."""
    if mask is not None and not causal:
        return mask
    key = (mask and mask.hash(), causal, q_len, kv_len, device)
    if key not in _masks:
        make = BlockMask.causal if causal else BlockMask.full
        size = masks.BLOCK if mask is None else mask.block_size
        made = make(q_len, kv_len, block_size=size, device=device)
        _masks[key] = made if mask is None else mask & made
    return _recent(_masks, key)


def _order(lowered: masks.LoweredMask, schedule) -> Order:
    tiles = lowered.mask.hash() if lowered.form == "bits" else ""
    key = (schedule.hash, str(lowered.words.device), tiles)
    if key not in _orders:
        made = masks.order_of(lowered, schedule)
        if made.ticket.is_cuda:
            # Whoever takes it from here may be on another stream than those that made it.
            torch.cuda.current_stream(made.ticket.device).synchronize()
        _orders[key] = made
    return _recent(_orders, key)


def _recent(cache: OrderedDict, key: tuple):
    cache.move_to_end(key)
    if len(cache) > _KEPT:
        cache.popitem(last=False)
    return cache[key]


def _run(q, k, v, mask, facts, order, scale, softcap, deterministic):
    if q.numel() == 0 or k.numel() == 0:
        out, lse = _fake(q, k, v, mask, facts, order, scale, softcap, deterministic)
        return out.zero_(), lse.fill_(float("-inf"))
    launch = dispatch.launcher(NAME, q.device, q.dtype)
    return launch(q, k, v, masks.restored(mask, facts), scale, softcap)


def _run_backward(dout, dlse, q, k, v, out, lse, mask, facts, order, scale, softcap, deterministic):
    if not deterministic:
        refuse_unordered()
    if q.numel() == 0 or k.numel() == 0:
        return tuple(t.new_zeros(t.shape) for t in (q, k, v))
    launch = dispatch.launcher(f"{NAME}_backward", q.device, q.dtype)
    lowered = masks.restored(mask, facts)
    return launch(
        dout, dlse, q, k, v, out, lse, lowered, Order(*order), scale, softcap, deterministic
    )


def refuse_unordered() -> None:
    """Raises if torch's determinism flag is set."""
    contracts.refuse_if_deterministic(
        f"{NAME}(deterministic=False)", f"{NAME}(deterministic=True), the default"
    )


def _fake(q, k, v, mask, facts, order, scale, softcap, deterministic):
    batch, q_len, heads, _ = q.shape
    lse = q.new_empty((batch, heads, q_len), dtype=torch.float32)
    return q.new_empty(q.shape), lse


def _fake_backward(
    dout, dlse, q, k, v, out, lse, mask, facts, order, scale, softcap, deterministic
):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _setup(ctx, inputs, output):
    q, k, v, mask, ctx.facts, order, *ctx.options = inputs
    ctx.masks = len(mask)
    ctx.save_for_backward(q, k, v, *output, *mask, *order)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, *rest = ctx.saved_tensors
    mask, order = rest[: ctx.masks], rest[ctx.masks :]
    if not order and q.numel() and k.numel():
        want = "the tensors of a schedule (a gradient is asked for)"
        raise ArgumentValueError(expected("order", want, "none"))
    dout = torch.zeros_like(out) if dout is None else dout
    grads = block_sparse_attention_backward(
        dout, dlse, q, k, v, out, lse, mask, ctx.facts, order, *ctx.options
    )
    wanted = ctx.needs_input_grad[:3]
    return *(g if w else None for g, w in zip(grads, wanted, strict=True)), *(None,) * 6


def _setup_nothing(ctx, inputs, output):
    pass


def _no_double_backward(ctx, *grads):
    raise UnsupportedTransformError(
        f"cute_kernels.{NAME}: no gradient of its gradient (double backward) is available"
    )


def _vmap_refused(info, in_dims, *args):
    raise UnsupportedTransformError(
        f"cute_kernels.{NAME}: torch.func.vmap is not supported; make the mapped dimension part of "
        "the batch, which each output row is independent of"
    )


_OPERANDS = (
    "Tensor[] mask, int[] facts, Tensor[] order, float scale, float softcap, bool deterministic"
)
block_sparse_attention = define_op(
    f"{NAME}(Tensor q, Tensor k, Tensor v, {_OPERANDS}) -> (Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=_vmap_refused,
    autocast_args=(0, 1, 2),
)
block_sparse_attention_backward = define_op(
    f"{NAME}_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_OPERANDS}) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    fake=_fake_backward,
    setup=_setup_nothing,
    backward=_no_double_backward,
    vmap=_vmap_refused,
)
