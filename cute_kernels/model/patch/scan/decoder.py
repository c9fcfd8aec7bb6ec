"""Identify the decoder layers that add a residual and normalize the sum, by their bytecode."""

from __future__ import annotations

from types import FunctionType

from .rotary import alike

#: Name of the module that normalizes the sum.
NORM = "post_attention_layernorm"
#: Module of transformers whose `GradientCheckpointingLayer` wraps the forwards of its subclasses.
_CHECKPOINTING = "transformers.modeling_layers"


def is_pre_norm(cls: type) -> bool:
    """Whether the forward of a class is `_pre_norm`, arguments named alike."""
    forward = _inside_checkpointing(cls.forward)
    return alike(forward, _pre_norm) and _arguments(forward) == _arguments(_pre_norm)


def _inside_checkpointing(forward: object) -> object:
    """Return the forward inside what transformers puts around it for gradient checkpointing.

    A subclass gets one of its own around its own forward; those inside do nothing then.
    """
    while isinstance(forward, FunctionType) and hasattr(forward, "__wrapped__"):
        if forward.__globals__.get("__name__") != _CHECKPOINTING:
            break
        forward = forward.__wrapped__
    return forward


def _arguments(function: FunctionType) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount]


def _pre_norm(
    self,
    hidden_states,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    use_cache=False,
    position_embeddings=None,
    **kwargs,
):
    # Llama, Mistral, Qwen2, Qwen3 and about seventy more
    start = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    hidden_states = start + hidden_states
    start = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = start + hidden_states
    return hidden_states
