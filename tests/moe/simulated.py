"""The SM90 launcher of moe on this CPU: its kernels compiled for sm_90a and run by ptxsim."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import ptxsim
from cute_kernels.moe import config, launch, tiles

#: The launcher chooses between the kernels.
CHOICE = "choice"


@functools.cache
def grouped_kernel(*chosen):
    """The kernel for the arguments of `launch.grouped_config`, compiled once per process."""
    from cute_kernels.moe import kernel_grouped_sm90

    return kernel_grouped_sm90.build(launch.grouped_config(*chosen), compile=ptxsim.compile)


@functools.cache
def grouped_few_kernel(*chosen):
    """The kernel for the arguments of `launch.grouped_few_config`, likewise."""
    from cute_kernels.moe import kernel_grouped_few_sm90

    kernel_config = launch.grouped_few_config(*chosen)
    return kernel_grouped_few_sm90.build(kernel_config, compile=ptxsim.compile)


@functools.cache
def grouped_dw_kernel(dtype, accumulate: bool, tile_n: int):
    """The kernel of the weights' gradients, likewise."""
    from cute_kernels.moe import kernel_grouped_dw_sm90

    chosen = config.GroupedDwConfig(config.DTYPE_NAMES[dtype], accumulate, tile_n)
    return kernel_grouped_dw_sm90.build(chosen, compile=ptxsim.compile)


@functools.cache
def grouped_tree_kernel(dtype, b_major: str, epilogue: str, tile_n: int):
    """The kernel of the order ``tree``, likewise."""
    from cute_kernels.moe import kernel_grouped_tree_sm90

    chosen = config.GroupedTreeConfig(config.DTYPE_NAMES[dtype], b_major, epilogue, tile_n)
    return kernel_grouped_tree_sm90.build(chosen, compile=ptxsim.compile)


@contextlib.contextmanager
def simulated(
    ctas: int = 3,
    kernel=grouped_kernel,
    width: int | None = 64,
    dw_kernel=grouped_dw_kernel,
    few: tiles.Few | str | None = None,
    few_kernel=grouped_few_kernel,
    tree_kernel=grouped_tree_kernel,
    **options,
) -> Iterator[None]:
    """Inside, `launch`'s functions take CPU tensors and run in the simulator.

    width: columns of every tile; None: the launcher's choice for ``ctas`` SMs.
    few: tile of the kernel for few rows, which takes all products; None: it takes none; CHOICE:
    those that the launcher gives it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(launch, "grouped_kernel", kernel))
        stack.enter_context(mock.patch.object(launch, "grouped_few_kernel", few_kernel))
        stack.enter_context(mock.patch.object(launch, "grouped_dw_kernel", dw_kernel))
        stack.enter_context(mock.patch.object(launch, "grouped_tree_kernel", tree_kernel))
        stack.enter_context(mock.patch.object(launch, "most_ctas", lambda device: ctas))
        if few != CHOICE:
            stack.enter_context(mock.patch.object(tiles, "few", lambda *product: few))
        if width is not None:
            for name in ("width", "dw_width", "tree_width"):
                stack.enter_context(mock.patch.object(tiles, name, lambda *product: width))
        stack.enter_context(ptxsim.options(**options))
        yield
