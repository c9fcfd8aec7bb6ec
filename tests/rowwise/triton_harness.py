"""The Triton rowwise without a GPU: see tests/triton_harness.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import cute_kernels.rowwise.triton as package
from cute_kernels.rowwise import functions
from cute_kernels.rowwise.config import LN2
from cute_kernels.rowwise.triton import launch as triton_launch
from tests import triton_copies, triton_in_numpy
from tests import triton_harness as harness
from tests.triton_harness import TARGETS  # noqa: F401  (those of the tests)

from ..gemm import triton_inspect as inspect

#: Every kernel, and the tensors that it may write.
KERNELS = {
    "activation_kernel": ("out_ptr",),
    "activation_backward_kernel": ("out_ptr",),
    "gated_kernel": ("out_ptr",),
    "gated_backward_kernel": ("d_gate_ptr", "d_up_ptr"),
    "scale_kernel": ("out_ptr",),
    "softmax_kernel": ("out_ptr",),
    "softmax_backward_kernel": ("out_ptr",),
    "log_softmax_backward_kernel": ("out_ptr",),
    "rotary_table_kernel": ("cos_ptr", "sin_ptr"),
    "rotary_kernel": ("out_ptr",),
    "embedding_gradient_kernel": ("into_ptr",),
    "lane_sums_kernel": ("out_ptr",),
    "chain_kernel": ("out_ptr",),
}

copy_of = functools.partial(triton_copies.copy_of, package)
compiled, _ = harness.harness(triton_launch, KERNELS)
sizes_of_float_sums = inspect.sizes_of_float_sums


@contextlib.contextmanager
def simulated(launch: ModuleType = triton_launch, **options: int) -> Iterator[list]:
    """While it lasts, launches of the sm_90 code run on CPU tensors in ptxsim; yields the kernels.

    Results that a launcher leaves unwritten are NaN, and a launch outside the device guard fails.
    """
    with harness.guarded() as devices, harness.nan_memory():

        def check(values):
            assert devices, "launched outside the device guard"

        with harness.simulated(launch, KERNELS, options, check) as kernels:
            yield kernels


def complaints(kernel) -> list[str]:
    """What is wrong with the code of a kernel; empty if nothing is."""
    narrow = r"tt\.addptr .*: .*, tensor<[\dx]+xi32>"
    found = inspect.code_complaints(
        kernel, 0, r"div\.(full|approx)|sqrt\.approx", "division", narrow
    )
    return found + ["matrix instruction"] * bool(inspect.matrix_instructions(kernel))


@pytest.fixture(autouse=True)
def device_guard():
    """Launchers take a CPU for a device."""
    with harness.on_the_cpu():
        yield


@pytest.fixture(autouse=True)
def cpu_arithmetic(monkeypatch):
    """2^y and fma that round once, and casts that round to the nearest even, as a GPU's do."""
    triton_in_numpy.casts_that_round(monkeypatch)
    triton_in_numpy.fma_that_rounds_once(monkeypatch)
    triton_in_numpy.power_of_two(
        monkeypatch, lambda y: functions.exp(y.double() * LN2).to(torch.float32)
    )
