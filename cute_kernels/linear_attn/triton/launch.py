"""Launch the Triton kernels of the convolution, and what launchers share.

Each launcher has the name and the result of one of the CPU backend, runs on the device of its first
tensor and its current stream, and compiles at its first launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import ModuleType

import torch

from ...log import contiguous
from ...runtime.triton_products import cdiv
from ..config import CONV_CHUNK
from ..tensors import Conv, ConvGradients, Sequences
from . import kernel as kernels
from .plan import TRITON

FUSION = {"enable_fp_fusion": TRITON.fp_fusion}
_OP = "causal_conv"


def conv(operands: Conv, sequences: Sequences, silu: bool, out: torch.Tensor) -> None:
    """Triton implementation of `cpu.conv`."""
    operands = loadable(_OP, operands, "x")
    slots = sequences.slots(TRITON.conv_rows)
    with torch.cuda.device(out.device):
        kernels.conv_kernel[(slots, cdiv(out.shape[1], TRITON.conv_channels))](
            *operands, sequences.offsets, out, *_sizes(operands.x, sequences),
            **_options(operands, silu), ROWS=TRITON.conv_rows,
        )  # fmt: skip


def conv_backward(
    dy: torch.Tensor, operands: Conv, sequences: Sequences, silu: bool, gradients: ConvGradients
) -> None:
    """Triton implementation of `cpu.conv_backward`."""
    operands, dy = loadable(_OP, operands, "x"), contiguous(_OP, "dy", dy, "no gaps")
    x, (channels, width) = operands.x, operands.weight.shape
    slots = sequences.slots(CONV_CHUNK)
    dx, weight, bias, initial = gradients
    parts = None
    if weight is not None or bias is not None:
        parts = x.new_empty(slots, width + 1, channels, dtype=torch.float32)
    with torch.cuda.device(x.device):
        kernels.conv_gradient_kernel[(slots, cdiv(channels, TRITON.conv_channels))](
            dy, *operands, sequences.offsets, dx, initial, parts, *_sizes(x, sequences),
            **_options(operands, silu), ROWS=CONV_CHUNK,
        )  # fmt: skip
        if parts is not None:
            add_sums(kernels, parts, weight, 0)
            add_sums(kernels, parts, bias, width)


def _sizes(x: torch.Tensor, sequences: Sequences) -> tuple[int, ...]:
    return *sequences.sizes, x.shape[1], x.stride(0)


def _options(operands: Conv, silu: bool) -> dict[str, int | bool]:
    return {
        "WIDTH": operands.weight.shape[1],
        "SILU": silu,
        "CHANNELS": TRITON.conv_channels,
        "AHEAD": TRITON.conv_ahead,
        # A known factor of D and of the stride between rows; it widens loads only.
        "ALIGN": math.gcd(operands.x.shape[1], operands.x.stride(0), 8),
        "num_warps": 1,
        **FUSION,
    }


# ---- what launchers share ------------------------------------------------------------------------


def loadable(op: str, operands, of_rows: Iterable[str]):
    """A tuple of operands with neighbours in rows side by side, and others without gaps."""
    dense = {}
    for name, t in operands._asdict().items():
        if t is not None and name not in of_rows:
            dense[name] = contiguous(op, name, t, "no gaps")
        elif t is not None:
            dense[name] = adjacent(op, name, t)
    return operands._replace(**dense)


def adjacent(op: str, name: str, t: torch.Tensor) -> torch.Tensor:
    """Rows whose neighbours lie side by side."""
    return t if t.stride(-1) == 1 else contiguous(op, name, t, "a last stride of 1")


def upstream(
    op: str, d_out: torch.Tensor, d_final: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of rows and of the last states, as kernels load them."""
    d_final = None if d_final is None else contiguous(op, "d_final", d_final, "no gaps")
    return adjacent(op, "d_out", d_out), d_final


def written(
    tensors: Iterable[torch.Tensor | None], gradients: Iterable[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Gradients that kernels write: those that are not needed have memory all the same."""
    return [
        torch.empty(t.shape, dtype=t.dtype, device=t.device)
        if into is None and t is not None
        else into
        for t, into in zip(tensors, gradients, strict=True)
    ]


def strides_of(*rows: torch.Tensor | None) -> list[int]:
    """Strides of rows and of heads of each tensor [N, H, ...]; 0 of None."""
    return [step for t in rows for step in ((0, 0) if t is None else t.stride()[:2])]


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
        num_warps=1, **FUSION,
    )  # fmt: skip
    if dense is not into:
        into.copy_(dense)
