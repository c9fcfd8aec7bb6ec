"""Forward of a decoder layer that adds a residual and normalizes the sum in one launch.

The bytes are those of the two steps, in the backward too: there the launches are two as well, as
autograd rounds the norm's gradient before it adds that of the residual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.nn.modules.module import _has_any_global_hook

from ..scan.decoder import is_pre_norm

#: (norm, residual, update) -> (normalized sum, sum), or None where two steps are needed.
_AddNorm = Callable[..., tuple[torch.Tensor, torch.Tensor] | None]


def forward_of(cls: type, add_norm: _AddNorm) -> Callable:
    """Return the forward of a decoder layer; the author's own where it is not known."""
    author = cls.forward
    if not is_pre_norm(cls):
        return author

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
        **kwargs,
    ):
        inputs = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            "position_embeddings": position_embeddings,
            **kwargs,
        }
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, **inputs)
        norm = self.post_attention_layernorm
        fused = add_norm(norm, residual, hidden_states)
        if fused is None:
            residual = residual + hidden_states
            hidden_states = norm(residual)
        else:
            hidden_states, residual = fused
        return residual + self.mlp(hidden_states)

    forward.__doc__ = author.__doc__
    forward.__signature__ = inspect.signature(author)
    return forward


def is_bare(module: torch.nn.Module) -> bool:
    """Whether a call of a module runs its class's forward and nothing else."""
    hooked = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or _has_any_global_hook()
    )
    return not hooked


def alike(residual: torch.Tensor, update: torch.Tensor) -> bool:
    """Whether an addition has no broadcast, no promotion and no subclass's own rules."""
    return (
        type(residual) is type(update) is torch.Tensor
        and residual.dtype == update.dtype
        and residual.shape == update.shape
        and residual.device == update.device
    )
