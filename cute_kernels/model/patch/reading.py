"""Ops of torch that a module names: what is known of it where it does not run.

A module that is not run may call anything.  What is read is its forward, the methods that it calls
on itself, and the functions of its own file that it names.
"""

from __future__ import annotations

import inspect

from torch import nn

from .. import aten
from . import families, instance
from .classes import Part
from .report import Kind, Left
from .scan import bytecode

_NAMES = {**aten.CALLED, "@": aten.PRODUCT}
_DRAWN = "in training, if it runs there: random numbers by the place in the batch"


def calls(
    part: Part, cause: aten.Cause, devices: set[str], start: str = "", kind: Kind = Kind.NAMED
) -> Left:
    """Return the reason of a module that calls a function of torch, or may."""
    moves = cause is not aten.LOSS and cause.applies(devices)
    return part.left(f"{start}{cause.text}", kind, moves)


def left(part: Part, devices: set[str]) -> list[Left]:
    """Say what a module that is not replaced names."""
    _, module, cls = part
    functions = instance.wrapping_forwards(module, cls) if "forward" in vars(module) else []
    if functions is None:
        return [part.left(f"{instance.REASON}: what it computes is not known", Kind.HIDDEN)]
    kind = Kind.WRAPPED
    if not _is_reviewed(cls):
        kind = Kind.NAMED
        if families.adapts_parameters(cls):
            return [part.left(families.ON_PARAMETERS, Kind.NOT_COVERED)]
        functions = [inspect.unwrap(cls.forward), *functions]
    if (cause := aten.of_module(module)) is not None:
        return [calls(part, cause, devices)]
    if isinstance(module, nn.modules.dropout._DropoutNd):
        reason = f"p = {module.p}: in training, random numbers by the place in the batch"
        return [part.left(reason, Kind.DRAWN, module.training)] if module.p else []
    ops = bytecode.named(functions, cls, module, _NAMES) if functions else ()
    left = [calls(part, _NAMES[op], devices, f"{op}: ", kind) for op in sorted(ops)]
    return left + drawn(part)


def named(module: nn.Module, cls: type) -> set[str]:
    """Return the ops that the forward of a class names."""
    return bytecode.named([inspect.unwrap(cls.forward)], cls, module, _NAMES)


def drawn(part: Part) -> list[Left]:
    """Say what a module draws in training; an observation in training names what runs."""
    if _is_reviewed(part.cls):
        return []
    forward = inspect.unwrap(part.cls.forward)
    draws = bytecode.named([forward], part.cls, part.module, aten.DRAWS)
    return [part.left(f"{op}: {_DRAWN}", Kind.DRAWN, False) for op in sorted(draws)]


def _is_reviewed(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn.") or families.known(cls)
