"""Code around a module's forward that is neither its author's nor ours: hooks and attributes.

    module.register_forward_hook(f)       "LlamaMLP: forward hook f of script, code 1a2b3c4d"
    linear.forward = f                    "Linear, forward by f of script, code 1a2b3c4d"

A contract states such code by its name and a digest of its instructions: it may compute anything.
Values that it closes over are not in the digest.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, MethodType
from typing import NamedTuple

import torch
from torch.nn.modules import module as torch_module

#: Attributes with the hooks of a module -> what a contract calls them.
HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
#: Modules whose hooks and forwards move, gather, cast or record tensors, and compute nothing.
_KNOWN = (
    "accelerate", "contextlib", "cute_kernels", "deepspeed", "functools", "peft", "torch._dynamo",
    "torch.amp", "torch.distributed", "torch.profiler", "torch.utils._contextlib",
    "torch.utils.checkpoint", "torch.utils.module_tracker",
    "transformers.integrations.tensor_parallel", "transformers.modeling_utils",
    "transformers.utils", "vllm",
)  # fmt: skip


class Hook(NamedTuple):
    """A hook of a module, or of all modules: ``vars(module)[attribute][id]``."""

    attribute: str
    id: int
    function: Callable

    @property
    def text(self) -> str:
        """Kind of the hook, its name, package and a digest of its code."""
        return f"{HOOKS[self.attribute]} {text_of(_layers(self.function)[-1])}"


class Wrapper:
    """An object of ours that is called in the place of a hook."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook


def foreign(owner: object, prefix: str = "") -> Iterator[Hook]:
    """Yield the foreign hooks of a module, in its attributes with this prefix."""
    for attribute in HOOKS:
        for key, function in (getattr(owner, f"{prefix}{attribute}", None) or {}).items():
            function = function.hook.function if isinstance(function, Wrapper) else function
            if not all(map(is_known, _layers(function))):
                yield Hook(attribute, key, function)


def foreign_global() -> Iterator[Hook]:
    """Yield the foreign hooks that all modules of this process have."""
    return foreign(torch_module, "_global")


def is_hooked(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether modules, or all of this process, have foreign hooks."""
    return any(foreign_global()) or any(any(foreign(module)) for module in modules)


def is_known(function: Callable) -> bool:
    """Whether a function lies in a module of `_KNOWN`."""
    home = _home(_inside(function))
    return any(home == known or home.startswith(f"{known}.") for known in _KNOWN)


def text_of(function: Callable) -> str:
    """Return a function's name, package and a digest of its code."""
    inside = _inside(function)
    code = getattr(inside, "__code__", None)
    name = getattr(code, "co_qualname", None) or getattr(inside, "__qualname__", repr(inside))
    digest = "" if code is None else f", code {hashlib.sha256(_content(code)).hexdigest()[:8]}"
    return f"{name} of {_home(inside).partition('.')[0]}{digest}"


def _layers(function: Callable) -> list[Callable]:
    """Return a function and those that its decorators wrap, as torch.no_grad does."""
    layers = [_inside(function)]
    while (wrapped := getattr(layers[-1], "__wrapped__", None)) is not None:
        layers.append(_inside(wrapped))
    return layers


def _inside(function: Callable) -> Callable:
    """Return the function of a partial, a method or an object that is called."""
    while isinstance(function, functools.partial | MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if hasattr(function, "__code__") or isinstance(function, type):
        return function
    return type(function).__call__


def _home(function: Callable) -> str:
    """Return the module of a function; functools.wraps copies ``__module__`` of what is wrapped."""
    names = getattr(function, "__globals__", {})
    return str(names.get("__name__", getattr(function, "__module__", None)))


def _content(code: CodeType) -> bytes:
    """Return instructions, constants and names of a function and of those inside."""
    inner = [_content(c) for c in code.co_consts if isinstance(c, CodeType)]
    constants = [
        sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)  # hashes differ by process
        for c in code.co_consts
        if not isinstance(c, CodeType)
    ]
    return code.co_code + repr((constants, code.co_names)).encode() + b"".join(inner)
