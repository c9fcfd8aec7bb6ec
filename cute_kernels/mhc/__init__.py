"""Manifold-constrained hyper-connections: ``ck.mhc`` (docs/mhc.md).

Names load their modules at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_PUBLIC = {
    "projection": "api",
    "scale": "api",
    "sinkhorn": "api",
    "aggregate": "api",
    "expand_combine": "api",
    "mix_and_aggregate": "api",
    "post_pre": "api",
    "connect": "api",
    "head": "api",
    "expand_from_embedding": "api",
    "multilayer_recompute": "api",
    "recompute_streams": "recompute",
    "Options": "checks",
    "HyperConnection": "module",
    "HyperHead": "module",
    "from_transformer_engine": "converters",
    "from_tilekernels": "converters",
    "permute_columns": "converters",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from . import te as te
    from .api import aggregate as aggregate
    from .api import connect as connect
    from .api import expand_combine as expand_combine
    from .api import expand_from_embedding as expand_from_embedding
    from .api import head as head
    from .api import mix_and_aggregate as mix_and_aggregate
    from .api import multilayer_recompute as multilayer_recompute
    from .api import post_pre as post_pre
    from .api import projection as projection
    from .api import scale as scale
    from .api import sinkhorn as sinkhorn
    from .checks import Options as Options
    from .converters import from_tilekernels as from_tilekernels
    from .converters import from_transformer_engine as from_transformer_engine
    from .converters import permute_columns as permute_columns
    from .module import HyperConnection as HyperConnection
    from .module import HyperHead as HyperHead
    from .recompute import recompute_streams as recompute_streams


def __getattr__(name: str):
    if name == "te":
        return importlib.import_module(f"{__name__}.te")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "te"])
