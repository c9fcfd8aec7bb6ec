"""Classes of patched modules: a subclass of the author's with a forward of ours, by its name."""

from __future__ import annotations

import copyreg
import inspect
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from types import FunctionType
from typing import NamedTuple

import torch

from ...errors import ArgumentTypeError, ShapeError, expected
from ...gemm import api as gemm
from ...integrations import causal_lm
from ...integrations import transformers as integration
from ...integrations.sharded_head import Scoring
from ...rowwise import api as rowwise
from .forwards import mixers
from .forwards.authors import forward_of
from .forwards.layers import (
    EmbeddingStep,
    ParallelEmbeddingStep,
    activation,
    conv1d,
    embedding,
    experts_forward,
    head,
    layer_norm,
    linear,
    parallel_forwards,
    rms_norm,
    rotary,
)
from .forwards.modes import attending, invariant
from .state import KIND, NOTES, Action, user_class

# ---- causal LMs ----------------------------------------------------------------------------------
# Forward of a causal LM after its base model: soft cap and loss by ops of ours.
#
# base model ─> hidden states ─> head ─> soft cap ─> logits
#                            └─> head with targets (ck.linear_logp) ─> loss

#: The default target of tokens without a loss.
IGNORED = -100


def _causal_lm(cls: type) -> Callable:
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

    @wraps(author)
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
        # Pad last: a slice of padded labels is not aligned, and such calls are planned anew.
        more = min(1, labels.shape[-1])
        target = torch.nn.functional.pad(labels[..., 1:], (0, more), value=ignored)
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

    from .forwards.outputs import LossWithoutLogits

    kind = LossWithoutLogits if logits is None else CausalLMOutputWithPast
    return kind(
        loss=loss,
        logits=logits,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )


# ---- table of forwards ---------------------------------------------------------------------------

#: Forwards that multiply and are cut over ranks, in ../../parallel/forwards.py -> op in a report.
PARALLEL_PRODUCTS = {
    "column": "column_parallel_linear",
    "column_gather": "column_parallel_linear, gathered",
    "row": "row_parallel_linear",
    "row_split": "row_parallel_linear",
    "head_parallel": "column_parallel_linear, ck.linear_logp(group=)",
}
#: Forward of experts that are cut over ranks, whose products are there.
EXPERTS_PARALLEL = "experts_parallel"


class Forward(NamedTuple):
    """A forward of ours.

    by: what computes, in a report.  forward: for modules of any class.  of: a factory of the
    forward for a class, with its author's signature.  step: a class below the author's in the
    method resolution order instead.  None of them: the forward is in ../../parallel/forwards.py.
    """

    by: str
    forward: Callable | None = None
    of: Callable[[type], Callable] | None = None
    step: type | None = None


_BY_VOCABULARY = "ck.embedding, by the vocabulary"
#: Forwards in place of those that `authors` knows.
_BY_AUTHORS = {
    "positions": "ck.embedding for each sequence, where gradients go to main_grad",
    "attention": "ck.apply_rotary_pos_emb",
    "mlp": "the activation and its product in one launch",
    "residual": "ck.rms_norm(residual=)",
    "base_model": "no mask where nothing is padded or packed",
    mixers.LAYER: "packs handed on to a mixer",
    mixers.BASE_MODEL: "packs handed on to layers with a state",
    mixers.STATEFUL: "a cache that drops tokens, for assisted generation",
}

