"""Identify the function that an attention module applies to q and k, by its bytecode.

transformers' models have an ``apply_rotary_pos_emb`` each, in their own file.  One is known if its
instructions are those of a formula below, with any names of local variables, and so are those of
the ``rotate_half`` that it calls.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import NamedTuple

import torch

#: Name of the function in the files of transformers.
NAME = "apply_rotary_pos_emb"
_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
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
    forward = cls.forward
    if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
        return None
    steps = list(dis.get_instructions(forward))
    loads = any(s.opname == "LOAD_GLOBAL" and s.argval == NAME for s in steps)
    if not loads or any(s.opname in _WRITES for s in steps):
        return None
    function = forward.__globals__.get(NAME)
    for formula, partial, keeps_dtype in _FORMULAS:
        if _agrees(function, formula):
            return PosEmb(function, partial, keeps_dtype)
    return None


def _agrees(function: object, formula: FunctionType) -> bool:
    """Whether a function has the instructions of a formula, and calls the same ``rotate_half``."""
    if not alike(function, formula):
        return False
    rotate = function.__globals__.get("rotate_half")
    return alike(rotate, rotate_half) and rotate.__globals__.get("torch") is torch is (
        function.__globals__.get("torch", torch)
    )


def alike(function: object, formula: FunctionType) -> bool:
    """Whether a function has the arguments and instructions of a formula."""
    if not isinstance(function, FunctionType) or function.__closure__:
        return False
    code, known = function.__code__, formula.__code__
    return (
        (code.co_argcount, code.co_kwonlyargcount, code.co_flags & _KINDS)
        == (known.co_argcount, known.co_kwonlyargcount, known.co_flags & _KINDS)
        and function.__defaults__ == formula.__defaults__
        and list(_instructions(function)) == list(_instructions(formula))
    )


def _instructions(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield (name, argument) of each instruction; a local variable is its number."""
    numbers = {name: i for i, name in enumerate(function.__code__.co_varnames)}
    for step in dis.get_instructions(function):
        if step.opname in _SKIPPED:
            continue
        value = step.argrepr
        if "FAST" in step.opname:
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            value = tuple(numbers[name] for name in names)
        yield step.opname, value


# ---- formulas -----------------------------------------------------------------------------------


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
