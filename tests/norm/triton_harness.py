"""The Triton norm without a GPU: see tests/triton_harness.py.

What a launcher leaves unwritten is NaN, by `poisoned`.
"""

from __future__ import annotations

import pytest

import cute_kernels.norm.triton as package
from tests.old_memory import old_memory
from tests.triton_runner import NARROW, TARGETS, Runner  # noqa: F401

from .. import triton_inspect as inspect

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


RUNNER = Runner(package, KERNELS)
copy_of, compiled, simulated = RUNNER.copy_of, RUNNER.compiled, RUNNER.simulated
sizes_of_float_sums = inspect.sizes_of_float_sums


def complaints(kernel) -> list[str]:
    """Complaints about the code of a kernel; empty if there are none."""
    return inspect.code_complaints(kernel, STACK, NARROW)


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that torch and plans hand out is full of NaN."""
    with old_memory():
        yield
