"""Undo of a patch that raises while it exchanges: what modules and configs held before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .scan import configs

#: Dictionary whose content is not held: a mesh replaces parameters, and frees their memory.
_PARAMETERS = "_parameters"


@contextlib.contextmanager
def on_error(model: torch.nn.Module) -> Iterator[None]:
    """Context after whose exception the modules of a model, and their configs, are as before."""
    modules = [(module, type(module), _held(module)) for module in model.modules()]
    saved_configs = [(config, dict(vars(config))) for config in configs.reachable(model)]
    try:
        yield
    except BaseException:
        for module, cls, held in modules:
            module.__class__ = cls
            _give_back(module, held)
        for config, values in saved_configs:
            vars(config).clear()
            vars(config).update(values)
        raise


def _held(module: torch.nn.Module) -> dict[str, tuple[object, dict | None]]:
    """Return attribute -> (value, what the value holds if it is a dictionary)."""
    return {
        name: (value, dict(value) if isinstance(value, dict) and name != _PARAMETERS else None)
        for name, value in vars(module).items()
    }


def _give_back(module: torch.nn.Module, held: dict[str, tuple[object, dict | None]]) -> None:
    for value, copied in held.values():
        if copied is not None:
            value.clear()
            value.update(copied)
    vars(module).clear()
    vars(module).update((name, value) for name, (value, _) in held.items())
