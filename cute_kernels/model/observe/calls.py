"""Calls of modules in a running model: a number for each, and which is inside which."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Protocol

from torch import nn

#: A module's name, and which of its calls in one forward pass of the model.
Key = tuple[str, int]


class Watcher(Protocol):
    """Interface that is notified of every call of every module while a model runs."""

    def before(self, key: Key, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Handle a module that is about to run."""

    def after(self, key: Key, parent: Key | None, result: object) -> None:
        """Handle a module that has run."""


def bound(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, object]:
    """Return the arguments of a call by the names that ``forward`` gives them."""
    forward = None if "forward" in vars(module) else getattr(type(module), "forward", None)
    try:
        known = isinstance(forward, FunctionType)
        signature = _signature(forward) if known else inspect.signature(module.forward)
        return dict(signature.bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # a forward without a signature, or one that will complain
        return {"args": args, **kwargs}


@functools.lru_cache(maxsize=1024)
def _signature(forward: FunctionType) -> inspect.Signature:
    """Signature of a class's forward, bound to a module; the cache holds no module."""
    return inspect.signature(MethodType(forward, forward))


class Stack(list[Key]):
    """Stack of the running calls, the innermost last."""

    @property
    def module(self) -> str:
        """Name of the module that runs; "" outside of all calls."""
        return self[-1][0] if self else ""


@contextlib.contextmanager
def watched(model: nn.Module, watcher: Watcher) -> Iterator[Stack]:
    """Notify ``watcher`` of every call within the block; no hook is left afterwards.

    It sees arguments before the model's own hooks, and results after them.
    """
    stack, counts, handles = Stack(), Counter[str](), []
    names = {id(module): name for name, module in model.named_modules()}

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not stack:  # a forward pass begins
            counts.clear()
        name = names[id(module)]
        key = name, counts[name]
        counts[name] += 1
        stack.append(key)
        watcher.before(key, module, args, kwargs)

    def after(module: nn.Module, args: tuple, result: object) -> None:
        key = stack.pop()
        watcher.after(key, stack[-1] if stack else None, result)

    try:
        for module in model.modules():
            enter = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            handles += [enter, module.register_forward_hook(after, always_call=True)]
        yield stack
    finally:
        for handle in handles:
            handle.remove()
