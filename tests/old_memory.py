"""Memory with contents: what a result that is not written would follow.

for value in (nan, 1000):
    with old_memory(value):
        results = op(...)           # the same bytes for both, and outside
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from cute_kernels.compile import call
from cute_kernels.runtime import plan_cache

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
        return True
    info = torch.iinfo(dtype)
    return info.min // 3 if value != value else min(int(value), info.max)
