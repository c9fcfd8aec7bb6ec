"""The LM head: fp32 logits, which are those that `ck.linear_logp` makes in the trainer."""

from __future__ import annotations

from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from ...errors import PatchError, expected
from .. import engine_logits
from . import ranks, releases
from .layers import EmbeddingMethod, exchange


class Head(ParallelLMHead):
    """ParallelLMHead, whose weight the logits processor reads."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.cute_kernels_order = ranks.current_order()
        exchange(self, EmbeddingMethod(), UnquantizedEmbeddingMethod)


class Logits(LogitsProcessor):
    """LogitsProcessor with logits in fp32: the sums of `ck.linear` before they are rounded."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.order = ranks.current_order()
        for name, value, none in (("soft_cap", self.soft_cap, None), ("scale", self.scale, 1.0)):
            if value != none:
                want = f"{none} (no log-prob of such logits was compared with the trainer's)"
                raise PatchError(expected(f"logits processor: {name}", want, value))

    def _get_logits(self, hidden_states, lm_head, embedding_bias, *_):
        logits = engine_logits.fp32_logits(
            hidden_states, lm_head.weight, embedding_bias, order=self.order
        )
        if lm_head.tp_size > 1:
            logits = self._gather_logits(logits)
        return None if logits is None else logits[..., : self.org_vocab_size]


def register() -> None:
    """Put these classes in the place of vLLM's."""
    releases.register_layer(ParallelLMHead, Head, ParallelLMHead.__name__)
    releases.register_layer(LogitsProcessor, Logits, LogitsProcessor.__name__)
