"""Runner of the Triton mhc."""

from __future__ import annotations

import cute_kernels.mhc.triton as package
from cute_kernels.cpu import ieee
from tests import triton_in_numpy
from tests.triton_runner import Runner


def _exponentials_of_the_cpu(monkeypatch) -> None:
    triton_in_numpy.power_of_two(monkeypatch, ieee.exp2)


#: In the interpreter an fma is a product and a sum, as the CPU backend's: most bytes are its.
RUNNER = Runner(
    package,
    {
        "project_kernel": ("sums_ptr", "squares_ptr"),
        "project_backward_kernel": ("dx_ptr", "d_psi_ptr"),
        "combine_kernel": ("y_ptr", "out_ptr"),
        "reduce_kernel": (
            *("df_ptr", "dx_ptr", "d_pre_ptr", "d_post_ptr", "d_res_ptr", "d_bias_ptr"),
        ),
        "add_chunks_kernel": ("h_ptr", "ms_ptr"),
        "weights_kernel": ("into_phi_ptr", "into_weight_ptr"),
        "add_parts_kernel": ("out_ptr",),
        "gate_kernel": ("pre_ptr", "post_ptr", "res_ptr"),
        "gate_backward_kernel": ("d_h_ptr", "d_ms_ptr", "parts_ptr"),
        "sinkhorn_kernel": ("out_ptr",),
        "sinkhorn_backward_kernel": ("out_ptr",),
    },
    files=("kernel", "kernel_tokens", "launch"),
    arithmetic=(triton_in_numpy.casts_that_round, _exponentials_of_the_cpu),
)
RUNNERS = (RUNNER,)
