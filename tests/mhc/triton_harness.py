"""The Triton mhc without a GPU: see tests/triton_harness.py."""

from __future__ import annotations

from types import ModuleType

import pytest
import triton.language as tl

import cute_kernels.mhc.triton as package
from cute_kernels.cpu import ieee
from tests import triton_in_numpy
from tests.triton_harness import TARGETS  # noqa: F401  (those of the tests)
from tests.triton_runner import NARROW, Runner, device_guard  # noqa: F401

from .. import triton_inspect as inspect

#: The launcher's name of a module of kernels -> that module's kernels.
KERNELS = {
    "kernels": ("project_kernel", "project_backward_kernel", "combine_kernel", "reduce_kernel"),
    "token_kernels": (
        "add_chunks_kernel",
        "weights_kernel",
        "add_parts_kernel",
        "gate_kernel",
        "gate_backward_kernel",
        "sinkhorn_kernel",
        "sinkhorn_backward_kernel",
    ),
}
#: The tensors that kernels may write, by kernel.
WRITTEN = {
    "project_kernel": ("sums_ptr", "squares_ptr"),
    "project_backward_kernel": ("dx_ptr", "d_psi_ptr"),
    "combine_kernel": ("y_ptr", "out_ptr"),
    "reduce_kernel": ("df_ptr", "dx_ptr", "d_pre_ptr", "d_post_ptr", "d_res_ptr", "d_bias_ptr"),
    "add_chunks_kernel": ("h_ptr", "ms_ptr"),
    "weights_kernel": ("into_phi_ptr", "into_weight_ptr"),
    "add_parts_kernel": ("out_ptr",),
    "gate_kernel": ("pre_ptr", "post_ptr", "res_ptr"),
    "gate_backward_kernel": ("d_h_ptr", "d_ms_ptr", "parts_ptr"),
    "sinkhorn_kernel": ("out_ptr",),
    "sinkhorn_backward_kernel": ("out_ptr",),
}
PRODUCTS = ("project_kernel", "project_backward_kernel")
#: Bytes a thread on the stack that the projection's backward may have where x is fp32: what Triton
#: 3.7.1 leaves on sm_80 for four streams of the layout "nc" whose channels are no multiple of 16.
FP32_BACKWARD_STACK = 208
sizes_of_float_sums = inspect.sizes_of_float_sums


RUNNER = Runner(package, WRITTEN, files=("kernel", "kernel_tokens", "launch"))
copy_of, compiled, simulated = RUNNER.copy_of, RUNNER.compiled, RUNNER.simulated


def made_small(launch: ModuleType, monkeypatch) -> None:
    """A launcher with chunks of 32 channels and of 64 tokens, in Triton's interpreter."""
    monkeypatch.setattr(launch, "chunk_channels", lambda n, precision: 32)
    monkeypatch.setattr(launch, "TOKENS", 64)
    monkeypatch.setattr(launch.kernels, "TOKENS", tl.constexpr(64))


def complaints(kernel) -> list[str]:
    """Complaints about the code of a kernel; empty if there are none."""
    hip = kernel.metadata.target.backend == "hip"
    on_fma_units = kernel.name in PRODUCTS and not hip
    stack = inspect.FP32_STACK if on_fma_units else 0
    if kernel.name == "project_backward_kernel" and kernel.src.signature["x_ptr"] == "*fp32":
        stack = FP32_BACKWARD_STACK
    out = inspect.code_complaints(kernel, stack, NARROW)
    if on_fma_units and "fma.rn.f32" not in inspect.text(kernel):
        out.append("no fma")
    matrix = {"v_mfma_f32_16x16x4_f32"} if hip and kernel.name in PRODUCTS else set()
    if set(inspect.matrix_instructions(kernel)) != matrix:
        out.append("matrix instruction")
    return out


@pytest.fixture(autouse=True)
def cpu_arithmetic(monkeypatch):
    """The CPU backend's 2^y, and casts that round to the nearest even, as a GPU's do."""
    triton_in_numpy.casts_that_round(monkeypatch)
    triton_in_numpy.power_of_two(monkeypatch, ieee.exp2)
