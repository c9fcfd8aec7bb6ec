"""Exchange a module's class in place for a subclass with another forward, and back.

Parameters, buffers, names, hooks and identity stay what they are, and so do ``isinstance`` and the
class's name.  Wrappers that are classes themselves stay outermost, whichever came first:

    FSDPLinear(FSDPModule, Linear)   ->  FSDPLinear(FSDPModule, Linear with our forward(Linear))
    ParametrizedLinear(Linear)       ->  ParametrizedLinear(Linear with our forward(Linear))
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType

import torch

from ...integrations import transformers as integration
from .forwards.layers import FORWARDS, KIND, NOTES, STEPS, Notes, granularity

_FSDP2 = "torch.distributed.fsdp"
#: Each forward of ours -> the author's forward that it replaces.
_AUTHORS: dict[FunctionType, Callable] = {}


def user_class(module: torch.nn.Module) -> type:
    """Return the class that the author of the model wrote, without our forward and wrappers."""
    cls = _inside(type(module))
    return cls.__bases__[0] if KIND in vars(cls) else cls


def kind_of(module: torch.nn.Module) -> str | None:
    """Name of our forward that a module has; None: it has its own."""
    return vars(_inside(type(module))).get(KIND)


def exchange(module: torch.nn.Module, kind: str, notes: Notes) -> None:
    """Give a module the forward of that name, and the notes that the forward reads."""
    with_forward = patched_class(user_class(module), kind)
    module.__class__ = _around(type(module), with_forward)
    module.__dict__[NOTES] = notes


def restore(module: torch.nn.Module) -> None:
    """Restore the class of a module; a module that was not patched is unchanged."""
    if kind_of(module) is not None:
        module.__class__ = _around(type(module), user_class(module))
    module.__dict__.pop(NOTES, None)


def granularity_of(model: torch.nn.Module) -> int:
    """Token count at whose multiples micro-batches may be cut, by the patched modules."""
    kinds = ((module, kind_of(module)) for module in model.modules())
    # Each is a power of two, so the largest is a multiple of all.
    return max((granularity(module, kind) for module, kind in kinds if kind), default=1)


@functools.cache
def patched_class(cls: type, kind: str) -> type:
    """Return the subclass of ``cls`` with the forward of that name."""

    def reduced(self, protocol):
        """Reduce to the author's class: pickles cannot import this one."""
        reduction = super(new, self).__reduce_ex__(protocol)
        if type(self) is not new or reduction[0] is not copyreg.__newobj__:
            return reduction
        return (_anew, (cls, kind), *reduction[2:])

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {KIND: kind, "__reduce_ex__": reduced}
    # A step goes below the author's forward, which calls it by super().
    step = STEPS.get(kind)
    if step is None:
        names["forward"] = _while_patched(FORWARDS[kind](cls), cls.forward)
    new = type(cls.__name__, (cls,) if step is None else (cls, step), names)
    return new


def author_of(function: object) -> Callable | None:
    """Return the author's forward that one of ours replaces; None: it is none of ours."""
    return _AUTHORS.get(function) if isinstance(function, FunctionType) else None


def _while_patched(ours: Callable, author: Callable) -> FunctionType:
    """Return a forward that calls ``ours`` on patched modules and the author's on others.

    accelerate and TRL keep a module's forward, and call it from one of their own when `restore` has
    given the class back.  accelerate also takes its own off again, and goes by ``__wrapped__`` to
    the innermost function: this one has none.
    """

    def forward(self, *args, **kwargs):
        return (ours if hasattr(self, NOTES) else author)(self, *args, **kwargs)

    forward.__doc__ = ours.__doc__
    forward.__signature__ = inspect.signature(ours)
    _AUTHORS[forward] = author
    return forward


def _anew(cls: type, kind: str) -> torch.nn.Module:
    """Create an empty module, whose state a pickle or copy sets next."""
    if "transformers" in sys.modules and integration.why_not() is None:
        integration.register()
    new = patched_class(cls, kind)
    return new.__new__(new)


# ---- wrappers that are classes ------------------------------------------------------------------


def _wraps(cls: type) -> int | None:
    """Return the inner base of a wrapper class; None: ``cls`` is no wrapper."""
    fsdp = sys.modules.get(_FSDP2)
    if fsdp is not None and len(cls.__bases__) == 2 and cls.__bases__[0] is fsdp.FSDPModule:
        return 1
    parametrized = cls.__name__.startswith("Parametrized") and "__getstate__" in vars(cls)
    return 0 if parametrized and cls.__module__ == "torch.nn.utils.parametrize" else None


def _inside(cls: type) -> type:
    while (position := _wraps(cls)) is not None:
        cls = cls.__bases__[position]
    return cls


def _around(wrapper: type, inner: type) -> type:
    """Rebuild the wrappers of a class around another class."""
    position = _wraps(wrapper)
    if position is None:
        return inner
    bases = list(wrapper.__bases__)
    bases[position] = _around(bases[position], inner)
    if tuple(bases) == wrapper.__bases__:
        return wrapper
    attributes = {k: v for k, v in vars(wrapper).items() if k not in ("__dict__", "__weakref__")}
    return type(wrapper.__name__, tuple(bases), attributes)
