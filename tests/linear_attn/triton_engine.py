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
DELTA = Runner(
    package,
    {
        "inner_kernel": ("decay_ptr", "inner_ptr"),
        "chain_kernel": ("u_ptr", "states_ptr", "final_ptr"),
        "output_kernel": ("out_ptr",),
    },
    files=("kernel", "kernel_delta", "delta"),
)
DELTA_BACKWARD = Runner(
    package,
    {
        "local_gradient_kernel": ("du_ptr",),
        "chain_gradient_kernel": ("dr_ptr", "d_states_ptr", "d_initial_ptr"),
        "scores_gradient_kernel": ("d1_ptr", "d2_ptr", "dv_ptr", "d_decay_ptr", "of_beta_ptr"),
        "queries_gradient_kernel": ("dq_ptr", "d_decay_ptr"),
        "keys_gradient_kernel": ("dk_ptr", "dg_ptr", "d_beta_ptr"),
    },
    files=("kernel", "kernel_delta", "kernel_delta_backward", "delta", "delta_backward"),
)
DELTA_STEP = Runner(
    package,
    {
        "step_kernel": (
            "state_ptr",
            "k_ring_ptr",
            "v_ring_ptr",
            "g_ring_ptr",
            "beta_ring_ptr",
            "out_ptr",
        ),
        "advance_kernel": ("grid_ptr", "length_ptr"),
    },
    files=("kernel", "kernel_delta", "kernel_delta_step", "delta", "delta_step"),
)
RUNNERS = (RUNNER, GATE, GATED_NORM, DELTA, DELTA_BACKWARD, DELTA_STEP)
