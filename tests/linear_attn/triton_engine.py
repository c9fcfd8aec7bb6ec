"""Runners of the Triton kernels of linear attention."""

from __future__ import annotations

import cute_kernels.linear_attn.triton as package
from tests.triton_runner import Runner

RUNNER = Runner(
    package,
    {
        "conv_kernel": ("out_ptr",),
        "conv_gradient_kernel": ("dx_ptr", "d_initial_ptr", "sums_ptr"),
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
        "decay_sums_kernel": ("of_A_log_ptr", "of_bias_ptr"),
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
        "inner_kernel": ("decay_ptr", "inner_ptr", "scores_ptr"),
        "chain_kernel": ("u_ptr", "states_ptr", "final_ptr"),
        "output_kernel": ("out_ptr", "u_ptr", "states_ptr"),
    },
    files=("kernel", "kernel_delta", "kernel_kda", "delta"),
)
KDA = Runner(
    package,
    {
        "channel_decays_kernel": ("decay_ptr",),
        "channel_inner_kernel": (
            "inner_ptr", "scores_ptr", "queries_ptr", "keys_ptr", "weighted_ptr",
        ),
        "chain_kernel": ("u_ptr", "states_ptr", "final_ptr"),
        "output_kernel": ("out_ptr", "u_ptr", "states_ptr"),
    },
    files=DELTA.files,
)  # fmt: skip
DELTA_BACKWARD = Runner(
    package,
    {
        "local_gradient_kernel": ("du_ptr",),
        "chain_gradient_kernel": ("dr_ptr", "d_states_ptr", "d_initial_ptr"),
        "scores_gradient_kernel": ("d1_ptr", "d2_ptr", "dv_ptr", "d_decay_ptr", "of_beta_ptr"),
        "queries_gradient_kernel": ("dq_ptr", "of_q_ptr"),
        "keys_gradient_kernel": ("dk_ptr", "of_z_ptr", "of_u_ptr", "of_states_ptr"),
        "gates_gradient_kernel": ("dg_ptr", "d_beta_ptr"),
    },
    files=(
        "kernel",
        "kernel_delta",
        "kernel_delta_backward",
        "kernel_kda",
        "kernel_kda_backward",
        "delta",
        "delta_backward",
    ),
)
KDA_BACKWARD = Runner(
    package,
    {
        "channel_inner_kernel": ("queries_ptr", "keys_ptr", "weighted_ptr"),
        "local_gradient_kernel": ("du_ptr",),
        "chain_gradient_kernel": ("dr_ptr", "d_states_ptr", "d_initial_ptr"),
        "scores_gradient_kernel": ("d1_ptr", "d2_ptr", "dv_ptr", "of_beta_ptr"),
        "channels_gradient_kernel": ("dq_ptr", "dk_ptr", "d_decay_ptr", "of_z_ptr"),
        "channel_gates_gradient_kernel": ("dg_ptr", "d_beta_ptr"),
    },
    files=DELTA_BACKWARD.files,
)  # fmt: skip
DELTA_STEP = Runner(
    package,
    {
        "step_kernel": (
            "state_ptr",
            "k_ring_ptr",
            "v_ring_ptr",
            "g_ring_ptr",
            "beta_ring_ptr",
            "r_ring_ptr",
            "u_ring_ptr",
            "inner_ring_ptr",
            "out_ptr",
        ),
        "advance_kernel": ("grid_ptr", "length_ptr", "made_ptr", "rounded_at_ptr"),
    },
    files=("kernel", "kernel_delta", "kernel_delta_step", "delta", "delta_step"),
)
SSD = Runner(
    package,
    {
        "steps_kernel": ("step_ptr", "decay_ptr"),
        "state_kernel": ("states_ptr", "final_ptr"),
        "scan_kernel": ("out_ptr", "ungated_ptr", "states_ptr"),
    },
    files=("kernel", "kernel_gate", "kernel_delta", "kernel_ssd", "ssd"),
)
SSD_BACKWARD = Runner(
    package,
    {
        "gate_gradient_kernel": ("dy_ptr", "dz_ptr"),
        "state_gradient_kernel": ("d_states_ptr", "of_states_ptr", "d_initial_ptr"),
        "row_gradient_kernel": ("dC_ptr", "d_scores_ptr", "of_rows_ptr"),
        "column_gradient_kernel": (
            "dx_ptr", "dB_ptr", "of_steps_ptr", "of_ends_ptr", "sums_ptr",
        ),
        "steps_gradient_kernel": ("d_dt_ptr", "sums_ptr"),
        "add_sums_kernel": ("into_ptr",),
    },
    files=(
        "kernel", "kernel_gate", "kernel_delta", "kernel_ssd", "kernel_ssd_backward", "launch",
        "ssd", "ssd_backward",
    ),
)  # fmt: skip
SELECTIVE = Runner(
    package,
    {
        "scan_kernel": ("out_ptr", "step_ptr", "states_ptr", "final_ptr"),
        "state_gradient_kernel": ("d_states_ptr", "d_initial_ptr"),
        "gradient_kernel": ("dx_ptr", "d_dt_ptr", "dz_ptr", "parts_ptr", "sums_ptr"),
        "add_sums_kernel": ("into_ptr",),
    },
    files=(
        "kernel", "kernel_gate", "kernel_delta", "kernel_selective", "launch", "ssd", "selective",
    ),
)  # fmt: skip
RUNNERS = (
    RUNNER, GATE, GATED_NORM, DELTA, KDA, DELTA_BACKWARD, KDA_BACKWARD, DELTA_STEP, SSD,
    SSD_BACKWARD, SELECTIVE,
)  # fmt: skip
