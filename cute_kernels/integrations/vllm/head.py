"""The LM head: fp32 logits, which are those that `ck.linear_logp` makes in the trainer."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from ...cpu.ieee import ieee_on
from ...errors import PatchError, expected
from ...runtime import products
from ...runtime.operands import flat_rows
from . import releases
from .layers import EmbeddingMethod, exchange

_ORDER = "chain"


class Head(ParallelLMHead):
    """ParallelLMHead, whose weight the logits processor reads."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        exchange(self, EmbeddingMethod(), UnquantizedEmbeddingMethod)


class Logits(LogitsProcessor):
    """LogitsProcessor with logits in fp32: the sums of `ck.linear` before they are rounded."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        for name, value, none in (("soft_cap", self.soft_cap, None), ("scale", self.scale, 1.0)):
            if value != none:
                want = f"{none} (no log-prob of such logits was compared with the trainer's)"
                raise PatchError(expected(f"logits processor: {name}", want, value))

    def _get_logits(self, hidden_states, lm_head, embedding_bias, *_):
        logits = fp32_logits(hidden_states, lm_head.weight, embedding_bias)
        return logits[..., : self.org_vocab_size]


def fp32_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits [..., V] in fp32: hidden weightᵀ + bias, as `ck.linear_logp` makes them."""
    rows = flat_rows(hidden, "logits")
    if not len(rows):
        return hidden.new_empty(*hidden.shape[:-1], len(weight), dtype=torch.float32)
    with ieee_on(rows):
        logits = products.sums(rows, weight, _ORDER)
        if bias is not None:
            logits += bias.float()
    return logits.view(*hidden.shape[:-1], len(weight))


def register() -> None:
    """Put these classes in the place of vLLM's."""
    releases.register_layer(ParallelLMHead, Head, ParallelLMHead.__name__)
    releases.register_layer(LogitsProcessor, Logits, LogitsProcessor.__name__)
