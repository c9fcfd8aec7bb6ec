"""How tests that use the simulator skip where it cannot run.

A test module whose kernels need the packages at import time writes

    from ptxsim import skips
    torch, cutlass = map(skips.import_module, ("torch", "cutlass"))
    kernels = skips.import_module("tests.gemm.kernels")     # which imports cutlass

and any other `pytestmark = [pytest.mark.sim, requires_sim]`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from .available import why_no_core, why_not


def import_module(name: str) -> ModuleType:
    """Imports a module for a test module, which is skipped if the simulator cannot run here.

    A module that fails to import for another reason fails.
    """
    reason = why_not()
    if reason:
        pytest.skip(reason, allow_module_level=True)
    return importlib.import_module(name)


requires_core = pytest.mark.skipif(why_no_core() is not None, reason=why_no_core() or "")
requires_sim = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
