"""CPU backend: fp64 inside, one IEEE operation at a time, one rounding at the end.

No bit depends on how many sequences there are, on threads, or on where a vector register ends:
every operation is elementwise, and sums are chains in a fixed order.
"""

from __future__ import annotations

import torch

from ..cpu import elementary
from ..cpu.ieee import ieee
from .config import CONV_CHUNK
from .tensors import Conv, ConvGradients, Sequences


def conv(operands: Conv, sequences: Sequences, silu: bool, out: torch.Tensor) -> None:
    """Write the causal depthwise convolution to out [N, D]; rows of no sequence are 0."""
    out.zero_()
    with ieee():
        for s, (first, end) in enumerate(sequences.bounds()):
            rows = _with_tail(operands, s, first, end)
            pre = _preactivation(rows, operands.weight, operands.bias)
            out[first:end] = elementary.value("silu", pre) if silu else pre


def conv_backward(
    dy: torch.Tensor, operands: Conv, sequences: Sequences, silu: bool, gradients: ConvGradients
) -> None:
    """Make the gradients of `conv` from dy [N, D]; dx of rows of no sequence is 0."""
    dx, into, of_bias, d_initial = gradients
    if dx is not None:
        dx.zero_()
    with ieee():
        for s, (first, end) in enumerate(sequences.bounds()):
            rows = _with_tail(operands, s, first, end)
            slope = dy[first:end].double()
            if silu:
                pre = _preactivation(rows, operands.weight, operands.bias)
                slope = elementary.derivative("silu", pre) * slope
            if dx is not None or d_initial is not None:
                gradient = _gradient_of_rows(slope, operands.weight)
                tail = len(gradient) - len(slope)
                if dx is not None:
                    dx[first:end] = gradient[tail:]
                if d_initial is not None:
                    d_initial[s] = gradient[:tail].mT
            _add_sums(rows, slope, into, of_bias)


def _with_tail(operands: Conv, sequence: int, first: int, end: int) -> torch.Tensor:
    """Rows of a sequence after the W - 1 before them, which are zeros without an initial state."""
    x, weight, _, initial = operands
    tail = weight.shape[1] - 1
    rows = torch.zeros(tail + end - first, x.shape[1], dtype=torch.float64, device="cpu")
    if initial is not None:
        rows[:tail] = initial[sequence].mT
    rows[tail:] = x[first:end]
    return rows


def _preactivation(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """bias + Σ_w weight[:, w] row(t - W + 1 + w), the oldest row first; fp64."""
    length = rows.shape[0] - weight.shape[1] + 1
    total = torch.zeros(length, rows.shape[1], dtype=torch.float64, device="cpu")
    if bias is not None:
        total += bias.double()
    for w, factor in enumerate(weight.double().unbind(1)):
        total += rows[w : w + length] * factor
    return total


def _gradient_of_rows(slope: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Gradient of the rows and of the W - 1 before them: Σ_w slope(t + W - 1 - w) weight[:, w].

    A row's own slope comes first, then those of the rows after it.
    """
    width, length = weight.shape[1], slope.shape[0]
    total = torch.zeros(length + width - 1, slope.shape[1], dtype=torch.float64, device="cpu")
    for w in reversed(range(width)):
        total[w : w + length] += slope * weight[:, w].double()
    return total


def _add_sums(
    rows: torch.Tensor,
    slope: torch.Tensor,
    into: torch.Tensor | None,
    of_bias: torch.Tensor | None,
) -> None:
    """Add a sequence's dweight and dbias, chunk by chunk."""
    for w in range(0 if into is None else into.shape[1]):
        add_chunks(into[:, w], rows[w : w + len(slope)] * slope)
    if of_bias is not None:
        add_chunks(of_bias, slope)


def add_chunks(into: torch.Tensor, rows: torch.Tensor, size: int = CONV_CHUNK) -> None:
    """Add a sequence's fp64 rows [T, ...] to into [...], fp32, chunk by chunk, each a chain."""
    for chunk in rows.split(size) if len(rows) else ():
        into += _chain(chunk).float()


def _chain(rows: torch.Tensor) -> torch.Tensor:
    """Sum of rows, ascending."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total
