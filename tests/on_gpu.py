"""A launcher module that takes CPU tensors and runs on the GPU: checks of CPU tensors, there."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator

import torch

from .contract import same_bytes


def launcher(module: types.ModuleType, device: str = "cuda") -> types.SimpleNamespace:
    """The module's own functions: arguments go to the device, results and what was written in
    place come back."""
    own = {
        name: _through(function, device)
        for name, function in vars(module).items()
        if isinstance(function, types.FunctionType) and function.__module__ == module.__name__
    }
    return types.SimpleNamespace(**vars(module) | own)


def _through(function: Callable, device: str) -> Callable:
    @functools.wraps(function)
    def run(*given: object, **options: object) -> object:
        # By identity: a tensor that is given twice is one tensor there too.
        there = {id(t): t.to(device) for t in _tensors(given)}
        moved = _mapped(lambda t: there[id(t)], given)
        made = _mapped(lambda t: t.cpu(), function(*moved, **options))
        for before in _tensors(given):
            after = there[id(before)].cpu()
            if not same_bytes(before, after):
                before.copy_(after)
        return made

    return run


def _mapped(function: Callable, value: object) -> object:
    """Apply ``function`` to tensors, alone or in tuples, lists and dataclasses; keep the rest."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        out = [_mapped(function, part) for part in value]
        return type(value)(*out) if hasattr(value, "_fields") else tuple(out)
    if isinstance(value, list):
        return [_mapped(function, part) for part in value]
    if _is_record(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **{n: _mapped(function, v) for n, v in fields.items()})
    return value


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif _is_record(value):
        yield from _tensors([getattr(value, f.name) for f in dataclasses.fields(value)])
