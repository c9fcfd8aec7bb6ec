"""Forwards that are attributes of a module: whether they call the forward of its class.

accelerate, TRL and hooks of one's own put a forward around the author's; Liger and transformers'
kernels put another one in its place.  What can be seen is what a function holds: what it wraps,
what it closes over, methods of the module that it finds in its file, the parts of a
``functools.partial`` and of an object that is called.  As with names in bytecode, to hold a
function is not to call it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType

import torch

from ...integrations import foreign_calls
from . import classes

#: Reason why a module is left whose forward may call anything.
REASON = "its forward is an attribute of its own, and not around the author's"

#: Module of torch.compile: its forward is always an attribute, and calls the module inside.
_COMPILED = "torch._dynamo.eval_frame"


def wrapping_forwards(module: torch.nn.Module, cls: type) -> list[FunctionType] | None:
    """Return the functions that a module's own forward wraps around that of ``cls``.

    ``cls``: the author's class, or ours below it.  None: the forward of the class is not held.  An
    empty list: the module has no forward of its own.
    """
    forward = vars(module).get("forward")
    if forward is None or cls.__module__ == _COMPILED:
        return []
    author = cls.forward
    ends = {id(author), id(inspect.unwrap(author))}
    # By id, and stored: the id of a deleted object may be reused.
    visited: dict[int, object] = {}
    ahead, reached = [forward], False
    while ahead:
        function = ahead.pop()
        if id(function) in ends:
            reached = True
        elif (theirs := classes.author_of(function)) is not None:
            ahead.append(theirs)  # ours calls the author's on modules that are not patched
        elif id(function) not in visited:
            visited[id(function)] = function
            ahead += [part for part in _contents(function, module) if callable(part)]
    return (
        [function for function in visited.values() if isinstance(function, FunctionType)]
        if reached
        else None
    )


def hides(module: torch.nn.Module, kind: str) -> bool:
    """Whether a forward in the instance would hide ours: not if it wraps the author's, or ours."""
    if "forward" not in vars(module):
        return False
    ours = classes.patched_class(classes.user_class(module), kind)
    return wrapping_forwards(module, ours) is None


def by_libraries(model: torch.nn.Module) -> bool:
    """Whether libraries alone put hooks, or forwards around those of their classes, in a model."""
    modules = list(model.modules())
    if any(foreign_calls.foreign_global()) or any(map(_has_foreign_hook, modules)):
        return False
    for module in modules:
        functions = wrapping_forwards(module, type(module))
        hook = vars(module).get("_hf_hook")  # accelerate's, which its forward calls
        hooks = [type(one) for one in (hook, *getattr(hook, "hooks", ())) if one is not None]
        if functions is None or not all(map(foreign_calls.is_known, [*functions, *hooks])):
            return False
    return True


def _has_foreign_hook(module: torch.nn.Module) -> bool:
    return any(foreign_calls.foreign(module))


def _contents(holder: object, module: torch.nn.Module) -> Iterator[object]:
    """Yield the objects that a function, a method or a callable object holds."""
    if isinstance(holder, MethodType):
        # A method of another module says nothing of this one's.
        if holder.__self__ is module or not isinstance(holder.__self__, torch.nn.Module):
            yield holder.__func__
            yield from () if holder.__self__ is module else _contents(holder.__self__, module)
    elif isinstance(holder, functools.partial):
        yield from (holder.func, *holder.args, *holder.keywords.values(), *vars(holder).values())
    elif isinstance(holder, FunctionType):
        yield from vars(holder).values()
        yield from holder.__defaults__ or ()
        yield from (holder.__kwdefaults__ or {}).values()
        for cell in holder.__closure__ or ():
            yield from _content(cell)
        globals_used = (holder.__globals__.get(name) for name in holder.__code__.co_names)
        yield from (part for part in globals_used if isinstance(part, MethodType))
    elif not isinstance(holder, type | torch.nn.Module):
        yield from getattr(holder, "__dict__", {}).values()
        yield type(holder).__call__


def _content(cell) -> Iterator[Callable]:
    try:
        yield cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return
