"""Launch the Triton kernels of linear attention: outputs, operands in their layout, grids.

Each function has the name and the result of one in cpu.py, runs on the device of its first tensor
and its current stream, and compiles at its first launch.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch

from ...log import contiguous
from ...runtime.triton_products import cdiv
from ..config import CONV_CHUNK
from ..tensors import Conv, ConvGradients, Sequences
from . import kernel as kernels
from .plan import TRITON

_ROWS = "a last stride of 1, the others without gaps"


def conv(operands: Conv, sequences: Sequences, silu: bool, out: torch.Tensor) -> None:
    """Triton implementation of `cpu.conv`."""
    x, tensors = operands.x, _tensors(operands, sequences)
    slots = sequences.slots(TRITON.conv_rows)
    with torch.cuda.device(x.device):
        kernels.conv_kernel[(slots, cdiv(x.shape[1], TRITON.conv_channels))](
            *tensors, out, *_sizes(x, sequences),
            **_options(operands, silu), ROWS=TRITON.conv_rows,
        )  # fmt: skip


def conv_backward(
    dy: torch.Tensor, operands: Conv, sequences: Sequences, silu: bool, gradients: ConvGradients
) -> None:
    """Triton implementation of `cpu.conv_backward`."""
    x, tensors = operands.x, _tensors(operands, sequences)
    dy = contiguous("causal_conv", "dy", dy, _ROWS)
    width, channels, slots = operands.weight.shape[1], x.shape[1], sequences.slots(CONV_CHUNK)
    dx, weight, bias, initial = gradients
    parts = None
    if weight is not None or bias is not None:
        parts = x.new_empty(slots, width + 1, channels, dtype=torch.float32)
    with torch.cuda.device(x.device):
        kernels.conv_gradient_kernel[(slots, cdiv(channels, TRITON.conv_channels))](
            dy, *tensors, dx, initial, parts, *_sizes(x, sequences),
            **_options(operands, silu), ROWS=CONV_CHUNK,
        )  # fmt: skip
        if parts is not None:
            add_sums(kernels, parts, weight, 0)
            add_sums(kernels, parts, bias, width)


def add_sums(
    kernels: ModuleType, parts: torch.Tensor, into: torch.Tensor | None, first: int, fold: int = 1
) -> None:
    """into [D] or [D, taps] += parts [slots, rows, D] of rows ``first`` and on, slots ascending.

    kernels: The module of the caller's kernels, which has `add_sums_kernel` too.
    fold: Slots that are added half onto half before.
    """
    if into is None:
        return
    slots, each, channels = parts.shape
    dense, taps = into.contiguous(), into[0].numel()
    block = TRITON.add_lanes // fold
    kernels.add_sums_kernel[(cdiv(channels, block), taps)](
        parts, dense, slots, channels, taps,
        ROW=first, EACH=each, CHANNELS=block, AHEAD=TRITON.add_ahead, FOLD=fold,
        num_warps=1, enable_fp_fusion=TRITON.fp_fusion,
    )  # fmt: skip
    if dense is not into:
        into.copy_(dense)


def _tensors(operands: Conv, sequences: Sequences) -> tuple:
    x, weight, bias, initial = operands
    if x.stride(1) != 1:
        x = contiguous("causal_conv", "x", x, _ROWS)
    return (
        x,
        contiguous("causal_conv", "weight", weight, _ROWS),
        None if bias is None else contiguous("causal_conv", "bias", bias, _ROWS),
        None if initial is None else contiguous("causal_conv", "initial_states", initial, _ROWS),
        sequences.offsets,
    )


def _sizes(x: torch.Tensor, sequences: Sequences) -> tuple[int, ...]:
    stride = x.stride(0) if x.stride(1) == 1 else x.shape[1]
    return x.shape[0], sequences.length, sequences.count, x.shape[1], stride


def _options(operands: Conv, silu: bool) -> dict[str, int | bool]:
    x, weight, *_ = operands
    channels = x.shape[1]
    stride = x.stride(0) if x.stride(1) == 1 else channels
    return {
        "WIDTH": weight.shape[1],
        "SILU": silu,
        "CHANNELS": TRITON.conv_channels,
        "AHEAD": TRITON.conv_ahead,
        # A known factor of D and of the stride between rows; it widens loads only.
        "ALIGN": math.gcd(channels, stride, 8),
        "num_warps": 1,
        "enable_fp_fusion": TRITON.fp_fusion,
    }
