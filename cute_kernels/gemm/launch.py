"""The SM90 launcher: operands as TMA can address them, a compiled kernel, outputs, one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from .. import log
from ..compile import cache
from ..compile.call import call
from ..compile.kernel import Entry, Expect, Kernel
from ..operands import matrix, most_ctas, padded_copy, padded_empty, storable
from . import config
from .config import Config, tile_columns

_CTAS_PER_CLUSTER = Config.cluster_m * Config.cluster_n


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    order: str = config.ORDER,
) -> torch.Tensor:
    """a [M, K] · b [N, K]ᵀ (+ bias [N]), or ``accumulator`` [M, N] fp32 += the same, in place."""
    a, a_major = matrix(a, "gemm", "a")
    b, b_major = matrix(b, "gemm", "b")
    m, n, device = a.shape[0], b.shape[0], a.device
    if accumulator is not None:
        out, epilogue = accumulator, "accumulate"
        if not storable(out):
            out = padded_copy(out, "gemm", "accumulator")
    elif bias is not None:
        bias = log.contiguous("gemm", "bias", bias, "a stride of 1")
        out, epilogue = padded_empty(a, m, n), "bias"
    else:
        out, epilogue = padded_empty(a, m, n), "plain"
    clusters = max_clusters(device)
    width = tile_columns(m, n, clusters)
    kernel = _gemm_kernel(a.dtype, a_major, b_major, epilogue, width, order)
    call(device, kernel, a, b, out, bias, clusters)
    if accumulator is None:
        return log.contiguous("gemm", "out", out, "contiguous; its rows were padded for TMA")
    return accumulator if out is accumulator else accumulator.copy_(out)


def column_sum(rows: torch.Tensor) -> torch.Tensor:
    """Σ over the rows of [M, N] -> [N], rounded once to the dtype of ``rows``."""
    rows = rows if storable(rows) else padded_copy(rows, "gemm", "rows")
    out = rows.new_empty(rows.shape[1])
    call(rows.device, _column_sum_kernel(config.DTYPE_NAMES[rows.dtype]), rows, out)
    return out


def max_clusters(device: torch.device) -> int:
    """How many clusters the persistent grid may have: those that fit the device at once."""
    return max(1, most_ctas(device) // _CTAS_PER_CLUSTER)


@functools.cache
def _gemm_kernel(*chosen: torch.dtype | str | int) -> Callable:
    """The compiled kernel for the arguments of `config.choose`."""
    return cache.get(gemm_entry(config.choose(*chosen)), "sm_90a")


@functools.cache
def _column_sum_kernel(dtype: str) -> Callable:
    return cache.get(column_sum_entry(dtype), "sm_90a")


def gemm_entry(chosen: Config) -> Kernel:
    """One configuration of the GEMM as the cache and the catalogue know it."""
    return Kernel.of("gemm_sm90", f"{__package__}.kernel_sm90", chosen)


def column_sum_entry(dtype: str) -> Kernel:
    """The column sum for one dtype, likewise."""
    chosen = config.ColumnSumConfig(dtype=dtype)
    return Kernel.of("gemm_column_sum_sm90", f"{__package__}.kernel_column_sum_sm90", chosen)


def catalogue() -> Iterator[Entry]:
    """Every kernel that this launcher can ask for."""
    for chosen in config.catalogue():
        # 168 registers is all that 384 threads can start with; the roles then trade theirs.
        mma = f"64x{chosen.tile_n}x{config.K_GROUP}"
        yield Entry(gemm_entry(chosen), "A", Expect(mma, max_registers=168, max_shared=232448))
    for dtype in ("bf16", "fp16"):
        expect = Expect(None, max_registers=64, max_shared=16384)
        yield Entry(column_sum_entry(dtype), "A", expect)
