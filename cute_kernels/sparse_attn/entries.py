"""Compiled kernels of SM90 by their configurations."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..compile import cache
from ..compile.kernel import Kernel
from . import config

_NAMES: dict[type, str] = {
    config.VarlenTablesConfig: "varlen_tables",
    config.PreConfig: "bwd_pre",
    config.PostConfig: "bwd_post",
    config.PagedConfig: "paged",
    config.PagedScoresConfig: "paged_scores",
    config.PagedValuesConfig: "paged_values",
    config.BufferScoresConfig: "buffer_scores",
    config.BufferValuesConfig: "buffer_values",
}


def entry(chosen: object) -> Kernel:
    """Cache entry of one configuration; catalogues list it."""
    name = f"{_NAMES.get(type(chosen)) or chosen.kernel}_sm90"
    return Kernel.of(f"sparse_attn_{name}", f"{__package__}.kernel_{name}", chosen)


@functools.cache
def kernel(chosen: object) -> Callable:
    """The compiled kernel of a configuration."""
    return cache.get(entry(chosen), "sm_90a")
