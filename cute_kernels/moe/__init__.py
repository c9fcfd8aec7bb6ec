"""Mixtures of experts: ``ck.moe`` (docs/moe.md).

Names load their modules at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_PUBLIC = {
    "route": "api",
    "permute": "api",
    "dispatch": "api",
    "combine": "api",
    "load_balance_loss": "api",
    "z_loss": "api",
    "Routing": "tensors",
    "Permutation": "tensors",
    "Dispatch": "tensors",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from .api import combine as combine
    from .api import dispatch as dispatch
    from .api import load_balance_loss as load_balance_loss
    from .api import permute as permute
    from .api import route as route
    from .api import z_loss as z_loss
    from .tensors import Dispatch as Dispatch
    from .tensors import Permutation as Permutation
    from .tensors import Routing as Routing


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
