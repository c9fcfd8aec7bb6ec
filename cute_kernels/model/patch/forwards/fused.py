"""Forwards of decoder layers and MLPs in which two steps are one launch, with the bytes of two.

In the backward the residual's norm has two launches as well: autograd rounds its gradient before it
adds that of the residual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.nn.modules.module import _has_any_global_hook

from ....norm import op as norm_op
from ....norm.config import RMS
from ....rowwise import op as rowwise_op
from ....rowwise.config import GATES
from .. import checks
from ..scan import authors
from .notes import KIND, NOTES, eps_of, main_grad_of, parameter_of

# ---- residual, then norm -------------------------------------------------------------------------


def pre_norm(cls: type) -> Callable:
    """Return the forward of a decoder layer; the author's own where it is not known."""
    author = cls.forward
    if not authors.is_pre_norm(cls):
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
        fused = _add_rms_norm(norm, residual, hidden_states)
        if fused is None:
            residual = residual + hidden_states
            hidden_states = norm(residual)
        else:
            hidden_states, residual = fused
        return residual + self.mlp(hidden_states)

    forward.__doc__ = author.__doc__
    forward.__signature__ = inspect.signature(author)
    return forward


def _add_rms_norm(
    module: torch.nn.Module, residual: torch.Tensor, update: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    # (norm(h), h), h = residual + update, in one launch; None: hooks or operands want two steps.
    if not (_is_ours(module, ("rms_norm",)) and is_plain_pair(residual, update)):
        return None
    notes = module._cute_kernels
    weight = parameter_of(module, notes.weight)
    operands = update, residual, weight, None, main_grad_of(module, weight), None
    y, h, _, _ = norm_op.norm_in_steps(*operands, RMS, eps_of(module), notes.offset)
    return y, h


# ---- activation, times up ------------------------------------------------------------------------


def gated(cls: type) -> Callable:
    """Return the forward of an MLP; the author's own where it is not known."""
    author = cls.forward
    if not authors.is_gated(cls):
        return author

    def forward(self, x):
        # down(f(gate(x)) · up(x))
        gate, up = self.gate_proj(x), self.up_proj(x)
        product = gate_product(self.act_fn, gate, up) if is_plain_pair(gate, up) else None
        return self.down_proj(self.act_fn(gate) * up if product is None else product)

    forward.__doc__ = author.__doc__
    return forward


def gate_product(
    activation: torch.nn.Module, gate: torch.Tensor, up: torch.Tensor
) -> torch.Tensor | None:
    """f(gate) · up in one launch; None: another activation, or hooks want to see f(gate)."""
    if not _is_ours(activation, GATES):
        return None
    checks.unchanged(activation, activation._cute_kernels.reads)
    return rowwise_op.gated(gate, up, vars(type(activation))[KIND], True)


# ---- conditions ----------------------------------------------------------------------------------


def _is_ours(module: torch.nn.Module, kinds: tuple[str, ...]) -> bool:
    """Whether a call of a module runs our forward of one of these kinds, and nothing else."""
    kind = vars(type(module)).get(KIND)
    return kind in kinds and NOTES in vars(module) and is_bare(module)


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


def is_plain_pair(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an op of two tensors has no broadcast, no promotion and no subclass's own rules."""
    return (
        type(a) is type(b) is torch.Tensor
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.device == b.device
    )
