"""The SM90 launcher of moe on this CPU: its kernels compiled for sm_90a and run by ptxsim."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import ptxsim
from cute_kernels.moe import config, launch, tiles
from tests import kernel_store

#: The launcher chooses between the kernels.
CHOICE = "choice"
#: Kernel -> its configuration for the arguments of ``launch.<name>_kernel``.
CONFIGS = {
    "grouped": launch.grouped_config,
    "grouped_few": launch.grouped_few_config,
    "grouped_dw": lambda dtype, *rest: config.GroupedDwConfig(config.DTYPE_NAMES[dtype], *rest),
    "grouped_tree": lambda dtype, *rest: config.GroupedTreeConfig(config.DTYPE_NAMES[dtype], *rest),
}


def builder(name: str, module=None) -> Callable:
    """``launch.<name>_kernel`` for the simulator, each compiled once; of a mutated module."""

    @functools.cache
    def kernel(*chosen):
        configuration = CONFIGS[name](*chosen)
        if module is not None:
            return module.build(configuration, compile=ptxsim.compile)
        return kernel_store.simulated(f"cute_kernels.moe.kernel_{name}_sm90", configuration)

    return kernel


_KERNELS = {name: builder(name) for name in CONFIGS}


@contextlib.contextmanager
def simulated(
    ctas: int = 3,
    width: int | None = 64,
    few: tiles.Few | str | None = None,
    kernels: Mapping[str, Callable] | None = None,
    **options,
) -> Iterator[None]:
    """Inside, `launch`'s functions take CPU tensors and run in the simulator.

    width: columns of every tile; None: the launcher's choice for ``ctas`` SMs.
    few: tile of the kernel for few rows, which takes all products; None: it takes none; CHOICE:
    those that the launcher gives it.
    kernels: mutants by name, in place of `builder`'s.
    """
    with contextlib.ExitStack() as stack:
        for name, kernel in (_KERNELS | dict(kernels or {})).items():
            stack.enter_context(mock.patch.object(launch, f"{name}_kernel", kernel))
        stack.enter_context(mock.patch.object(launch, "most_ctas", lambda device: ctas))
        if few != CHOICE:
            stack.enter_context(mock.patch.object(tiles, "few", lambda *product: few))
        if width is not None:
            for name in ("width", "dw_width", "tree_width"):
                stack.enter_context(mock.patch.object(tiles, name, lambda *product: width))
        stack.enter_context(ptxsim.options(**options))
        yield
