"""The torch ops of block-sparse attention: schemas, fakes, autograd.

    block_sparse_attention            q, k, v -> out, lse
    block_sparse_attention_backward   dout, dlse, q, k, v, out, lse -> dq, dk, dv

A mask and a schedule that are objects come as tensors and numbers (``prepare.operands``); a rule
without tensors and a schedule by name are prepared in here, when the op runs, so that one compiled
graph serves every length.  ``order`` is empty where no gradient is asked for.

A backend's launchers are

    forward(q, k, v, mask, scale, softcap) -> (out, lse)
    backward(grads, saved, mask, order, scale, softcap, deterministic) -> (dq, dk, dv)

with ``Grads``, ``Saved``, a ``LoweredMask``, an ``Order`` and tensors of any strides.
No size is zero there.
"""

from __future__ import annotations

import torch

from .. import contracts, dispatch
from ..arch import CPU, CUTE_SM90, TRITON
from ..dispatch import Implementation
from ..errors import ArgumentValueError, UnsupportedTransformError, expected
from ..torch_ops import define_op
from . import config, prepare
from .masks import Order
from .tensors import Grads, Saved

NAME = "block_sparse_attention"
HALF = frozenset({torch.bfloat16, torch.float16})

for _name, _function in ((NAME, "forward"), (f"{NAME}_backward", "backward")):
    dispatch.register(
        _name,
        {
            CUTE_SM90: Implementation(f"{__package__}.launch:{_function}", HALF),
            TRITON: Implementation(f"{__package__}.triton.launch:{_function}", HALF),
            CPU: Implementation(f"{__package__}.cpu:{_function}", HALF),
        },
        contract=NAME,
    )

for _name in (NAME, f"{NAME}_varlen"):
    contracts.register(
        contracts.Contract(
            _name,
            config.KEPT,
            config.plan,
            lambda device, dtype: dispatch.backend(NAME, device, dtype),
        )
    )


def _run(q, k, v, mask, facts, order, kind, scale, softcap, deterministic):
    if q.numel() == 0 or k.numel() == 0:
        out, lse = _fake(q, k, v, mask, facts, order, kind, scale, softcap, deterministic)
        return out.zero_(), lse.fill_(float("-inf"))
    launch = dispatch.launcher(NAME, q.device, q.dtype)
    lowered = prepare.mask_of_op(mask, facts, q.shape[1], k.shape[1], str(q.device))
    return launch(q, k, v, lowered, scale, softcap)


def _run_backward(
    dout, dlse, q, k, v, out, lse, mask, facts, order, kind, scale, softcap, deterministic
):
    if not deterministic:
        refuse_unordered()
    if q.numel() == 0 or k.numel() == 0:
        return tuple(t.new_zeros(t.shape) for t in (q, k, v))
    launch = dispatch.launcher(f"{NAME}_backward", q.device, q.dtype)
    (batch, q_len, heads, dim), (_, kv_len, kv_heads, _) = q.shape, k.shape
    lowered = prepare.mask_of_op(mask, facts, q_len, kv_len, str(q.device))
    if order:
        turns = Order(*order)
    else:
        turns = prepare.order_of(lowered, kind, (batch, q_len, kv_len, heads, kv_heads, dim))
    grads, saved = Grads(dout, dlse), Saved(q, k, v, out, lse)
    return launch(grads, saved, lowered, turns, scale, softcap, deterministic)


def refuse_unordered() -> None:
    """Raises if torch's determinism flag is set."""
    contracts.refuse_if_deterministic(
        f"{NAME}(deterministic=False)", f"{NAME}(deterministic=True), the default"
    )


def _fake(q, k, v, mask, facts, order, kind, scale, softcap, deterministic):
    batch, q_len, heads, _ = q.shape
    lse = q.new_empty((batch, heads, q_len), dtype=torch.float32)
    return q.new_empty(q.shape), lse


def _fake_backward(
    dout, dlse, q, k, v, out, lse, mask, facts, order, kind, scale, softcap, deterministic
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
    if mask and not order and q.numel() and k.numel():
        want = "the tensors of a schedule (a gradient is asked for)"
        raise ArgumentValueError(expected("order", want, "none"))
    dout = torch.zeros_like(out) if dout is None else dout
    grads = block_sparse_attention_backward(
        dout, dlse, q, k, v, out, lse, mask, ctx.facts, order, *ctx.options
    )
    wanted = ctx.needs_input_grad[:3]
    return *(g if w else None for g, w in zip(grads, wanted, strict=True)), *(None,) * 7


def _setup_nothing(ctx, inputs, output):
    pass


def refuse_double_backward(ctx, *grads):
    """Raises: a backward has no gradient."""
    raise UnsupportedTransformError(
        f"cute_kernels.{NAME}: no gradient of its gradient (double backward) is available"
    )


def refuse_vmap(info, in_dims, *args):
    """Raises: the mapped dimension belongs into the batch."""
    raise UnsupportedTransformError(
        f"cute_kernels.{NAME}: torch.func.vmap is not supported; make the mapped dimension part of "
        "the batch, which each output row is independent of"
    )


_OPERANDS = (
    "Tensor[] mask, int[] facts, Tensor[] order, str kind, float scale, float softcap, "
    "bool deterministic"
)
block_sparse_attention = define_op(
    f"{NAME}(Tensor q, Tensor k, Tensor v, {_OPERANDS}) -> (Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=refuse_vmap,
    autocast_args=(0, 1, 2),
)
block_sparse_attention_backward = define_op(
    f"{NAME}_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_OPERANDS}) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    fake=_fake_backward,
    setup=_setup_nothing,
    backward=refuse_double_backward,
    vmap=refuse_vmap,
)
