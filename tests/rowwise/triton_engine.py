"""Runner of the Triton rowwise."""

from __future__ import annotations

import torch

import cute_kernels.rowwise.triton as package
from cute_kernels.cpu import elementary
from tests import triton_in_numpy
from tests.triton_runner import Runner


def _exponentials(monkeypatch) -> None:
    """2^y is rounded once."""
    triton_in_numpy.power_of_two(
        monkeypatch, lambda y: elementary.exp(y.double() * elementary.LN2).to(torch.float32)
    )


_OUT = ("activation", "activation_backward", "gated", "gated_rows", "scale", "softmax")
_OUT += ("softmax_backward", "log_softmax_backward", "rotary", "lane_sums", "chain")
RUNNER = Runner(
    package,
    {
        **{f"{name}_kernel": ("out_ptr",) for name in _OUT},
        "gated_backward_kernel": ("d_gate_ptr", "d_up_ptr"),
        "rotary_table_kernel": ("cos_ptr", "sin_ptr"),
        "rotary_pair_kernel": ("q_out_ptr", "k_out_ptr"),
        "embedding_gradient_kernel": ("into_ptr",),
    },
    arithmetic=(triton_in_numpy.round_as_gpus_do, _exponentials),
)
RUNNERS = (RUNNER,)
