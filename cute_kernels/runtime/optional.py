"""Packages that an extra of the distribution installs, and functions of others that are wrapped."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable

from ..errors import MissingPackageError, missing

#: Module -> the distribution that brings it.
_DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}


def require(extra: str, *modules: str) -> None:
    """Raise MissingPackageError, which names the extra, if a module cannot be imported here."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        names = [_DISTRIBUTIONS.get(name, name) for name in absent]
        raise MissingPackageError(missing(names, extra))


def wrap(owner: object, name: str, function: Callable) -> None:
    """Make calls of ``owner.name`` run ``function(original, *args, **kwargs)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return function(original, *args, **kwargs)

    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(wrapped) if static else wrapped)
