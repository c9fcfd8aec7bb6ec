"""The SM90 launcher of moe on this CPU: its kernels compiled for sm_90a and run by ptxsim."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import ptxsim
from cute_kernels.moe import config, launch, tiles
from tests import kernel_store
from tests.plans import patched

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
    launching = {f"{name}_kernel": k for name, k in (_KERNELS | dict(kernels or {})).items()}
    launching["most_ctas"] = lambda device: ctas
    widths = () if width is None else ("width", "dw_width", "tree_width")
    choices = dict.fromkeys(widths, lambda *product: width)
    choices |= {} if few == CHOICE else {"few": lambda *product: few}
    with patched(launch, **launching), patched(tiles, **choices), ptxsim.options(**options):
        yield
