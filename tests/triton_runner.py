"""Runs a system's Triton kernels without a GPU: compiled for a target, or their PTX in ptxsim.

    runner = Runner(cute_kernels.blend.triton, {"scaled_add_kernel": ("out_ptr",)})
    (kernel,) = runner.compiled("gfx942", lambda: runner.launch.scaled_add(a, b, 0.3))
    with runner.simulated():
        out = runner.launch.scaled_add(a, b, 0.3)       # CPU tensors

Everything goes through the system's launcher and Triton's own specialisation; only the launch is
replaced.  The package has the modules ``launch`` and ``kernel``, which ``launch`` knows as
``kernels``.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tests import triton_copies

from . import triton_harness as harness
from .gemm import triton_inspect as inspect
from .old_memory import old_memory

TARGETS = harness.TARGETS
sizes_of_float_sums = inspect.sizes_of_float_sums


@pytest.fixture(autouse=True)
def device_guard():
    """Launchers take a CPU for a device, and new memory holds NaN; for Triton's interpreter."""
    with harness.on_the_cpu(), old_memory():
        yield


@dataclass(frozen=True)
class Runner:
    """Runner of the kernels of one ``triton`` package.

    written: Kernel -> the tensors that it may write; all others are read-only in ptxsim.
    """

    package: ModuleType
    written: Mapping[str, tuple[str, ...]]

    @property
    def launch(self) -> ModuleType:
        """The package's launcher."""
        return importlib.import_module(f"{self.package.__name__}.launch")

    def copy_of(self, folder: Path, *edits: tuple[str, str]) -> ModuleType:
        """The launcher of a copy of the kernels in which each (old, new) is replaced: a mutant."""
        return triton_copies.copy_of(self.package, folder, *edits)

    def compiled(
        self, target: str, call: Callable[[], object], launch: ModuleType | None = None
    ) -> list:
        """The kernels that ``call`` would launch, compiled for one of `TARGETS`; nothing runs."""
        with harness.on_the_cpu():
            return harness.compiled(launch or self.launch, TARGETS[target], self.written, call)

    @contextlib.contextmanager
    def simulated(self, launch: ModuleType | None = None, **options: int) -> Iterator[list]:
        """While it lasts, launches of the sm_90 code run on CPU tensors in ptxsim.

        Yields the list of kernels launched.  Results that a launcher leaves unwritten are NaN, and
        a launch outside of the launcher's device guard fails.  ``options``: the simulator's.
        """
        with harness.guarded() as devices, old_memory():

            def check(values):
                assert devices, "launched outside of the device guard"

            launch = launch or self.launch
            with harness.simulated(launch, self.written, options, check) as kernels:
                yield kernels


def complaints(kernel, stack: int = 0) -> list[str]:
    """What is wrong with the code of a kernel without products; empty if nothing is.

    No atomics, spills beyond so many bytes of stack or matrix instructions, nothing fused, IEEE
    division, offsets of 64 bits, and no sum of floats in an order that the compiler chooses.
    """
    narrow = r"tt\.addptr .*: .*, tensor<[\dx]+xi32>"
    out = inspect.code_complaints(
        kernel, stack, r"div\.(full|approx)|sqrt\.approx", "division", narrow
    )
    return out + ["matrix instruction"] * bool(inspect.matrix_instructions(kernel))
