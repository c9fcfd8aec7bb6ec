"""Every constant of the Triton kernels of linear attention.  No measurement has tuned them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TritonPlan:
    """Sizes of programs, which decide no bit, and what does.

    conv_rows, conv_channels: Tile of the convolution's forward and of its gradient of x.
    sum_channels: Channels of a program that sums over the rows of a chunk.
    norm_rows: Rows of a program of l2norm.
    gate_elements: Elements of a program of the decay.
    log_terms: Terms of the series of ln(1 + u); the next is below 2^-29 of it.
    fp_fusion: Whether the compiler may fuse; a multiply-add is written as one.
    """

    conv_rows: int = 16
    conv_channels: int = 64
    sum_channels: int = 64
    norm_rows: int = 16
    gate_elements: int = 512
    log_terms: int = 8
    num_warps: int = 4
    fp_fusion: bool = False


TRITON = TritonPlan()
