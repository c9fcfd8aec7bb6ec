"""Runs the Triton rowwise without a GPU: compiled, in ptxsim, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import cute_kernels.rowwise.triton as package
from cute_kernels.rowwise import functions
from cute_kernels.rowwise.config import LN2

from ..triton_in_numpy import power_of_two, round_as_gpus_do
from ..triton_runner import TARGETS, Runner, complaints, device_guard, sizes_of_float_sums

__all__ = ["KERNELS", "TARGETS", "complaints", "device_guard", "sizes_of_float_sums"]

#: Every kernel, and the tensors that it may write.
KERNELS = {
    "activation_kernel": ("out_ptr",),
    "activation_backward_kernel": ("out_ptr",),
    "gated_kernel": ("out_ptr",),
    "gated_backward_kernel": ("d_gate_ptr", "d_up_ptr"),
    "gated_rows_kernel": ("out_ptr",),
    "scale_kernel": ("out_ptr",),
    "softmax_kernel": ("out_ptr",),
    "softmax_backward_kernel": ("out_ptr",),
    "log_softmax_backward_kernel": ("out_ptr",),
    "rotary_table_kernel": ("cos_ptr", "sin_ptr"),
    "rotary_kernel": ("out_ptr",),
    "rotary_pair_kernel": ("q_out_ptr", "k_out_ptr"),
    "embedding_gradient_kernel": ("into_ptr",),
    "lane_sums_kernel": ("out_ptr",),
    "chain_kernel": ("out_ptr",),
}

RUNNER = Runner(package, KERNELS)
copy_of, compiled, simulated = RUNNER.copy_of, RUNNER.compiled, RUNNER.simulated


@pytest.fixture(autouse=True)
def cpu_arithmetic(monkeypatch):
    """2^y and fma that round once, and casts that round to the nearest even, as a GPU's do."""

    round_as_gpus_do(monkeypatch)
    power_of_two(monkeypatch, lambda y: functions.exp(y.double() * LN2).to(torch.float32))
