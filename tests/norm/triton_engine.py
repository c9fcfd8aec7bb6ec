"""Runner of the Triton norm."""

from __future__ import annotations

import cute_kernels.norm.triton as package
from tests.triton_runner import Runner

RUNNER = Runner(
    package,
    {
        "forward_kernel": ("h_ptr", "y_ptr", "mean_ptr", "rstd_ptr"),
        "backward_kernel": ("dx_ptr", "weight_parts_ptr", "bias_parts_ptr"),
        "dx_kernel": ("dx_ptr",),
        "parts_kernel": ("weight_parts_ptr", "bias_parts_ptr"),
        "add_parts_kernel": ("out_ptr",),
    },
)
RUNNERS = (RUNNER,)
