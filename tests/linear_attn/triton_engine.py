"""Runners of the Triton kernels of linear attention."""

from __future__ import annotations

import cute_kernels.linear_attn.triton as package
from tests.triton_runner import Runner

RUNNER = Runner(
    package,
    {
        "conv_kernel": ("out_ptr",),
        "conv_gradient_kernel": ("dx_ptr",),
        "conv_initial_gradient_kernel": ("d_initial_ptr",),
        "conv_sums_kernel": ("sums_ptr",),
        "add_sums_kernel": ("into_ptr",),
    },
)
GATE = Runner(
    package,
    {
        "l2norm_kernel": ("y_ptr",),
        "l2norm_gradient_kernel": ("dx_ptr",),
        "decay_kernel": ("g_ptr",),
        "decay_gradient_kernel": ("da_ptr",),
        "decay_sums_kernel": ("sums_ptr",),
        "add_sums_kernel": ("into_ptr",),
    },
    files=("kernel", "kernel_gate", "launch", "gate"),
)
GATED_NORM = Runner(
    package,
    {
        "gated_norm_kernel": ("y_ptr", "rstd_ptr"),
        "gated_norm_gradient_kernel": ("dx_ptr", "d_gate_ptr", "pieces_ptr"),
        "add_sums_kernel": ("into_ptr",),
    },
    files=("kernel", "kernel_gated_norm", "launch", "gated_norm"),
)
RUNNERS = (RUNNER, GATE, GATED_NORM)
