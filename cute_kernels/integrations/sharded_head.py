"""``linear_logp`` of a head whose parameters ZeRO-3 or FSDP2 gathers and releases.

The backward reads the weight again, on autograd's thread, long after a forward that gathered it has
let go of it.  So this step gathers around its forward and again around its backward what is not
there already, and releases what it gathered (gathering.py).  It keeps the Parameter itself: its
memory is another at each gather, and a copy would keep the whole of it alive in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import ArgumentValueError, expected
from ..logp import api, checks, op
from ..runtime import checking
from . import gathering

#: Attribute of a head that scores by itself (one that is cut over ranks): a function with the
#: arguments of `head_logp`.
SCORES = "_cute_kernels_scores"
#: Attribute of a module of a patched model: the options that its forward reads.
NOTES = "_cute_kernels"


@dataclass(frozen=True)
class Scoring:
    """Arguments of ``ck.linear_logp`` besides tensors of the model."""

    order: str = "chain"
    temperature: float | torch.Tensor = 1.0
    softcap: float = 0.0
    ignore_index: int = -100
    return_entropy: bool = False
    vocab_size: int | None = None

    def options(self) -> dict[str, object]:
        """The options as keyword arguments; torch 2.11 compiles no graph around ``vars``."""
        return {
            "order": self.order,
            "temperature": self.temperature,
            "softcap": self.softcap,
            "ignore_index": self.ignore_index,
            "return_entropy": self.return_entropy,
            "vocab_size": self.vocab_size,
        }


def head_logp(
    head: torch.nn.Module, hidden: torch.Tensor, target: torch.Tensor, scoring: Scoring
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``ck.linear_logp`` through a head's parameters, gathered where they are sharded.

    Args:
        head: A linear layer, whose weight is [V, D] once it is whole.
        hidden: [..., D].  target: [...].

    Returns:
        fp32, shaped like ``target``; or (that, entropy).

    Raises:
        As ``ck.linear_logp`` and ``gathering.whole``.
    """
    if (scores := vars(head).get(SCORES)) is not None:
        return scores(head, hidden, target, scoring)
    weight, bias = head.weight, getattr(head, "bias", None)
    if not gathering.is_sharded(weight) and not gathering.is_sharded(bias):
        into = _main_grad(head)
        return api.linear_logp(hidden, weight, target, bias, main_grad=into, **scoring.options())
    # Autograd records the shapes of parameters where the node is made: those of whole ones.
    with gathering.whole((weight, bias)):
        outputs = _HeldHead.apply(hidden, weight, bias, target, scoring)
    return outputs if scoring.return_entropy else outputs[0]


def head_policy_loss(
    head: torch.nn.Module,
    hidden: torch.Tensor,
    target: torch.Tensor,
    scoring: Scoring,
    options: Mapping[str, object],
) -> api.PolicyLoss:
    """``ck.linear_policy_loss`` through a head's parameters, gathered where they are sharded.

    Its gradients are made in the forward, so a backward reads no parameter.

    Raises:
        ArgumentValueError: a head that is cut over ranks, or whose gradient goes to a main_grad.
        Others: as ``ck.linear_policy_loss`` and ``gathering.whole``.
    """
    want = "a head that ck.linear_policy_loss takes (score it with token_logps, and a loss of it)"
    if SCORES in vars(head):
        raise ArgumentValueError(expected("model", want, "one that is cut over ranks"))
    if _main_grad(head) is not None:
        raise ArgumentValueError(expected("model", want, "one with main_grad"))
    weight, bias = head.weight, getattr(head, "bias", None)
    named = scoring.options()
    del named["return_entropy"]
    with gathering.whole((weight, bias)):
        return api.linear_policy_loss(hidden, weight, target, bias, **named, **options)


def _main_grad(head: torch.nn.Module) -> torch.Tensor | None:
    """Destination of the gradient of a head's weight besides ``grad``, as its module has it."""
    wanted = getattr(vars(head).get(NOTES, head), "main_grad", False)
    return getattr(head.weight, "main_grad", None) if wanted and torch.is_grad_enabled() else None


class _HeldHead(torch.autograd.Function):
    """`linear_logp` of whole parameters, which are gathered again around its backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, scoring):
        ctx.dtype = checking.cast_dtype(hidden)
        # Not saved tensors: hooks that move those elsewhere would copy a whole weight.
        ctx.weight, ctx.bias = weight, bias
        with _no_autocast(hidden.device):
            x, w, b = (_cast(t, ctx.dtype) for t in (hidden, weight, bias))
            problem = checks.linear_logp(
                x, w, target, b, checks.Options(**scoring.options()), False
            )
            ctx.numbers = (
                problem.temperature,
                problem.start,
                problem.vocab,
                scoring.ignore_index,
                problem.softcap,
                scoring.order,
            )
            ctx.temperatures = problem.temperatures
            results = op.linear_logp(
                x, w, b, target, ctx.temperatures, None, *ctx.numbers, scoring.return_entropy, 0
            )[:3]
        # Hooks for the backward hang on what is returned: FSDP2 warns of one that is a view.
        logp, lse2, entropy = (t.clone() if t._is_view() else t for t in results)
        ctx.save_for_backward(hidden, target, lse2, entropy)
        if not scoring.return_entropy:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, d_logp, d_entropy):
        hidden, target, *saved = ctx.saved_tensors
        inputs = (hidden, ctx.weight, ctx.bias)
        needs = list(ctx.needs_input_grad[:3])
        upstream = d_logp, d_entropy if saved[1].numel() else None, None
        with gathering.whole(inputs[1:]), _no_autocast(hidden.device):
            operands = [_cast(t, ctx.dtype) for t in inputs]
            gradients = op.linear_logp_backward(
                *upstream, *operands, target, ctx.temperatures, *saved, None, *ctx.numbers, needs
            )
        triples = zip(gradients, inputs, needs, strict=True)
        return *(g.to(t.dtype) if need else None for g, t, need in triples), None, None


def _cast(t: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if t is None else t.to(dtype)


def _no_autocast(device: torch.device):
    """Disable autocast: operands are cast already, and gradients must not be cast."""
    has_autocast = device.type in ("cpu", "cuda")
    return torch.autocast(device.type, enabled=False) if has_autocast else contextlib.nullcontext()
