"""Packages that an extra of the distribution installs."""

from __future__ import annotations

import importlib.util

from ..errors import MissingPackageError, missing

#: Module -> the distribution that brings it.
_DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}


def require(extra: str, *modules: str) -> None:
    """Raise MissingPackageError, which names the extra, if a module cannot be imported here."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        names = [_DISTRIBUTIONS.get(name, name) for name in absent]
        raise MissingPackageError(missing(names, extra))
