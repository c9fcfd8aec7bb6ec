"""Mixtures of experts: ``ck.moe`` (docs/moe.md).

Names load their modules at first use.
"""

from __future__ import annotations

from ..lazy import lazy_names

#: Public name -> its module.
HOMES = {
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

__all__ = sorted(HOMES)
__getattr__, __dir__ = lazy_names(__name__, HOMES)
