"""``linear_logp`` of a head whose parameters somebody else holds, in parts or at times.

The backward reads the weight again, on autograd's thread, long after a forward that gathered it has
let go of it.  So this step gathers around its forward and again around its backward what is not
there already, and releases what it gathered (gathering.py).  It keeps the Parameter itself: its
memory is another at each gather, and a copy would keep the whole of it alive in between.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from .. import checking
from ..linear_logp import api, op
from . import gathering


@dataclass(frozen=True)
class Scoring:
    """Arguments of ``ck.linear_logp`` besides tensors of the model."""

    order: str = "chain"
    temperature: float | torch.Tensor = 1.0
    softcap: float = 0.0
    ignore_index: int = -100
    return_entropy: bool = False
    vocab_size: int | None = None


def head_logp(
    head: torch.nn.Module, hidden: torch.Tensor, target: torch.Tensor, scoring: Scoring
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``ck.linear_logp`` through a head's own parameters, whoever holds them.

    Args:
        head: A linear layer, whose weight is [V, D] once it is whole.
        hidden: [..., D].  target: [...].

    Returns:
        fp32, shaped like ``target``; or (that, entropy).

    Raises:
        As ``ck.linear_logp`` and ``gathering.whole``.
    """
    weight, bias = head.weight, getattr(head, "bias", None)
    if not gathering.held(weight) and not gathering.held(bias):
        return api.linear_logp(hidden, weight, target, bias, **vars(scoring))
    outputs = _HeldHead.apply(hidden, weight, bias, target, scoring)
    return outputs if scoring.return_entropy else outputs[0]


class _HeldHead(torch.autograd.Function):
    """`linear_logp` that gathers around its forward, and again around its backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, scoring):
        ctx.dtype = hidden.dtype
        if checking.autocast(hidden.device):
            ctx.dtype = torch.get_autocast_dtype(hidden.device.type)
        # Not saved tensors: hooks that move those elsewhere would copy a whole weight.
        ctx.weight, ctx.bias, ctx.scoring = weight, bias, scoring
        with gathering.whole((weight, bias)), _as_they_are(hidden.device):
            operands = (_cast(t, ctx.dtype) for t in (hidden, weight, bias))
            logp, lse2, entropy = _forward(*operands, target, scoring)
        ctx.save_for_backward(hidden, target, lse2, entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, dlogp, dentropy):
        hidden, *saved = ctx.saved_tensors
        held = (ctx.weight, ctx.bias)
        with gathering.whole(held), _as_they_are(hidden.device):
            operands = (_cast(t, ctx.dtype) for t in (hidden, *held))
            gradients = _backward((dlogp, dentropy), *operands, saved, ctx.scoring)
        given = (hidden, *held)
        cast = [None if g is None else g.to(t.dtype) for g, t in zip(gradients, given, strict=True)]
        wanted = zip(cast, ctx.needs_input_grad, strict=False)
        return *(g if needed else None for g, needed in wanted), None, None


def _cast(t: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if t is None else t.to(dtype)


def _as_they_are(device: torch.device):
    """No autocast: the operands are cast already, and gradients are not to be."""
    known = device.type in ("cpu", "cuda")
    return torch.autocast(device.type, enabled=False) if known else contextlib.nullcontext()


# ---- the op below ``ck.linear_logp``, forward and backward apart --------------------------------


def _forward(hidden, weight, bias, target, scoring: Scoring) -> tuple[torch.Tensor, ...]:
    """(logp, log2 of the sum, entropy)."""
    t = scoring.temperature
    s = 1 / t if not isinstance(t, torch.Tensor) else (1 / t)[..., None]
    return op.linear_logp(hidden, weight, bias, target, s, scoring.softcap, scoring.ignore_index)


def _backward(upstream, hidden, weight, bias, saved, scoring: Scoring) -> tuple:
    """The gradients of hidden, weight and bias."""
    target, lse2, entropy = saved
    t = scoring.temperature
    s = 1 / t if not isinstance(t, torch.Tensor) else (1 / t)[..., None]
    return op.linear_logp_backward(
        *upstream, hidden, weight, bias, target, s, scoring.softcap, scoring.ignore_index
    )
