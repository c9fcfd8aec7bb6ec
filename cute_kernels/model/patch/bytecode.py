"""Bytecode of functions: the names that they read, and whether they are a known formula.

A name proves nothing: it says where to look in a module that is not run.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Mapping
from types import CodeType, FunctionType

import torch

from .. import aten

#: Attribute reads that are methods of tensors or functions of torch, not our own modules'.
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
#: Parts of transformers' models that are not called while our attention is set.
_NOT_CALLED = frozenset({"forward", "eager_attention_forward"})

#: Name of a function of torch -> what is known of it.
OPS = {**aten.CALLED, "@": aten.PRODUCT}


def named(
    functions: list[object], cls: type, module: torch.nn.Module, table: Mapping[str, object]
) -> set[str]:
    """Return the names of a table that functions of a module read.

    Followed are the methods that they call on the module, and functions of their own file.  Names
    of the module's children and tensors are not ops.
    """
    names: set[str] = set()
    visited: set[CodeType] = set()
    ahead = list(functions)
    while ahead:
        function = ahead.pop()
        if not isinstance(function, FunctionType) or function.__code__ in visited:
            continue
        visited.add(function.__code__)
        for name in _names(function.__code__):
            if (op := _op(module, name)) in table:
                names.add(op)
            ahead += _next(name, cls, function)
    return names


def named_ops(module: torch.nn.Module, cls: type) -> set[str]:
    """Return the ops of torch that the forward of a class names."""
    return named([inspect.unwrap(cls.forward)], cls, module, OPS)


def reading(functions: list[FunctionType], names: set[str]) -> str | None:
    """Return the first function that reads one of the names, as 'module.function', or None."""
    for function in functions:
        if not names.isdisjoint(_names(function.__code__)):
            # functools.wraps copies __module__ and __name__ of what is wrapped.
            return f"{function.__globals__['__name__']}.{function.__code__.co_name}"
    return None


def _op(module: torch.nn.Module, name: str) -> str | None:
    """Return the function that a name stands for: itself, or an attribute of the module; else None.

    Children and tensors of the module are no ops: they are looked at by themselves.
    """
    if name in module._modules or name in module._buffers:
        return None
    if name not in vars(module):
        return name
    attribute = vars(module)[name]
    # functools.partial has func
    return getattr(getattr(attribute, "func", attribute), "__name__", None)


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that a function reads, nested functions and comprehensions included."""
    names: dict[str, None] = {}
    for step in _steps(code):
        if step.opname in _LOADS and isinstance(step.argval, str):
            names[step.argval] = None
        elif step.opname == "BINARY_OP" and step.argrepr in ("@", "@="):
            names["@"] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(_names(constant))
    return tuple(names)


def _next(name: str, cls: type, function: FunctionType) -> list[FunctionType]:
    """Return the method of the class, or the function of its file, that a name stands for."""
    if name in _NOT_CALLED:
        return []
    method = inspect.getattr_static(cls, name, None)
    method = getattr(method, "__func__", method)
    files = {cls.__module__, function.__module__}
    chosen = [method, function.__globals__.get(name)]
    chosen = [inspect.unwrap(f) for f in chosen if isinstance(f, FunctionType)]
    return [f for f in chosen if f.__module__ in files]


# ---- is a function this formula? -----------------------------------------------------------------

#: Instructions that depend on how the interpreter runs a function, not on what it computes.
_SKIPPED = frozenset({"RESUME", "NOP", "CACHE", "EXTENDED_ARG"})
#: Flags of code that decide how a call is made; the others are of its compilation.
_CALL_FLAGS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})


def is_formula(function: object, formula: FunctionType, named_arguments: bool = False) -> bool:
    """Whether a function has the arguments and instructions of a formula.

    Local variables may have any names.

    named_arguments: Whether its arguments must have the names of the formula's as well.
    """
    if not isinstance(function, FunctionType) or function.__closure__:
        return False
    code, known = function.__code__, formula.__code__
    count = code.co_argcount
    return (
        (count, code.co_kwonlyargcount) == (known.co_argcount, known.co_kwonlyargcount)
        and code.co_flags & _CALL_FLAGS == known.co_flags & _CALL_FLAGS
        and function.__defaults__ == formula.__defaults__
        and _instructions(code) == _instructions(known)
        and (not named_arguments or code.co_varnames[:count] == known.co_varnames[:count])
    )


def global_function(forward: object, name: str) -> object | None:
    """Return the global that a function reads by a name and never writes; None: it does not."""
    if not isinstance(forward, FunctionType) or name not in forward.__code__.co_names:
        return None
    steps = _steps(forward.__code__)
    loads = any(s.opname == "LOAD_GLOBAL" and s.argval == name for s in steps)
    if not loads or any(s.opname in _WRITES for s in steps):
        return None
    return forward.__globals__.get(name)


@functools.lru_cache(maxsize=4096)
def _instructions(code: CodeType) -> tuple[tuple[str, object], ...]:
    """Return (name, argument) of each instruction; a local variable is its number."""
    numbers = {name: i for i, name in enumerate(code.co_varnames)}
    steps = []
    for step in _steps(code):
        if step.opname in _SKIPPED:
            continue
        value = step.argrepr
        if "FAST" in step.opname:
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            value = tuple(numbers[name] for name in names)
        steps.append((step.opname, value))
    return tuple(steps)


@functools.lru_cache(maxsize=4096)
def _steps(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))
