"""Runners of moe's Triton kernels: grouped products, and routing."""

from __future__ import annotations

import cute_kernels.moe.triton as package
from tests.triton_runner import Runner

PRODUCTS = Runner(
    package,
    dict.fromkeys(
        ("grouped_gemm_kernel", "grouped_leaves_kernel", "grouped_dw_kernel", "grouped_sum_kernel"),
        ("out_ptr",),
    ),
)
ROUTES = Runner(
    package,
    {
        **dict.fromkeys(
            ("select_kernel", "weights_kernel", "slot_weights_kernel", "weights_backward_kernel"),
            ("out_ptr",),
        ),
        "count_kernel": ("counts_ptr",),
        "place_kernel": ("offsets_ptr", "order_ptr", "positions_ptr"),
        **dict.fromkeys(("gather_kernel", "combine_kernel"), ("out_ptr",)),
        "combine_backward_kernel": ("d_rows_ptr", "d_weights_ptr"),
    },
    files=("kernel_routing", "routing"),
)
RUNNERS = (PRODUCTS, ROUTES)
