"""Forward of a causal LM after its base model: soft cap and loss by ops of ours.

base model ─> hidden states ─> head ─> soft cap ─> logits
                           └─> head with targets (ck.linear_logp) ─> loss
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch

from ....errors import ArgumentTypeError, ShapeError, expected
from ....gemm import api as gemm
from ....integrations import causal_lm, gathering
from ....integrations.sharded_head import Scoring, head_logp
from ....logp import api as logp
from ....rowwise import api as rowwise

#: The default target of tokens without a loss.
IGNORED = -100


def head_scores(
    head: torch.nn.Module,
    hidden: torch.Tensor,
    target: torch.Tensor,
    scoring: Scoring,
    main_grad: torch.Tensor | None,
) -> torch.Tensor:
    """Compute log p of each target, by a head whose parameters may be held in parts."""
    is_gathered = not torch.compiler.is_compiling() and any(
        map(gathering.is_sharded, head.parameters())
    )
    if is_gathered:
        return head_logp(head, hidden, target, scoring)
    options = scoring.options()
    return logp.linear_logp(hidden, head.weight, target, head.bias, main_grad=main_grad, **options)


def forward_of(cls: type) -> Callable:
    """Return the forward of a causal LM class of transformers, with the author's signature.

    It is the author's own where neither a soft cap nor our loss is asked for.
    """
    from transformers.utils.generic import can_return_tuple

    author = cls.forward
    names = list(inspect.signature(author).parameters)[1:]
    place = names.index("labels")

    @can_return_tuple
    def ours(self, *args, **kwargs):
        arguments = dict(zip(names, args, strict=False)) | kwargs
        labels, keep = arguments.pop("labels", None), arguments.pop("logits_to_keep", 0)
        outputs = getattr(self, self.base_model_prefix)(**arguments)
        hidden = _select_hidden(outputs.last_hidden_state, keep)
        loss = logits = None
        if labels is not None and _logp(self):
            loss = _loss(self, hidden, labels, arguments)
        # Training does not read the logits, the largest tensor of a step.
        if loss is None or not self.training:
            logits = _logits(self, hidden)
        if labels is not None and loss is None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **arguments)
        return _output(loss, logits, outputs)

    @functools.wraps(author)
    def forward(self, *args, **kwargs):
        scored = kwargs.get("labels") is not None or len(args) > place
        if causal_lm.softcap(self) or (scored and _logp(self)):
            return ours(self, *args, **kwargs)
        return author(self, *args, **kwargs)

    return forward


def _logp(model: torch.nn.Module) -> bool:
    """Whether ``ck.linear_logp`` computes the loss: not where the user set one."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model._cute_kernels.logp and model.loss_function is ForCausalLMLoss


def _select_hidden(hidden: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
    """Select the hidden states whose logits are returned, as transformers does.

    keep: the last so many positions (0: all), positions [P] of every sequence, positions [B, P], or
    a mask [B, S], whose True ones come as one row.
    """
    if isinstance(keep, int):
        return hidden[:, -keep:] if keep else hidden
    if keep.dim() < 2:
        return hidden[:, keep]
    if keep.dtype == torch.bool:
        return hidden[keep]
    return torch.take_along_dim(hidden, keep[..., None], dim=1)


def _logits(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    logits, cap = model.get_output_embeddings()(hidden), causal_lm.softcap(model)
    # cap · tanh(logits / cap)
    return rowwise.tanh(logits / cap) * cap if cap else logits


def _loss(
    model: torch.nn.Module, hidden: torch.Tensor, labels: torch.Tensor, arguments: dict
) -> torch.Tensor:
    """Compute -Σ log p / n over the tokens that count: n of them, or ``num_items_in_batch``."""
    ignored, target = arguments.get("ignore_index", IGNORED), arguments.get("shift_labels")
    if target is None:
        # Position t predicts token t + 1; nothing follows the last.
        target = torch.nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    if target.shape != hidden.shape[:-1]:
        want = f"one for each hidden state, {list(hidden.shape[:-1])}"
        raise ShapeError(expected("labels", want, list(target.shape)))
    head, target = model.get_output_embeddings(), target.to(hidden.device)
    if not (hasattr(head, "_cute_kernels") and head._cute_kernels.logp):
        want = "the head that ck.patch replaced (patch the whole model again, adapters included)"
        raise ArgumentTypeError(expected("get_output_embeddings()", want, type(head).__name__))
    cap = causal_lm.softcap(model)
    scoring = Scoring(head._cute_kernels.order, softcap=cap, ignore_index=ignored)
    scores = head(hidden, target=target, scoring=scoring).reshape(1, -1)
    count = arguments.get("num_items_in_batch")
    if isinstance(count, torch.Tensor):
        count = count.to(scores.device)
    # One chain over the tokens: torch's sum follows their number, and torch.compile's is another.
    with torch.autocast(scores.device.type, enabled=False):
        total = gemm.linear(scores, torch.ones_like(scores), None).squeeze()
    return -total / ((target != ignored).sum() if count is None else count)


def _output(loss: torch.Tensor | None, logits: torch.Tensor | None, outputs):
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from .outputs import LossWithoutLogits

    kind = LossWithoutLogits if logits is None else CausalLMOutputWithPast
    return kind(
        loss=loss,
        logits=logits,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
