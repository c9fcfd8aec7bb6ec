"""Runs the Triton norm without a GPU: compiled for a target, in ptxsim, or in the interpreter.

Everything goes through the launchers and Triton's own specialisation; only the launch is replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

import cute_kernels.norm.triton as package
from cute_kernels.norm.triton import launch as triton_launch

from .. import triton_copies
from ..gemm import triton_harness as gemm
from ..gemm import triton_inspect as inspect
from ..mhc.triton_harness import TARGETS, on_the_cpu, sizes_of_float_sums
from ..sparse_attn import triton_harness as attention

#: Every kernel, and the tensors that it may write.
KERNELS = {
    "forward_kernel": ("h_ptr", "y_ptr", "mean_ptr", "rstd_ptr"),
    "forward_wide_kernel": ("h_ptr", "y_ptr", "mean_ptr", "rstd_ptr"),
    "backward_kernel": ("dx_ptr", "weight_parts_ptr", "bias_parts_ptr"),
    "dx_kernel": ("dx_ptr",),
    "parts_kernel": ("weight_parts_ptr", "bias_parts_ptr"),
    "add_parts_kernel": ("out_ptr",),
}
#: Bytes a thread on the stack that a kernel may have: what Triton 3.7.1 leaves of layer norms of
#: 8192 fp32 on sm_90 is 24, of 65 fp16 on sm_80 16.
STACK = 24


def copy_of(folder: Path, *edits: tuple[str, str]) -> ModuleType:
    """The launcher of a copy of the kernels in which each (old, new) is replaced."""
    return triton_copies.copy_of(package, folder, *edits)


def compiled(target: str, call: Callable[[], object], launch: ModuleType = triton_launch) -> list:
    """The kernels that ``call`` would launch, compiled for ``target``; nothing runs."""
    kernels = []

    def receive(kernel, grid, values):
        kernels.append(kernel)

    with contextlib.ExitStack() as stack:
        _redirected(stack, launch, TARGETS[target], receive)
        call()
    return kernels


@contextlib.contextmanager
def simulated(launch: ModuleType = triton_launch, **options: int) -> Iterator[list]:
    """While it lasts, launches of the sm_90 code run on CPU tensors in ptxsim; yields the kernels.

    What a launcher leaves unwritten is NaN, by `poisoned`.  ``options``: the simulator's.
    """
    kernels = []

    def receive(kernel, grid, values):
        kernels.append(kernel)
        attention._simulate(kernel, grid, values, options)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(attention, "KERNELS", KERNELS))
        _redirected(stack, launch, TARGETS["sm_90"], receive)
        yield kernels


def _redirected(
    stack: contextlib.ExitStack, launch: ModuleType, target: GPUTarget, receive: Callable
) -> None:
    """Hands what is launched, compiled for ``target``, to ``receive``."""
    hip = "7.0" if target.backend == "hip" else None
    stack.enter_context(on_the_cpu())
    stack.enter_context(mock.patch.dict(os.environ, TRITON_CACHE_DIR=gemm._CACHE.name))
    driver = gemm._Driver(target)
    stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
    stack.enter_context(mock.patch.object(torch.version, "hip", hip))
    for name in KERNELS:
        redirect = gemm._Redirect(getattr(launch.kernels, name), receive)
        stack.enter_context(mock.patch.object(launch.kernels, name, redirect))


def complaints(kernel) -> list[str]:
    """What is wrong with the code of a kernel; empty if nothing is."""
    code, ttir = inspect.text(kernel), kernel.asm["ttir"]
    found = inspect.common_complaints(kernel, STACK)
    if kernel.metadata.target.backend == "hip" and re.search(r"\.vgpr_spill_count:\s*0\b", code):
        # Scalar registers are kept in lanes of vector registers: no memory is touched.
        found = [complaint for complaint in found if complaint != "spills"]
    if kernel.metadata.enable_fp_fusion:
        found.append("sums that the compiler may fuse")
    if re.search(r"div\.(full|approx)|(r?sqrt|rcp)\.approx", code):
        found.append("division or root that is not IEEE's")
    if any(size != 2 for size in sizes_of_float_sums(ttir)):
        found.append("a sum in the order of the compiler")
    if re.search(r"tt\.addptr .*: .*\bi32|tt\.addptr .*xi32>", ttir):
        found.append("offsets of 32 bits")
    return found


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that torch hands out is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