#: Name of a forward -> the forward.
FORWARDS: dict[str, Forward] = {
    "linear": Forward("ck.linear", linear),
    "head": Forward("ck.linear, ck.linear_logp", head),
    "conv1d": Forward("ck.linear", conv1d),
    "rms_norm": Forward("ck.rms_norm", rms_norm),
    "layer_norm": Forward("ck.layer_norm", layer_norm),
    "silu": Forward("ck.silu", activation(rowwise.silu)),
    "gelu": Forward("ck.gelu", activation(rowwise.gelu)),
    "gelu_tanh": Forward(
        "ck.gelu(approximate='tanh')",
        activation(partial(rowwise.gelu, approximate="tanh")),
    ),
    "tanh": Forward("ck.tanh", activation(rowwise.tanh)),
    "sigmoid": Forward("ck.sigmoid", activation(rowwise.sigmoid)),
    # x σ(1.702 x), in the steps of transformers
    "quick_gelu": Forward(
        "ck.sigmoid", activation(lambda input: input * rowwise.sigmoid(1.702 * input))
    ),
    "embedding": Forward("ck.embedding", embedding),
    "embedding_step": Forward("ck.embedding", step=EmbeddingStep),
    "rotary": Forward("ck.rotary_table", rotary),
    **{kind: Forward(by, of=partial(forward_of, kind)) for kind, by in _BY_AUTHORS.items()},
    mixers.DELTA_NET: Forward("ck.chunk_gated_delta_rule", mixers.mixer),
    mixers.MAMBA2: Forward("ck.mamba_chunk_scan_combined", mixers.mixer),
    mixers.MAMBA: Forward("ck.selective_scan", mixers.mixer),
    mixers.KDA: Forward("ck.chunk_kda", mixers.mixer),
    mixers.GATE: Forward("ck.chunk_kda, its gate", mixers.forget_gate),
    mixers.CONVOLUTION: Forward("ck.causal_conv1d_fn", mixers.causal_conv1d),
    "gated_rms_norm": Forward("ck.gated_rms_norm", mixers.gated_rms_norm),
    "experts": Forward("ck.moe.permute, ck.grouped_linear, ck.moe.combine", of=experts_forward),
    "invariant": Forward("its author's forward in ck.batch_invariant", of=invariant),
    "scores": Forward(
        "its author's forward, softmax(q kᵀ) v by ck.block_sparse_attention", of=attending
    ),
    "causal_lm": Forward("ck.tanh, and in the loss ck.linear_logp(softcap=)", of=_causal_lm),
    **{kind: Forward(by) for kind, by in PARALLEL_PRODUCTS.items()},
    "head_norm": Forward("ck.rms_norm, dweight over the heads of all ranks"),
    "embedding_parallel": Forward(_BY_VOCABULARY),
    "embedding_step_parallel": Forward(_BY_VOCABULARY, step=ParallelEmbeddingStep),
    EXPERTS_PARALLEL: Forward(
        "ck.moe.permute, column_ and row_parallel_grouped_linear, ck.moe.combine",
        of=lambda cls: experts_forward(cls, parallel_forwards()[EXPERTS_PARALLEL]),
    ),
}


# ---- classes -------------------------------------------------------------------------------------
#: Each forward of ours -> the author's forward that it replaces.
_AUTHORS: dict[FunctionType, Callable] = {}


def prepare(actions: Iterable[Action]) -> list[tuple[Action, type]]:
    """Make the classes that actions ask for, which may raise, before a module is changed."""
    return [(action, patched_class(user_class(action.module), action.kind)) for action in actions]


@cache
def patched_class(cls: type, kind: str) -> type:
    """Return the subclass of ``cls`` with the forward of that name."""

    def reduced(self, protocol):
        """Reduce to the author's class: pickles cannot import this one."""
        reduction = super(new, self).__reduce_ex__(protocol)
        if type(self) is not new or reduction[0] is not copyreg.__newobj__:
            return reduction
        return (_anew, (cls, kind), *reduction[2:])

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {KIND: kind, "__reduce_ex__": reduced}
    if kind in (mixers.BASE_MODEL, mixers.STATEFUL):
        names[mixers.STATEFUL_FLAG] = False
    ours = FORWARDS[kind]
    # A step goes below the author's forward, which calls it by super().
    bases = (cls,) if ours.step is None else (cls, ours.step)
    if ours.step is None:
        forward = ours.of(cls) if ours.of else ours.forward or parallel_forwards()[kind]
        described = cls.forward if ours.of else forward
        names["forward"] = _while_patched(forward, cls.forward, described)
    new = type(cls.__name__, bases, names)
    return new


def author_of(function: object) -> Callable | None:
    """Return the author's forward that one of ours replaces; None: it is none of ours."""
    return _AUTHORS.get(function) if isinstance(function, FunctionType) else None


def _while_patched(ours: Callable, author: Callable, described: Callable) -> FunctionType:
    """Return a forward that calls ``ours`` on patched modules and the author's on others.

    It has the docstring and signature of ``described``.

    accelerate and TRL keep a module's forward, and call it from one of their own when `restore` has
    given the class back.  accelerate also takes its own off again, and goes by ``__wrapped__`` to
    the innermost function: this one has none.
    """

    def forward(self, *args, **kwargs):
        return (ours if hasattr(self, NOTES) else author)(self, *args, **kwargs)

    forward.__doc__ = described.__doc__
    forward.__signature__ = inspect.signature(described)
    _AUTHORS[forward] = author
    return forward


def _anew(cls: type, kind: str) -> torch.nn.Module:
    """Create an empty module, whose state a pickle or copy sets next."""
    if "transformers" in sys.modules and integration.why_not() is None:
        integration.register()
    new = patched_class(cls, kind)
    return new.__new__(new)
