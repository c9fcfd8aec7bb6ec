"""GPU kernels whose bits you can rely on.

``import cute_kernels as ck`` needs torch only: each public name loads its module at first use, and
``cutlass`` or ``triton`` are imported when a kernel that needs them is launched.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .runtime import python_version as python_version  # isort: skip  # it refuses old Pythons
from . import systems

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

_PUBLIC = {
    **systems.PUBLIC,
    "BlockMask": "schedulers.masks.mask",
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

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from . import errors as errors
    from . import nn as nn
    from . import schedulers as schedulers
    from .about import contract_id as contract_id
    from .about import guarantees as guarantees
    from .about import info as info
    from .model.audit.api import audit as audit
    from .model.batch_invariant.api import batch_invariant as batch_invariant
    from .model.batch_invariant.api import disable_batch_invariant as disable_batch_invariant
    from .model.batch_invariant.api import enable_batch_invariant as enable_batch_invariant
    from .model.compiling import compile_options as compile_options
    from .model.contract import Contract as Contract
    from .model.contract import compare_contracts as compare_contracts
    from .model.contract import contract as contract
    from .model.patch.api import patch as patch
    from .model.patch.api import unpatch as unpatch
    from .runtime.reduction import set_reduction as set_reduction
    from .schedulers.masks.mask import BlockMask as BlockMask
    from .systems import *  # noqa: F403


def __getattr__(name: str):
    if name not in _PUBLIC:
        near = difflib.get_close_matches(name, _PUBLIC, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    home = _PUBLIC[name]
    module = importlib.import_module(f"{__name__}.{home or name}")
    value = getattr(module, name) if home else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
