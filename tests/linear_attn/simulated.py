"""The SM90 launcher of linear attention on this CPU: CuTe and Triton kernels in ptxsim."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import ptxsim
from cute_kernels.linear_attn import launch
from tests.kernel_store import simulated as simulated_kernel
from tests.triton_runner import SM90

from .triton_engine import DELTA, DELTA_BACKWARD, DELTA_STEP


def module_of(chosen) -> str:
    """The kernel's module."""
    name = launch.entry(chosen).name.removeprefix("linear_attn_")
    return f"cute_kernels.linear_attn.kernel_{name}"


@functools.cache
def compiled(chosen) -> Callable:
    """Kernel of a configuration, in the simulator."""
    return simulated_kernel(module_of(chosen), chosen)


@contextlib.contextmanager
def running(kernel: Callable | None = None, **options: int) -> Iterator[ModuleType]:
    """While it lasts, the launcher that it yields takes CPU tensors; ``kernel``: for `compiled`."""
    both = mock.patch.object(launch, "kernel", kernel or compiled)
    math = {name: options[name] for name in options.keys() & {"wgmma_math"}}
    with (
        DELTA.running(SM90, **math),
        DELTA_BACKWARD.running(SM90, **math),
        DELTA_STEP.running(SM90, **math),
        both,
        ptxsim.options(**options),
    ):
        yield launch
