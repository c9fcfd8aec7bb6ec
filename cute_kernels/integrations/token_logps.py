"""Log-probabilities and policy losses of a causal language model's tokens, without its logits.

The model is called as it always is, through whatever wraps it, but its forward is another for the
time of the call: the base model, then ``ck.linear_logp`` or ``ck.linear_policy_loss`` in place of
the head's product.  So each hook that a wrapper has put on the model or on the head runs as before,
and gathers and releases what it gathers: DDP, DeepSpeed's ZeRO-3 (deepspeed.py), FSDP2 (fsdp.py).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, ShapeError, expected
from ..logp.api import PolicyLoss
from ..runtime import checking
from . import causal_lm
from .sharded_head import Scoring, head_logp, head_policy_loss

#: Names of modules that look positions up.
_POSITION_TABLE = re.compile(r"(^|\.)(embed_positions|position_embeddings?|wpe)$")


def token_logps(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    targets: torch.Tensor | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    ignore_index: int = -100,
    temperature: float | torch.Tensor = 1.0,
    return_entropy: bool = False,
    order: str = "chain",
    vocab_size: int | None = None,
    last: int = 0,
    **inputs: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Score each token with any ``AutoModelForCausalLM`` of transformers or a wrapper of one.

    Args:
        model: The causal LM; or a DDP module, a DeepSpeed engine, a PEFT model around it; or one
            that ``fully_shard`` was applied to.  One call at a time for one model.
        input_ids: int [B, S].
        targets: None: the ids themselves, each predicted from those before it.  Else int [B, S]:
            targets[b, t] is scored by the hidden state of position t (nothing is shifted).
            ``input_ids`` themselves, or labels that are them where not ignored, are refused.
        attention_mask: [B, S] or None, for the model.  Without ``targets``, a token is masked where
            it or the position that predicts it is 0.  Positions count its tokens, as in
            ``generate``, unless ``position_ids`` is passed: padding does not move a sequence.
        ignore_index: Targets to mask: log-prob 0, entropy 0, and no gradient.  They are never
            looked up.
        temperature: Logits are divided by it: a number, or a tensor shaped like the result.
        return_entropy: Whether the entropy of each distribution is returned too.
        order: Of the logits' sums, as in ``ck.linear``.
        vocab_size: Only the first so many rows of the head count, if it is padded; None: all.
        last: Only the last so many tokens are scored; 0: all.
        inputs: More arguments for the base model, such as ``position_ids``.

    Returns:
        fp32 [B, S - 1], of ``input_ids[:, 1:]``; with ``targets`` [B, S]; with ``last`` the last of
        these columns; or (that, entropy).  They
        are those of the model's logits: its soft cap and scale are applied, in fp32, before
        ``temperature``.  Losses that the model adds to its own (of routers, say) are not.

    Raises:
        ArgumentTypeError: there is no causal LM, base model or plain linear head in it; hidden
            states are not found, or could be several; other hidden states than [B, S, D].
        ArgumentValueError: an id outside of the vocabulary (masked targets are not looked at);
            targets that are not shifted; a
            setting of the config that changes logits in a way that is not known; padding before
            tokens, for a model with learned positions that takes no ``position_ids``.
        ShapeError, DtypeError: ids, targets or a mask of another shape or dtype.
        Others: as ``ck.linear_logp``.
    """
    scoring = Scoring(order, temperature, 0.0, ignore_index, return_entropy, vocab_size)
    tokens = input_ids, targets, attention_mask, last
    return _scored(model, *tokens, scoring, inputs, head_logp)


def policy_loss(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    *,
    targets: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    ignore_index: int = -100,
    temperature: float | torch.Tensor = 1.0,
    order: str = "chain",
    vocab_size: int | None = None,
    last: int = 0,
    inputs: Mapping[str, object] | None = None,
    **options: object,
) -> PolicyLoss:
    """Policy loss of a causal LM's tokens, by ``ck.linear_policy_loss`` without the logits.

    Hidden states, positions, soft cap, scale and wrappers are those of `token_logps`: with the same
    weights ``old_logp=token_logps(model, input_ids, attention_mask=...)`` has ratios of exactly 1.

    Args:
        model, input_ids, targets, attention_mask, ignore_index, temperature, order, vocab_size,
            last: As in `token_logps`.
        inputs: More arguments for the base model, such as ``position_ids``.
        options: Of ``ck.linear_policy_loss``: ``loss``, ``advantages``, ``old_logp``, ``mask`` and
            others; tensors have the shape of `token_logps`'s result, or a value a sequence.

    Returns:
        What ``ck.linear_policy_loss`` returns: (loss, logp, entropy, metrics).

    Raises:
        ArgumentValueError: the head is cut over ranks, or its gradient goes to a ``main_grad``.
        Others: as `token_logps` and ``ck.linear_policy_loss``.
    """
    scoring = Scoring(order, temperature, 0.0, ignore_index, vocab_size=vocab_size)
    tokens = input_ids, targets, attention_mask, last
    compute = functools.partial(head_policy_loss, options=options)
    return _scored(model, *tokens, scoring, dict(inputs or {}), compute)


