"""The SM90 launcher on this CPU: its kernels compiled for sm_90a and run by ptxsim.

Everything but the compile is the product's own code: operands, copies, epilogues, launch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import ptxsim
from cute_kernels.gemm import config, launch, tiles
from tests.kernel_store import simulated as simulated_kernel
from tests.plans import patched

#: The tile that tests of kernel_sm90 take, whatever the launcher would.
WIDE = tiles.Dense(config.Config.tile_n)


@functools.cache
def gemm_kernel(*chosen):
    """The kernel for the arguments of `launch.dense_config`, compiled once per process."""
    return simulated_kernel("cute_kernels.gemm.kernel_sm90", launch.dense_config(*chosen))


@functools.cache
def skinny_kernel(*chosen):
    """Kernel for the arguments of `launch.skinny_config`, in the simulator."""
    return simulated_kernel("cute_kernels.gemm.kernel_skinny_sm90", launch.skinny_config(*chosen))


@functools.cache
def column_sum_kernel(dtype: str):
    """Column-sum kernel, in the simulator."""
    chosen = config.ColumnSumConfig(dtype=dtype)
    return simulated_kernel("cute_kernels.gemm.kernel_column_sum_sm90", chosen)


@contextlib.contextmanager
def simulated(
    clusters: int = 3, kernel=None, tile: tiles.Dense | tiles.Skinny | None = WIDE, **options
) -> Iterator[None]:
    """Inside, `launch`'s functions take CPU tensors and run in the simulator.

    ``tile``: what every product takes; None: the launcher's choice for ``2 * clusters`` SMs.
    ``kernel``: in place of the one that is compiled for ``tile``.
    """
    skinny = isinstance(tile, tiles.Skinny)
    launching = {
        "gemm_kernel": gemm_kernel if skinny or kernel is None else kernel,
        "skinny_kernel": kernel if skinny and kernel is not None else skinny_kernel,
        "_column_sum_kernel": column_sum_kernel,
        "max_clusters": lambda device: clusters,
        "most_ctas": lambda device: 2 * clusters,
    }
    names = () if tile is None else ("choose", "skinny" if skinny else "dense")
    choices = dict.fromkeys(names, lambda *product: tile)
    with patched(launch, **launching), patched(tiles, **choices), ptxsim.options(**options):
        yield
