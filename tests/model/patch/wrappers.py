"""Forwards that other libraries put around a module's own, as attributes of the module."""

from __future__ import annotations

import functools
import types


class Around:
    """An object that is called, as accelerate's ConvertOutputsToFp32."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def method(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def closed_over(module):
    inner = module.forward
    return lambda *args, **kwargs: inner(*args, **kwargs)


def wrapped(module):
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args, **kwargs):
        return inner(*args, **kwargs)

    return functools.partial(forward)


def by_default(module):
    return lambda *args, inner=module.forward, **kwargs: inner(*args, **kwargs)


def bound(module):
    """As accelerate's prepare_model: the function, bound to the module again."""
    return types.MethodType(Around(module.forward.__func__), module)


def in_this_file(module):
    global kept
    kept = module.forward
    return lambda *args, **kwargs: kept(*args, **kwargs)


AROUND = {
    "closure": closed_over,
    "wraps and partial": wrapped,
    "default": by_default,
    "object": lambda module: Around(module.forward),
    "method": lambda module: Around(module.forward).method,
    "bound": bound,
    "global": in_this_file,
    "twice": lambda module: Around(closed_over(module)),
}
