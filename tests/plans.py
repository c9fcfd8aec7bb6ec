"""Plans of CPU tensors, cached as a GPU's are, and launchers with other names in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import pytest

from cute_kernels.runtime import dispatch, plan_cache


def patched(module: ModuleType, **values: object) -> contextlib.AbstractContextManager:
    """Inside, names of a module have these values; there may be none."""
    return mock.patch.multiple(module, **values) if values else contextlib.nullcontext()


@contextlib.contextmanager
def cached(monkeypatch: pytest.MonkeyPatch, plan: Callable | None = None) -> Iterator[list[str]]:
    """From here on CPU tensors count as a GPU's; yields the names of what is planned, as it is.

    ``plan``: in place of the dispatcher's.  Plans of before and of inside are forgotten.
    """
    names, make = [], plan or dispatch.plan

    def noted(name, *call):
        names.append(name)
        return make(name, *call)

    monkeypatch.setattr(plan_cache, "on_gpu", lambda t: True)
    monkeypatch.setattr(dispatch, "plan", noted)
    plan_cache.clear()
    yield names
    plan_cache.clear()
