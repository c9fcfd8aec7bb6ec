"""Forwards of authors that ours replace, known by their bytecode.

A function is a formula of this file if its instructions are, with any names of local variables, and
so are those of the functions of its own file that the formula calls.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import NamedTuple

import torch

#: Instructions that depend on how the interpreter runs a function, not on what it computes.
_SKIPPED = frozenset({"RESUME", "NOP", "CACHE", "EXTENDED_ARG"})
#: Flags of code that decide how a call is made; the others are of its compilation.
_KINDS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
#: Module of transformers whose `GradientCheckpointingLayer` wraps the forwards of its subclasses.
_CHECKPOINTING = "transformers.modeling_layers"
#: Modules inside whose forwards must be ours: the norm of a layer's sum, and an MLP's activation.
NORM, ACTIVATION = "post_attention_layernorm", "act_fn"
#: Function that transformers' models have each in their own file.
POS_EMB = "apply_rotary_pos_emb"


def kind_of(cls: type) -> str | None:
    """Name of our forward that stands in for that of a class; None: no formula is its."""
    if is_pre_norm(cls):
        return "residual"
    if is_gated(cls):
        return "mlp"
    return "attention" if pos_emb(cls) is not None else None


class PosEmb(NamedTuple):
    """A known function.

    function: The author's.  partial: Whether columns beyond those of cos and sin are copied; else
    there must be none.  keeps_dtype: Whether results are rounded to the dtype of q.
    """

    function: Callable
    partial: bool
    keeps_dtype: bool


def pos_emb(cls: type) -> PosEmb | None:
    """Return the function that the forward of a class calls; None: it is not known."""
    function = _global_function(cls.forward, POS_EMB)
    for formula, partial, keeps_dtype in _FORMULAS:
        if _agrees(function, formula):
            return PosEmb(function, partial, keeps_dtype)
    return None


def _agrees(function: object, formula: FunctionType) -> bool:
    """Whether a function has the instructions of a formula, and calls the same ``rotate_half``."""
    if not _equal(function, formula):
        return False
    rotate = function.__globals__.get("rotate_half")
    return _equal(rotate, rotate_half) and rotate.__globals__.get("torch") is torch is (
        function.__globals__.get("torch", torch)
    )


def is_pre_norm(cls: type) -> bool:
    """Whether the forward of a class is `_pre_norm`, arguments named alike."""
    forward = _inside_checkpointing(cls.forward)
    return _equal(forward, _pre_norm, named_arguments=True)


def is_gated(cls: type) -> bool:
    """Whether the forward of a class is `_gated`."""
    return _equal(cls.forward, _gated)


# ---- comparisons --------------------------------------------------------------------------------


def _equal(function: object, formula: FunctionType, named_arguments: bool = False) -> bool:
    """Whether a function has the arguments and instructions of a formula.

    named_arguments: Whether its arguments must have the names of the formula's as well.
    """
    if not isinstance(function, FunctionType) or function.__closure__:
        return False
    code, known = function.__code__, formula.__code__
    return (
        _call_of(code) == _call_of(known)
        and function.__defaults__ == formula.__defaults__
        and _instructions(code) == _instructions(known)
        and (not named_arguments or _arguments(code) == _arguments(known))
    )


def _inside_checkpointing(forward: object) -> object:
    """Return the forward inside what transformers puts around it for gradient checkpointing.

    A subclass gets one of its own around its own forward; those inside do nothing then.
    """
    while isinstance(forward, FunctionType) and hasattr(forward, "__wrapped__"):
        if forward.__globals__.get("__name__") != _CHECKPOINTING:
            break
        forward = forward.__wrapped__
    return forward


def _global_function(forward: object, name: str) -> object | None:
    """Return the global that a function reads by a name and never writes; None: it does not."""
    if not isinstance(forward, FunctionType) or name not in forward.__code__.co_names:
        return None
    steps = list(dis.get_instructions(forward))
    loads = any(s.opname == "LOAD_GLOBAL" and s.argval == name for s in steps)
    if not loads or any(s.opname in _WRITES for s in steps):
        return None
    return forward.__globals__.get(name)


def _call_of(code: CodeType) -> tuple[int, int, int]:
    return code.co_argcount, code.co_kwonlyargcount, code.co_flags & _KINDS


def _arguments(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount]


@functools.lru_cache(maxsize=4096)
def _instructions(code: CodeType) -> tuple[tuple[str, object], ...]:
    """Return (name, argument) of each instruction; a local variable is its number."""
    numbers = {name: i for i, name in enumerate(code.co_varnames)}
    steps = []
    for step in dis.get_instructions(code):
        if step.opname in _SKIPPED:
            continue
        value = step.argrepr
        if "FAST" in step.opname:
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            value = tuple(numbers[name] for name in names)
        steps.append((step.opname, value))
    return tuple(steps)


# ---- formulas -----------------------------------------------------------------------------------


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
    # The author's: Llama, Mistral, Qwen2, Qwen3 and about seventy more
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


def _gated(self, x):
    # The author's: Llama, Mistral, Qwen2, Qwen3, Gemma, OLMo 2 and many more
    y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y


def rotate_half(x):
    """(-x2, x1) of the halves (x1, x2)."""
    low = x[..., : x.shape[-1] // 2]
    high = x[..., x.shape[-1] // 2 :]
    return torch.cat((-high, low), dim=-1)


def _whole(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_out = (q * cos) + (rotate_half(q) * sin)
    k_out = (k * cos) + (rotate_half(k) * sin)
    return q_out, k_out


def _keeping_dtype(q, k, cos, sin, unsqueeze_dim=1):
    q_dtype, k_dtype = q.dtype, k.dtype
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_out = (q * cos) + (rotate_half(q) * sin)
    k_out = (k * cos) + (rotate_half(k) * sin)
    return q_out.to(q_dtype), k_out.to(k_dtype)


def _partial(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    q_turned, q_rest = q[..., :width], q[..., width:]
    k_turned, k_rest = k[..., :width], k[..., width:]
    q_out = (q_turned * cos) + (rotate_half(q_turned) * sin)
    k_out = (k_turned * cos) + (rotate_half(k_turned) * sin)
    q_out = torch.cat([q_out, q_rest], dim=-1)
    k_out = torch.cat([k_out, k_rest], dim=-1)
    return q_out, k_out


def _partial_in_one_step(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    q_turned, q_rest = q[..., :width], q[..., width:]
    k_turned, k_rest = k[..., :width], k[..., width:]
    q_out = torch.cat([(q_turned * cos) + (rotate_half(q_turned) * sin), q_rest], dim=-1)
    k_out = torch.cat([(k_turned * cos) + (rotate_half(k_turned) * sin), k_rest], dim=-1)
    return q_out, k_out


def _partial_in_place_of_q(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    q, q_rest = q[..., :width], q[..., width:]
    k, k_rest = k[..., :width], k[..., width:]
    q_out = (q * cos) + (rotate_half(q) * sin)
    k_out = (k * cos) + (rotate_half(k) * sin)
    return torch.cat((q_out, q_rest), dim=-1), torch.cat((k_out, k_rest), dim=-1)


#: (formula, partial, keeps_dtype)
_FORMULAS = (
    (_whole, False, False),
    (_keeping_dtype, False, True),
    (_partial, True, False),
    (_partial_in_one_step, True, False),
    (_partial_in_place_of_q, True, False),
)
