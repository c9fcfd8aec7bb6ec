"""The SM90 launcher of norm on this CPU: its kernels for sm_90a, run by ptxsim."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator

import ptxsim
from cute_kernels.norm import launch
from tests import kernel_store
from tests.plans import patched


def module_of(chosen) -> str:
    """Name of the kernel's module."""
    return f"cute_kernels.norm.kernel_{launch.entry(chosen).name.removeprefix('norm_')}"


def built(chosen):
    """A kernel as its source, its settings and what is patched of them are now."""
    return importlib.import_module(module_of(chosen)).build(chosen, compile=ptxsim.compile)


@functools.cache
def compiled(chosen):
    """A kernel of the tree."""
    return kernel_store.simulated(module_of(chosen), chosen)


@contextlib.contextmanager
def simulated(sms: int = 3, kernel=compiled, **options) -> Iterator[None]:
    """Inside, `launch`'s functions take CPU tensors and run in the simulator.

    ``sms``: of the card.  ``kernel``: from a configuration to a function.  Others: the simulator's.
    """
    with (
        patched(launch, _kernel=kernel, most_ctas=lambda device: sms),
        ptxsim.options(**options),
    ):
        yield