def _scored(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    targets: torch.Tensor | None,
    mask: torch.Tensor | None,
    last: int,
    scoring: Scoring,
    inputs: dict[str, object],
    compute: Callable[..., object],
) -> object:
    """Run the model with ``compute(head, hidden, target, scoring)`` in place of its head."""
    outer, inner = causal_lm.unwrapped(model)
    _check_ids("input_ids", input_ids, causal_lm.vocabulary(inner))
    scored = _targets(input_ids, targets, mask, last, scoring.ignore_index)
    base, head = causal_lm.base_model(inner), causal_lm.head(inner)
    change = causal_lm.transform(inner)
    # A scale of logits and a temperature are one factor: two would round twice.
    temperature = scoring.temperature
    temperature = temperature if change.scale == 1.0 else temperature / change.scale
    scoring = dataclasses.replace(scoring, temperature=temperature, softcap=change.softcap)
    base_inputs = {"input_ids": input_ids, "attention_mask": mask, **inputs}
    parameters = inspect.signature(base.forward).parameters
    if "use_cache" in parameters:
        base_inputs.setdefault("use_cache", False)
    if base_inputs.get("position_ids") is None and _has_inner_padding(mask):
        positions = _positions(base, "position_ids" in parameters, mask, inputs)
        base_inputs.update({} if positions is None else {"position_ids": positions})

    def forward(**kwargs):
        # Wrappers pass arguments of the causal LM as None.
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        hidden = causal_lm.hidden_states(base(**kwargs), head.width)
        if hidden.shape[:-1] != input_ids.shape:
            want = f"one hidden state a token, {list(input_ids.shape)}"
            raise ArgumentTypeError(expected("the base model's output", want, list(hidden.shape)))
        end = hidden.shape[1] - (targets is None)
        hidden = hidden[:, end - scored.shape[1] : end]
        with causal_lm.other_forward(
            head.module, lambda h: compute(head.module, h, scored, scoring)
        ):
            return head.module(hidden)

    with causal_lm.other_forward(inner, forward):
        return outer(**base_inputs)


def _targets(
    ids: torch.Tensor,
    targets: torch.Tensor | None,
    mask: torch.Tensor | None,
    last: int,
    ignore_index: int,
) -> torch.Tensor:
    """Target tokens to score: the last ones of [B, S - 1] or [B, S]."""
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise ArgumentTypeError(expected("attention_mask", "a tensor", type(mask).__name__))
    if targets is not None:
        _check_ids("targets", targets, None)
        if targets.shape != ids.shape:
            want = f"None (score input_ids[:, 1:]), or the shape of input_ids, {list(ids.shape)}"
            raise ShapeError(expected("targets", want, list(targets.shape)))
        if _is_unshifted(ids, targets, ignore_index):
            want = (
                "the tokens after those of input_ids (None: input_ids[:, 1:]), as none is shifted"
            )
            raise ArgumentValueError(expected("targets", want, "input_ids themselves"))
    count = ids.shape[1] - (targets is None)
    if isinstance(last, bool) or not isinstance(last, int) or not 0 <= last <= count:
        want = f"0 (all), or a number of the {count} tokens that are scored"
        raise ArgumentValueError(expected("last", want, last))
    if targets is not None:
        return targets[:, -last:]
    scored = ids[:, 1:]
    if mask is not None:
        if mask.shape != ids.shape:
            want = f"the shape of input_ids, {list(ids.shape)}; with any other one give targets"
            raise ShapeError(expected("attention_mask", want, list(mask.shape)))
        valid = mask != 0
        scored = scored.masked_fill(~(valid[:, 1:] & valid[:, :-1]), ignore_index)
    return scored[:, -last:]


def _is_unshifted(ids: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> bool:
    """Whether targets are the ids of their own positions: labels that transformers would shift.

    Values are compared on a CPU alone, where reading them waits for nothing.
    """
    if targets.data_ptr() == ids.data_ptr() and targets.stride() == ids.stride():
        return ids.shape[1] > 1
    if ids.device.type != "cpu":
        return False
    scored = targets != ignore_index
    if ids.shape[1] < 2 or not bool((scored.sum(1) > 1).any()):
        return False
    follows = (targets[:, :-1] == ids[:, 1:]) | ~scored[:, :-1]
    return bool(((targets == ids) | ~scored).all() & ~follows.all())


def _has_inner_padding(mask: torch.Tensor | None) -> bool:
    """Whether a 2-D mask has padding before a token: then columns are not positions."""
    if mask is None or mask.dim() != 2:
        return False
    valid = mask != 0
    return bool((valid[:, 1:] & ~valid[:, :-1]).any())


def _positions(
    base: torch.nn.Module, takes_positions: bool, mask: torch.Tensor, inputs: dict[str, object]
) -> torch.Tensor | None:
    """Return the positions that ``generate`` gives these tokens, or None if the model counts them.

    Raises:
        ArgumentValueError: the model looks columns up in a table of positions.
    """
    # Qwen-VL derives the positions of images and text from the mask.
    if inputs and hasattr(base, "get_rope_index"):
        return None
    if takes_positions:
        valid = mask != 0
        return (valid.long().cumsum(-1) - 1).masked_fill(~valid, 0)
    # ALiBi and recurrent models read the mask alone.
    for name, _ in base.named_modules():
        if _POSITION_TABLE.search(name):
            want = f"padding on the right, as {type(base).__name__} takes no position_ids"
            raise ArgumentValueError(expected("attention_mask", want, "padding before a token"))
    return None


def _check_ids(name: str, ids: object, count: int | None) -> None:
    checking.operand(name, ids, "[B, S]", checking.INTEGERS)
    if count is None or not ids.numel():
        return
    # An index outside would be read from other memory, or end the process on a GPU.
    least, most = (int(edge) for edge in ids.aminmax())
    if least < 0 or most >= count:
        bad_id = least if least < 0 else most
        raise ArgumentValueError(expected(name, f"ids of a vocabulary of {count}", bad_id))
