"""What the simulator needs, and how tests that use it skip without it.

A test module whose kernels need the packages at import time writes

    from tests.ptxsim import available
    torch, cutlass = map(available.import_module, ("torch", "cutlass"))
    kernels = available.import_module("tests.gemm.kernels")     # which imports cutlass

and any other `pytestmark = [pytest.mark.sim, requires_sim]`.  Looking for the packages does not
import them.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from types import ModuleType

import pytest

from .build import compiler

_PACKAGES = {"torch": "torch", "cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}


def why_no_core() -> str | None:
    """Why PTX snippets cannot run here, or None: the platform or the C++ compiler."""
    if not sys.platform.startswith("linux"):
        return f"ptxsim runs on Linux, not {sys.platform}"
    if shutil.which(compiler()) is None:
        return f"ptxsim needs a C++ compiler: {compiler()} is not found (set CXX)"
    return None


def why_not() -> str | None:
    """Why compiled kernels cannot run on the simulator here, or None if they can."""
    missing = [package for name, package in _PACKAGES.items() if not _installed(name)]
    if missing:
        return "ptxsim needs " + ", ".join(missing)
    return why_no_core()


def import_module(name: str) -> ModuleType:
    """Imports a module for a test module, which is skipped if the simulator cannot run here.

    A module that fails to import for another reason fails.
    """
    reason = why_not()
    if reason:
        pytest.skip(reason, allow_module_level=True)
    return importlib.import_module(name)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


requires_core = pytest.mark.skipif(why_no_core() is not None, reason=why_no_core() or "")
requires_sim = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
