"""Every constant of the Triton kernels of linear attention.  No measurement has tuned them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TritonPlan:
    """Sizes of programs; none of them decides a bit.

    conv_rows, conv_channels: Tile of the convolution's forward and of its gradient of x.
    sum_channels: Channels of a program that sums over the rows of a chunk.
    fp_fusion: Whether the compiler may fuse; a multiply-add is written as one.
    """

    conv_rows: int = 16
    conv_channels: int = 64
    sum_channels: int = 64
    num_warps: int = 4
    fp_fusion: bool = False


TRITON = TritonPlan()
