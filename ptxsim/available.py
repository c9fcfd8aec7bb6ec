"""What the simulator needs, and whether it is here.  Looking for packages imports none."""

from __future__ import annotations

import importlib.util
import shutil
import sys

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


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
