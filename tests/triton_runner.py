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
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from triton.backends.compiler import GPUTarget

from tests import triton_copies

from .gemm import triton_harness as base
from .gemm import triton_inspect as inspect
from .sparse_attn import triton_harness as simulator

TARGETS = base.TARGETS | {"sm_80": GPUTarget("cuda", 80, 32)}


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """While it lasts, the launchers' device guard takes a CPU for a device."""
    with mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()):
        yield


@pytest.fixture(autouse=True)
def device_guard():
    """Launchers take a CPU for a device; for tests in Triton's interpreter."""
    with on_the_cpu():
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
        with on_the_cpu(), self._known():
            return simulator.compiled(target, call, launch or self.launch)

    @contextlib.contextmanager
    def simulated(self, launch: ModuleType | None = None, **options: int) -> Iterator[list]:
        """While it lasts, launches of the sm_90 code run on CPU tensors in ptxsim.

        Yields the list of kernels launched.  Results that a launcher leaves unwritten are NaN, and
        a launch outside of the launcher's device guard fails.  ``options``: the simulator's.
        """
        guards = []
        simulate = simulator._simulate

        @contextlib.contextmanager
        def guard(device):
            guards.append(device)
            yield
            guards.pop()

        def poisoned(shape, **kwargs):
            return torch.full(shape, torch.nan, **kwargs)

        def guarded(*args):
            assert guards, "launched outside of the device guard"
            simulate(*args)

        with (
            self._known(),
            mock.patch.object(torch.cuda, "device", guard),
            mock.patch.object(torch, "empty", poisoned),
            mock.patch.object(simulator, "_simulate", guarded),
            simulator.simulated(launch or self.launch, **options) as kernels,
        ):
            yield kernels

    @contextlib.contextmanager
    def _known(self) -> Iterator[None]:
        """While it lasts, the shared harness knows these kernels and all targets."""
        with (
            mock.patch.object(simulator, "KERNELS", self.written),
            mock.patch.object(base, "TARGETS", TARGETS),
        ):
            yield


def complaints(kernel) -> list[str]:
    """What is wrong with the code of a kernel without products; empty if nothing is.

    No atomics, spills or matrix instructions, nothing fused, IEEE division, offsets of 64 bits, and
    no sum of floats in an order that the compiler chooses.
    """
    found = inspect.common_complaints(kernel)
    code, ttir = inspect.text(kernel), kernel.asm["ttir"]
    hip = kernel.metadata.target.backend == "hip"
    if hip and re.search(r"\.vgpr_spill_count:\s*0\b", code):
        # Scalar registers are kept in lanes of vector registers: no memory is touched.
        found = [complaint for complaint in found if complaint != "spills"]
    if inspect.matrix_instructions(kernel):
        found.append("matrix instruction")
    if kernel.metadata.enable_fp_fusion:
        found.append("sums that the compiler may fuse")
    if re.search(r"div\.(full|approx)|sqrt\.approx", code):
        found.append("division that is not IEEE's")
    if any(size != 2 for size in sizes_of_float_sums(ttir)):
        found.append("a sum in the order of the compiler")
    if re.search(r"tt\.addptr .*: .*, tensor<[\dx]+xi32>", ttir):
        found.append("offsets of 32 bits")
    return found


def sizes_of_float_sums(ttir: str) -> list[int]:
    """The length of the axis of every sum of floats that the compiler is to order."""
    reduce = re.compile(
        r'"tt\.reduce"\(%[\w#]+\) <\{axis = (\d+) : i32\}> \(\{(.*?)\}\) : \(tensor<([\dx]+)x\w+>',
        re.DOTALL,
    )
    found = [
        int(shape.split("x")[int(axis)])
        for axis, body, shape in reduce.findall(ttir)
        if "arith.addf" in body
    ]
    assert ttir.count('"tt.reduce"') == len(reduce.findall(ttir)), "a form that is not read"
    return found
