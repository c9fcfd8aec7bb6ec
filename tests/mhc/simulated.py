"""The SM90 launcher of mhc on this CPU: its kernels for sm_90a, run by ptxsim."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace

import ptxsim
from cute_kernels.mhc import launch
from cute_kernels.runtime import plan_cache
from tests import kernel_store
from tests.plans import patched

#: What plans a launch and runs it, by the launcher's name.
launchers = SimpleNamespace(
    **{
        name.removeprefix("plan_"): plan_cache.launcher(planner)
        for name, planner in vars(launch).items()
        if name.startswith("plan_")
    }
)


@functools.cache
def compiled(chosen):
    """A kernel, compiled once per process."""
    name = launch.entry(chosen).name.removeprefix("mhc_")
    return kernel_store.simulated(f"cute_kernels.mhc.kernel_{name}", chosen)


@contextlib.contextmanager
def simulated(ctas: int = 3, kernel=compiled, **options) -> Iterator[None]:
    """Inside, plans of `launch` take CPU tensors and run in the simulator.

    ``ctas``: of a grid.  ``kernel``: from a configuration to a function.  Others: of the simulator.
    """
    launching = {"_kernel": kernel, "most_ctas": lambda device: ctas, "_MOST": ctas}
    with patched(launch, **launching), ptxsim.options(**options):
        yield
