"""Output of a patched causal LM in training: a loss, and no logits.

Imported when a forward returns, as it imports transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers.modeling_outputs import CausalLMOutputWithPast


@dataclass
class LossWithoutLogits(CausalLMOutputWithPast):
    """transformers' output, in which ``outputs[1]`` stays the logits' place.

    transformers leaves out what is None, so that ``outputs[1]`` would be the cache.
    """

    def to_tuple(self) -> tuple:
        """The loss, None for the logits, and what else is not None."""
        loss, *others = super().to_tuple()
        return (loss, None, *others)
