"""Calls of modules: names of their arguments, a number for each, and which is inside which."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

import torch
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
    try:
        return dict(inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # a forward without a signature, or one that will complain
        return {"args": args, **kwargs}


class Stack:
    """Stack of the running calls, the innermost last, and the number of calls of each module."""

    def __init__(self) -> None:
        self.open: list[Key] = []
        self._counts: Counter[str] = Counter()

    def push(self, name: str) -> Key:
        """Push a call that begins, and return its key."""
        if not self.open:
            self._counts.clear()
        key = (name, self._counts[name])
        self._counts[name] += 1
        self.open.append(key)
        return key

    def pop(self) -> tuple[Key, Key | None]:
        """Pop the call that ends; return its key and that of the call around it."""
        key = self.open.pop()
        return key, self.open[-1] if self.open else None


@contextlib.contextmanager
def watched(model: nn.Module, watcher: Watcher) -> Iterator[Stack]:
    """Notify ``watcher`` of every call within the block; no hook is left afterwards."""
    stack, handles = Stack(), []
    names = {id(module): name for name, module in model.named_modules()}

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        watcher.before(stack.push(names[id(module)]), module, args, kwargs)

    def after(module: nn.Module, args: tuple, result: object) -> None:
        key, parent = stack.pop()
        watcher.after(key, parent, result)

    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        with torch.no_grad():
            yield stack
    finally:
        for handle in handles:
            handle.remove()
