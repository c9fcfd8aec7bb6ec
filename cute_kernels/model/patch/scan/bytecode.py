"""Find the ops of torch that a module's own forward names, from its bytecode.

A module that nobody knows may call anything.  What is read is the forward, the methods that it
calls on itself, and the functions of its own file that it names; calls into other files are not
followed, and a name is not a proof: it says where to look, and ``ck.audit`` looks.
"""

from __future__ import annotations

import dis
import functools
import inspect
from types import CodeType, FunctionType

import torch

from ...aten import CALLED, Cause

#: Attribute reads that are methods of tensors or functions of torch, not our own modules'.
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")


def named(cls: type, module: torch.nn.Module, but: frozenset[str]) -> dict[str, Cause]:
    """Return the ops that a forward names, and the facts about them.

    Args:
        cls: The class whose forward is read.
        module: One of it: names of its own children and attributes are not ops.
        but: Functions that are not read, as they are not called.
    """
    return named_by([inspect.unwrap(cls.forward)], cls, module, but)


def named_by(
    functions: list[FunctionType],
    cls: type,
    module: torch.nn.Module,
    but: frozenset[str],
    table: dict[str, Cause] = CALLED,
) -> dict[str, Cause]:
    """Apply `named` to ``functions`` in place of the class's forward, by the names of ``table``."""
    ops: dict[str, Cause] = {}
    visited: set[CodeType] = set()
    ahead = list(functions)
    while ahead:
        function = ahead.pop()
        if not isinstance(function, FunctionType) or function.__code__ in visited:
            continue
        visited.add(function.__code__)
        for name in _names(function.__code__):
            if name == "@" and "matmul" in table:
                ops["@"] = table["matmul"]
            elif (op := _op(module, name)) in table:
                ops[op] = table[op]
            ahead += _next(name, cls, function, but)
    return ops


def spells_out_attention(cls: type, module: torch.nn.Module) -> bool:
    """Whether a forward of the author itself multiplies and takes a softmax."""
    if cls.__module__.startswith("torch.") or isinstance(module, torch.jit.ScriptModule):
        return False
    ops = named(cls, module, frozenset())
    multiplies = not {"matmul", "@"}.isdisjoint(ops)
    return multiplies and ("softmax" in ops or "Softmax" in _reads(cls))


def _reads(cls: type) -> set[str]:
    """Names that the methods of a class read."""
    methods = [f for f in vars(cls).values() if isinstance(f, FunctionType)]
    return {name for f in methods for name in _names(f.__code__)}


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
    return getattr(
        getattr(attribute, "func", attribute), "__name__", None
    )  # functools.partial has func


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that a function reads, nested functions and comprehensions included."""
    names: dict[str, None] = {}
    for step in dis.get_instructions(code):
        if step.opname in _LOADS and isinstance(step.argval, str):
            names[step.argval] = None
        elif step.opname == "BINARY_OP" and step.argrepr in ("@", "@="):
            names["@"] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(_names(constant))
    return tuple(names)


def _next(name: str, cls: type, function: FunctionType, but: frozenset[str]) -> list[FunctionType]:
    """Return the method of the class, or the function of its file, that a name stands for."""
    if name in but or name == "forward":
        return []
    method = inspect.getattr_static(cls, name, None)
    method = getattr(method, "__func__", method)
    global_function = function.__globals__.get(name)
    files = {cls.__module__, function.__module__}
    chosen = [inspect.unwrap(f) for f in (method, global_function) if isinstance(f, FunctionType)]
    return [f for f in chosen if f.__module__ in files]
