"""GPU kernels whose bits you can rely on.

``import cute_kernels as ck`` needs torch only: each public name loads its module at first use, and
``cutlass`` or ``triton`` are imported when a kernel that needs them is launched.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from .runtime import python_version as python_version  # isort: skip  # it refuses old Pythons
from . import systems
from .lazy import lazy_names

__version__ = "0.1.0"


def _load_schedulers(package: Path) -> None:
    """Make ``schedulers`` importable from a checkout, where it lies next to this package.

    An installed package contains the folder, and Python finds it there.  A checkout is also what
    ``python -m cute_kernels`` imports inside a clone after ``pip install .``: the working
    directory comes before site-packages.
    """
    if (package / "schedulers" / "__init__.py").is_file():
        return
    init = package.parent / "schedulers" / "__init__.py"
    if not init.is_file():
        raise ImportError(
            f"{__name__}.schedulers: expected {package / 'schedulers'} (installed package) or "
            f"{init.parent} (checkout); neither exists: install again"
        )
    name = f"{__name__}.schedulers"
    spec = importlib.util.spec_from_file_location(
        name, init, submodule_search_locations=[str(init.parent)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_load_schedulers(Path(__file__).resolve().parent)

#: Public name -> its module; None: it is one.
HOMES = {
    **systems.PUBLIC,
    "BlockMask": "schedulers.masks.mask",
    "LinearAttentionCache": "linear_attn.cache",
    "guarantees": "about",
    "contract_id": "about",
    "info": "about",
    "contract": "model.contract",
    "compare_contracts": "model.contract",
    "Contract": "model.contract",
    "set_reduction": "runtime.reduction",
    "audit": "model.audit.api",
    "patch": "model.patch.api",
    "unpatch": "model.patch.api",
    "compile_options": "model.compiling",
    "batch_invariant": "model.batch_invariant.api",
    "enable_batch_invariant": "model.batch_invariant.api",
    "disable_batch_invariant": "model.batch_invariant.api",
    "errors": None,
    "nn": None,
    "schedulers": None,
}

__all__ = sorted(HOMES)
__getattr__, _names = lazy_names(__name__, HOMES)


def __dir__() -> list[str]:
    return sorted([*_names(), "__version__"])
