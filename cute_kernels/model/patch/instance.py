"""Forwards that are attributes of a module, which hide that of its class: do they call it?

accelerate, TRL and hooks of one's own put a forward around the author's; Liger and transformers'
kernels put another one in its place.  What can be seen is what a function holds: what it wraps,
what it closes over, methods of the module that it finds in its file, the parts of a
``functools.partial`` and of an object that is called.  As with names in bytecode (patch_scan), to
hold a function is not to call it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType

import torch

from . import classes

#: What a part of a model is left for, whose forward calls nobody knows what.
REASON = "its forward is an attribute of its own, and not around the author's"

#: Of torch.compile: its forward is always an attribute, and calls the module inside.
_COMPILED = "torch._dynamo.eval_frame"


def around(module: torch.nn.Module, cls: type) -> list[FunctionType] | None:
    """The functions that a module's own forward has around that of ``cls``.

    ``cls``: the author's class, or ours below it.  None: the forward of the class is not held.  An
    empty list: the module has no forward of its own.
    """
    own = vars(module).get("forward")
    if own is None or cls.__module__ == _COMPILED:
        return []
    author = cls.forward
    ends = {id(author), id(inspect.unwrap(author))}
    # By their ids, and kept: the id of one that is gone may be that of another.
    seen: dict[int, object] = {}
    ahead, reached = [own], False
    while ahead:
        one = ahead.pop()
        if id(one) in ends:
            reached = True
        elif (theirs := classes.author_of(one)) is not None:
            ahead.append(theirs)  # ours calls the author's where it is not asked for
        elif id(one) not in seen:
            seen[id(one)] = one
            ahead += [part for part in _held(one, module) if callable(part)]
    return [one for one in seen.values() if isinstance(one, FunctionType)] if reached else None


def _held(one: object, module: torch.nn.Module) -> Iterator[object]:
    """Objects that a function, a method or a callable object holds."""
    if isinstance(one, MethodType):
        # A method of another module says nothing of this one's.
        if one.__self__ is module or not isinstance(one.__self__, torch.nn.Module):
            yield one.__func__
            yield from () if one.__self__ is module else _held(one.__self__, module)
    elif isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values(), *vars(one).values())
    elif isinstance(one, FunctionType):
        yield from vars(one).values()
        yield from one.__defaults__ or ()
        yield from (one.__kwdefaults__ or {}).values()
        for cell in one.__closure__ or ():
            yield from _content(cell)
        named = (one.__globals__.get(name) for name in one.__code__.co_names)
        yield from (part for part in named if isinstance(part, MethodType))
    elif not isinstance(one, type | torch.nn.Module):
        yield from getattr(one, "__dict__", {}).values()
        yield type(one).__call__


def _content(cell) -> Iterator[Callable]:
    try:
        yield cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return
