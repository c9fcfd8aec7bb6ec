"""The SM90 launcher on this CPU: its kernels compiled for sm_90a and run by tests/ptxsim.

Everything but the compile is the product's own code: operands, copies, epilogues, launch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from cute_kernels.gemm import config, launch
from tests import ptxsim


@functools.cache
def gemm_kernel(*chosen):
    """The kernel for the arguments of `config.choose`, compiled once per process."""
    from cute_kernels.gemm import kernel_sm90

    return kernel_sm90.build(config.choose(*chosen), compile=ptxsim.compile)


@functools.cache
def column_sum_kernel(dtype: str):
    """The column sum, likewise."""
    from cute_kernels.gemm import kernel_column_sum_sm90
    from cute_kernels.gemm.config import ColumnSumConfig

    return kernel_column_sum_sm90.build(ColumnSumConfig(dtype=dtype), compile=ptxsim.compile)


@contextlib.contextmanager
def simulated(
    clusters: int = 3, kernel=gemm_kernel, width: int | None = None, **options
) -> Iterator[None]:
    """Inside, `launch.gemm` and `launch.column_sum` take CPU tensors and run in the simulator.

    ``width``: every product takes the tile of so many columns; None: the one the launcher chooses.
    """
    names = {
        "_gemm_kernel": kernel,
        "_column_sum_kernel": column_sum_kernel,
        "max_clusters": lambda device: clusters,
    }
    if width is not None:
        names["tile_columns"] = lambda rows, columns, clusters: width
    before = {name: getattr(launch, name) for name in names}
    for name, value in names.items():
        setattr(launch, name, value)
    try:
        with ptxsim.options(**options):
            yield
    finally:
        for name, value in before.items():
            setattr(launch, name, value)


def operand(rows: int, columns: int, dtype: torch.dtype, major: str, seed: int) -> torch.Tensor:
    """Random [rows, columns], row-major (``"k"``) or column-major (``"mn"``), TMA-addressable."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator).to(dtype)
    shape = (rows, columns) if major == "k" else (columns, rows)
    held = launch.padded_empty(values, *shape)
    held.copy_(values if major == "k" else values.mT)
    return held if major == "k" else held.mT
