"""Memory with contents: what a result that is not written would follow.

with old_memory(1000.0):
    y = op(x)  # of a row that the op leaves unwritten, 1000 is read
in_any_memory(lambda: op(x))  # fails then; forward, backward, in-place results
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.compile import call
from cute_kernels.runtime import plan_cache
from tests.contract import require_same

T = TypeVar("T")
#: One that spreads through sums, and one that passes for a result: of integers and flags others.
VALUES = (torch.nan, 1000.0)

_FUNCTIONS = ("empty", "empty_like", "empty_strided")
_METHODS = ("new_empty", "new_empty_strided")


@contextlib.contextmanager
def old_memory(value: float = torch.nan) -> Iterator[None]:
    """Inside, memory that torch's functions and launch plans hand out holds ``value``.

    Integers hold it as far as their type can, and a large negative number in place of NaN.
    """
    with contextlib.ExitStack() as stack:
        for owner, names in ((torch, _FUNCTIONS), (torch.Tensor, _METHODS)):
            for name in names:
                function = _filling(getattr(owner, name), value)
                stack.enter_context(mock.patch.object(owner, name, function))
        # Plans allocate by torch.empty then, and none outlives this.
        stack.enter_context(mock.patch.object(call, "_EMPTY", dict.fromkeys(call._EMPTY)))
        stack.callback(plan_cache.clear)
        plan_cache.clear()
        yield


def _filling(function: Callable[..., torch.Tensor], value: float) -> Callable[..., torch.Tensor]:
    """The function, whose result holds ``value``."""

    @functools.wraps(function)
    def filled(*args, **kwargs):
        t = function(*args, **kwargs)
        if not t.is_meta:
            with torch.no_grad():
                t.detach().fill_(_held(value, t.dtype))
        return t

    return filled


def _held(value: float, dtype: torch.dtype) -> float | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return value
    if dtype == torch.bool:
        return value == value
    info = torch.iinfo(dtype)
    return info.min // 3 if value != value else min(int(value), info.max)


#: Op -> the defined part of its outputs.  Nothing reads the rest.
DEFINED = {
    "cute_kernels.mhc_mix.default": lambda out, args: out[:6],
    # Rows that have an expert.
    "cute_kernels.grouped_linear.default": lambda out, args: out[: args[2][-1]],
    "cute_kernels.grouped_dx.default": lambda out, args: out[: args[2][-1]],
}


class Results(TorchDispatchMode):
    """Inside, copies of what the ops of this package return and write in place, in their order."""

    def __init__(self):
        super().__init__()
        self.named: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "cute_kernels":
            pairs = zip(func._schema.arguments, args, strict=False)
            written = [value for argument, value in pairs if argument.is_write]
            defined = DEFINED.get(str(func), lambda out, args: out)(out, args)
            for number, t in enumerate(pytree.tree_leaves((defined, written))):
                if isinstance(t, torch.Tensor):
                    self.named.append((f"{func}, output {number}", t.detach().clone()))
        return out


def in_any_memory(run: Callable[[], T]) -> T:
    """The value of ``run``, all of whose ops return the same bytes whatever memory held."""
    runs = []
    for value in VALUES:
        with old_memory(value), Results() as results:
            out = run()
        runs.append(results.named)
    assert runs[0], "no op of this package ran"
    for (_, first), (name, t) in zip(*runs, strict=True):
        case = " against ".join(f"memory that holds {value}" for value in VALUES)
        require_same(t, first, op=name, transform="old memory", case=case, seed=0)
    return out
