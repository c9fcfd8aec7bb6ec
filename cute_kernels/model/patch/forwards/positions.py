"""Learned positions that are looked up once and broadcast over the batch.

autograd then adds the gradients of the sequences before ck.embedding sees them, and rounds the sum:
main_grad would follow the split into micro-batches.  Where the model is known, each sequence looks
its positions up, so that ck.embedding adds all of them in the order of the tokens.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator

import torch

#: Classes of transformers whose forward broadcasts position_ids of its own, and takes others.
_BROADCASTS = {
    ("transformers.models.gpt2.modeling_gpt2", "GPT2Model"),
    ("transformers.models.gpt_bigcode.modeling_gpt_bigcode", "GPTBigCodeModel"),
    ("transformers.models.gpt_neo.modeling_gpt_neo", "GPTNeoModel"),
    ("transformers.models.bert.modeling_bert", "BertEmbeddings"),
}
#: Names of embeddings that other models may look up once for a batch.
_OF_POSITIONS = re.compile(r"(^|_)(wpe|pos|positions?|positional|relative)(_|$)")


def is_known(cls: type) -> bool:
    """Whether a class gets a forward that looks positions up for each sequence."""
    return (cls.__module__, cls.__name__) in _BROADCASTS


def broadcast(
    embeddings: Iterable[tuple[str, torch.nn.Module]], position_modules: Iterable[torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the embeddings whose look-ups may be broadcast, by name, outside of known modules."""
    inside = {id(part) for module in position_modules for part in module.modules()}
    for name, module in embeddings:
        if id(module) not in inside and _OF_POSITIONS.search(name.rpartition(".")[2]):
            yield name, module


def forward_of(cls: type) -> Callable:
    """Wrap the author's forward: it gets position_ids [B, T] if gradients go to a main_grad."""
    author = cls.forward
    names = list(inspect.signature(author).parameters)[1:]

    @functools.wraps(author)
    def forward(self, *args, **kwargs):
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if self._cute_kernels.main_grad and torch.is_grad_enabled():
            arguments["position_ids"] = _for_each_sequence(arguments)
        return author(self, **arguments)

    return forward


def _for_each_sequence(arguments: dict[str, object]) -> torch.Tensor | None:
    """Return position_ids [B, T] of a call that passes [1, T] or none."""
    tokens, embedded, ids = (
        arguments.get(name) for name in ("input_ids", "inputs_embeds", "position_ids")
    )
    if tokens is None and embedded is None:
        return ids
    like = tokens if tokens is not None else embedded[..., 0]
    rows = like.reshape(-1, like.shape[-1])
    if ids is None:
        cache = arguments.get("past_key_values")
        past = arguments.get("past_key_values_length", 0)
        past = past if cache is None else cache.get_seq_length()
        ids = torch.arange(rows.shape[1], device=rows.device) + past
    return ids.expand_as(rows) if ids.dim() == 1 or ids.shape[0] == 1 else ids
