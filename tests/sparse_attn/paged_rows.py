"""Rows of a batch over paged caches beside a dense forward of each sequence, in the simulator."""

from __future__ import annotations

from torch import Tensor

from cute_kernels.sparse_attn import launch
from tests.sparse_attn import simulated
from tests.sparse_attn.paged_cases import Batch, wrong_rows


def require_rows(batch: Batch, out: Tensor, lse: Tensor) -> None:
    """Every row is its row in the dense forward of its sequence; other tokens are empty."""

    def forward(*operands):
        with simulated.simulated():
            return launch.forward(*operands)

    assert wrong_rows(batch, out, lse, forward) == []
