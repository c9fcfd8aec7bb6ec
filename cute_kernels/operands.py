"""Operands that kernels can address, outputs that they can store to, and how wide a grid may be.

Whatever the strides of a tensor, it takes the same kernel and gets the same bits: one that the
kernel cannot address is copied into one that it can.
"""

from __future__ import annotations

import functools
import math

import torch

from . import arch, log, settings

#: TMA wants pointers and strides at multiples of this many bytes.
ALIGN = 16
_MATRIX = "one stride of 1, the other one and the address at multiples of 16 bytes"
_ROWS = "a last stride of 1, the others and the address at multiples of 16 bytes"


def matrix(t: torch.Tensor, kernel: str, name: str) -> tuple[torch.Tensor, str]:
    """``t`` [R, K], or a copy, such that TMA can address it, and its major: ``"k"`` or ``"mn"``."""
    if _rows_addressable(t):
        return t, "k"
    if _rows_addressable(t.mT):
        return t, "mn"
    return padded_copy(t, kernel, name), "k"


def storable(t: torch.Tensor) -> bool:
    """Whether TMA can store to ``t`` [M, N], and a pair of columns is one aligned access."""
    return t.shape[1] % 2 == 0 and _rows_addressable(t)


def addressable(t: torch.Tensor, kernel: str, name: str) -> torch.Tensor:
    """``t`` [..., D], or a contiguous copy, such that TMA can address it.

    The strides of dimensions of size 1 are part of the descriptor too.
    """
    step = ALIGN // t.itemsize
    *outer, last = t.stride()
    unit = math.gcd(*outer) if 0 not in outer else 1
    if last == 1 and unit % step == 0 and t.data_ptr() % ALIGN == 0:
        return t
    log.copied(kernel, name, t, _ROWS)
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)


def flat_rows(t: torch.Tensor, kernel: str) -> torch.Tensor:
    """``t`` [..., K] as [M, K]: a view where its strides allow it."""
    if t.dim() == 2:
        return t
    flat = t.reshape(t.shape[:-1].numel(), t.shape[-1])
    if settings.log() and flat.data_ptr() != t.data_ptr():
        log.copied(kernel, "rows", t, "dimensions that are one, but for the last")
    return flat


def padded_empty(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """An uninitialised [rows, columns] whose row stride is a multiple of 16 bytes."""
    step = ALIGN // like.itemsize
    if columns % step == 0:
        return like.new_empty(rows, columns)
    width = (columns // step + 1) * step
    return like.new_empty(rows, width)[:, :columns]


def padded_copy(t: torch.Tensor, kernel: str, name: str) -> torch.Tensor:
    """``t`` [R, C] in a ``padded_empty``."""
    log.copied(kernel, name, t, _MATRIX)
    return padded_empty(t, *t.shape).copy_(t)


def not_empty(t: torch.Tensor) -> torch.Tensor:
    """``t``, or zeros that are not read: a kernel takes no tensor without elements."""
    return t if t.numel() else t.new_zeros([max(1, n) for n in t.shape])


def most_ctas(device: torch.device) -> int:
    """The CTAs of a persistent grid: one per SM, unless CUTE_KERNELS_MAX_CTAS says fewer."""
    return _most_ctas(device, settings.max_ctas())


@functools.cache
def _most_ctas(device: torch.device, cap: int) -> int:
    units = arch.describe(device).units
    return min(cap, units) if cap else units


def _rows_addressable(t: torch.Tensor) -> bool:
    row, column = t.stride()
    # The row stride of a single row is still part of the descriptor; so is the order of the two.
    return column == 1 and row >= t.shape[1] and (row * t.itemsize | t.data_ptr()) % ALIGN == 0
