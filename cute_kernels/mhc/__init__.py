"""Manifold-constrained hyper-connections: ``ck.mhc`` (docs/mhc.md).

Names load their modules at first use.
"""

from __future__ import annotations

from ..lazy import lazy_names

#: Public name -> its module.
HOMES = {
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
    "te": None,
}

__all__ = sorted(set(HOMES) - {"te"})
__getattr__, __dir__ = lazy_names(__name__, HOMES)
