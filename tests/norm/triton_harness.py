"""The Triton norm without a GPU: see tests/triton_harness.py.

What a launcher leaves unwritten is NaN, by `poisoned`.
"""

from __future__ import annotations

import functools

import pytest

import cute_kernels.norm.triton as package
from cute_kernels.norm.triton import launch as triton_launch
from tests import triton_copies
from tests import triton_harness as harness
from tests.old_memory import old_memory
from tests.triton_harness import TARGETS  # noqa: F401  (those of the tests)

from ..gemm import triton_inspect as inspect

#: Every kernel, and the tensors that it may write.
KERNELS = {
    "forward_kernel": ("h_ptr", "y_ptr", "mean_ptr", "rstd_ptr"),
    "backward_kernel": ("dx_ptr", "weight_parts_ptr", "bias_parts_ptr"),
    "dx_kernel": ("dx_ptr",),
    "parts_kernel": ("weight_parts_ptr", "bias_parts_ptr"),
    "add_parts_kernel": ("out_ptr",),
}
#: Bytes a thread on the stack that a kernel may have: what Triton 3.7.1 leaves of layer norms of
#: 8192 fp32 on sm_90 is 24, of 65 fp16 on sm_80 16.
STACK = 24


copy_of = functools.partial(triton_copies.copy_of, package)
compiled, simulated = harness.harness(triton_launch, KERNELS)
sizes_of_float_sums = inspect.sizes_of_float_sums


def complaints(kernel) -> list[str]:
    """Complaints about the code of a kernel; empty if there are none."""
    inexact = r"div\.(full|approx)|(r?sqrt|rcp)\.approx"
    narrow = r"tt\.addptr .*: .*\bi32|tt\.addptr .*xi32>"
    return inspect.code_complaints(kernel, STACK, inexact, "division or root", narrow)


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that torch and plans hand out is full of NaN."""
    with old_memory():
        yield
