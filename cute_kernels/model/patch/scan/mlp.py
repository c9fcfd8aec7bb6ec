"""Identify the MLPs that multiply an activation of one product by another, by their bytecode."""

from __future__ import annotations

from types import FunctionType

from .rotary import alike

#: Name of the activation.
ACTIVATION = "act_fn"


def is_gated(cls: type) -> bool:
    """Whether the forward of a class is `_gated`."""
    forward = cls.forward
    return isinstance(forward, FunctionType) and alike(forward, _gated)


def _gated(self, x):
    # Llama, Mistral, Qwen2, Qwen3, Gemma, OLMo 2 and many more
    y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y
