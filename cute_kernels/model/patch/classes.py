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
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import NamedTuple

import torch

from ...integrations import transformers as integration
from .forwards import rotary
from .forwards.layers import FORWARDS, granularity
from .forwards.notes import KIND, NOTES, Notes
from .report import Kind, Left

_FSDP2 = "torch.distributed.fsdp"
#: Each forward of ours -> the author's forward that it replaces.
_AUTHORS: dict[FunctionType, Callable] = {}


class Part(NamedTuple):
    """A module of a model: its name there, and the class that its author wrote."""

    name: str
    module: torch.nn.Module
    cls: type

    def left(self, known: str, kind: Kind = Kind.NOT_TAKEN, moves: bool = True) -> Left:
        """Return the entry of a report that says why the module is left."""
        return Left(self.name, self.cls.__name__, known, moves, kind)


class Action(NamedTuple):
    """One module that gets the forward ``kind``, with these notes."""

    name: str
    module: torch.nn.Module
    kind: str
    notes: Notes


def parts(model: torch.nn.Module) -> list[Part]:
    """Return the modules of a model."""
    return [Part(name, module, user_class(module)) for name, module in model.named_modules()]


def user_class(module: torch.nn.Module) -> type:
    """Return the class that the author of the model wrote, without our forward and wrappers."""
    cls = _inside(type(module))
    return cls.__bases__[0] if KIND in vars(cls) else cls


def kind_of(module: torch.nn.Module) -> str | None:
    """Name of our forward that a module has; None: it has its own."""
    return vars(_inside(type(module))).get(KIND)


def prepare(actions: Iterable[Action]) -> None:
    """Make the classes that actions ask for, which may raise, before a module is changed."""
    for action in actions:
        patched_class(user_class(action.module), action.kind)


def apply(model: torch.nn.Module, actions: Iterable[Action]) -> None:
    """Restore all modules of a model, and give some of them our forwards."""
    for module in model.modules():
        restore(module)
    for action in actions:
        exchange(action)


def exchange(action: Action) -> None:
    """Give a module its forward, the notes that the forward reads, and exact frequencies."""
    module = action.module
    module.__class__ = _around(type(module), patched_class(user_class(module), action.kind))
    module.__dict__[NOTES] = action.notes
    if action.kind == "rotary":
        rotary.restore_frequencies(module)


def restore(module: torch.nn.Module) -> None:
    """Take back what `exchange` did; a module that was not patched is unchanged."""
    if kind_of(module) is not None:
        module.__class__ = _around(type(module), user_class(module))
    module.__dict__.pop(NOTES, None)
    rotary.undo(module)


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
    ours = FORWARDS[kind]
    # A step goes below the author's forward, which calls it by super().
    bases = (cls,) if ours.step is None else (cls, ours.step)
    if ours.step is None:
        forward = ours.forward if ours.of is None else ours.of(cls)
        names["forward"] = _while_patched(forward, cls.forward)
    new = type(cls.__name__, bases, names)
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
