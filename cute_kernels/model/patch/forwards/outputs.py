"""Output of a patched causal LM in training: a loss, and no logits.

Imported when a forward returns, as it imports transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers.modeling_outputs import CausalLMOutputWithPast


@dataclass
class LossWithoutLogits(CausalLMOutputWithPast):
    """Output of transformers in which ``outputs[1]`` remains the place of the logits.

    transformers leaves out what is None, so that ``outputs[1]`` would be the cache.
    """

    def to_tuple(self) -> tuple:
        """Return the loss, None for the logits, and the other values that are not None."""
        loss, *other_values = super().to_tuple()
        return (loss, None, *other_values)
