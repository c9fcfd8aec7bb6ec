"""Launch the Triton kernels of linear attention: outputs, operands in their layout, grids.

Each function has the name and the result of one in cpu.py, runs on the device of its first tensor
and its current stream, and compiles at its first launch.
"""

from __future__ import annotations

import torch

from ...log import contiguous
from ...runtime.triton_products import cdiv
from ..config import CONV_CHUNK
from ..tensors import Conv, Sequences
from . import kernel as kernels
from .plan import TRITON

_ROWS = "a last stride of 1, the others without gaps"


def conv(
    operands: Conv,
    sequences: Sequences,
    silu: bool,
    out: torch.Tensor,
) -> None:
    """Triton implementation of `cpu.conv`."""
    x = operands.x
    slots, blocks = sequences.slots(TRITON.conv_rows), cdiv(x.shape[1], TRITON.conv_channels)
    with torch.cuda.device(x.device):
        kernels.conv_kernel[(slots, blocks)](
            *_tensors(operands, sequences),
            out,
            *_sizes(x, sequences),
            **_options(operands.weight, silu),
            ROWS=TRITON.conv_rows,
            CHANNELS=TRITON.conv_channels,
        )


def conv_backward(
    dy: torch.Tensor,
    operands: Conv,
    sequences: Sequences,
    silu: bool,
    sums: tuple[torch.Tensor | None, torch.Tensor | None],
    dx: torch.Tensor,
) -> torch.Tensor | None:
    """Triton implementation of `cpu.conv_backward`."""
    dy, (x, weight, _, initial) = contiguous("causal_conv", "dy", dy, _ROWS), operands
    d_initial = (
        None if initial is None else torch.empty(initial.shape, dtype=x.dtype, device=x.device)
    )
    tensors, sizes = (dy, *_tensors(operands, sequences)), _sizes(x, sequences)
    options, channels = _options(weight, silu), x.shape[1]
    with torch.cuda.device(x.device):
        slots, blocks = sequences.slots(TRITON.conv_rows), cdiv(channels, TRITON.conv_channels)
        kernels.conv_gradient_kernel[(slots, blocks)](
            *tensors, dx, *sizes, **options,
            ROWS=TRITON.conv_rows, CHANNELS=TRITON.conv_channels,
        )  # fmt: skip
        if d_initial is not None:
            kernels.conv_initial_gradient_kernel[(sequences.count, blocks)](
                *tensors, d_initial, *sizes, **options, CHANNELS=TRITON.conv_channels
            )
        if sums != (None, None):
            _add_sums(tensors, sizes, options, sequences, sums)
    return d_initial


def _add_sums(tensors, sizes, options, sequences: Sequences, sums) -> None:
    """Add dweight and dbias onto ``sums``, chunk by chunk."""
    x, width, slots = tensors[1], options["WIDTH"], sequences.slots(CONV_CHUNK)
    channels = x.shape[1]
    parts = x.new_empty(slots, width + 1, channels, dtype=torch.float32)
    blocks = cdiv(channels, TRITON.sum_channels)
    kernels.conv_sums_kernel[(slots, blocks)](
        *tensors, parts, *sizes, **options, ROWS=CONV_CHUNK, CHANNELS=TRITON.sum_channels
    )
    for into, taps, first in zip(sums, (width, 1), (0, width), strict=True):
        if into is None:
            continue
        dense = into if into.is_contiguous() else into.contiguous()
        kernels.add_sums_kernel[(blocks, taps)](
            parts, dense, slots, channels, taps,
            ROW=first, EACH=width + 1, CHANNELS=TRITON.sum_channels,
            num_warps=TRITON.num_warps, enable_fp_fusion=TRITON.fp_fusion,
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
        None if sequences.offsets is None else sequences.offsets.contiguous(),
    )


def _sizes(x: torch.Tensor, sequences: Sequences) -> tuple[int, ...]:
    stride = x.stride(0) if x.stride(1) == 1 else x.shape[1]
    return x.shape[0], sequences.length, sequences.count, x.shape[1], stride


def _options(weight: torch.Tensor, silu: bool) -> dict[str, int | bool]:
    return {
        "WIDTH": weight.shape[1],
        "SILU": silu,
        "num_warps": TRITON.num_warps,
        "enable_fp_fusion": TRITON.fp_fusion,
    }
