"""Operands that kernels can address, outputs that they can store to, and how wide a grid may be.

Whatever the strides of a tensor, it takes the same kernel and gets the same bits: one that the
kernel cannot address is copied into one that it can.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import arch, log, settings

#: TMA wants pointers and strides at multiples of this many bytes.
ALIGN = 16
_MATRIX = "one stride of 1, the other one and the address at multiples of 16 bytes"
_ROWS = "a last stride of 1, the others and the address at multiples of 16 bytes"


class Matrix(NamedTuple):
    """How a launch gets a matrix [R, K] from an operand of a call.

    major: ``"k"`` or ``"mn"``, of the matrix that the kernel reads.
    adapt: ``adapt(operand)`` returns that matrix; None: it is the operand.
    flatten: The operand is a contiguous [..., K], which the launch itself reads as [R, K].
    """

    major: str
    adapt: Callable[[torch.Tensor], torch.Tensor] | None = None
    flatten: bool = False


class Output(NamedTuple):
    """How a launch makes a result [..., N].

    new: Allocates what the kernel writes; None: it writes a tensor of the caller.
    finish: ``finish(y)`` returns the contiguous [..., N]; None: ``y`` is that.
    flatten: ``y`` is [..., N], which the launch itself reads as [M, N].
    """

    new: Callable[[], torch.Tensor] | None
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    flatten: bool = False


def matrix(t: torch.Tensor, kernel: str, name: str, k_major: bool = False) -> Matrix:
    """How a launch gets ``t`` [..., K] as a matrix that TMA can address.

    k_major: The kernel takes no other major.
    """
    rows = flattened(t)
    major = _major(rows)
    if major is None or (k_major and major != "k"):
        return Matrix("k", lambda t: padded_copy(flat_rows(t, kernel), kernel, name))
    if t.dim() == 2:
        return Matrix(major)
    if t.is_contiguous():
        return Matrix(major, flatten=True)
    return Matrix(major, lambda t: flat_rows(t, kernel))


def flattened(t: torch.Tensor) -> torch.Tensor:
    """``t`` as `flat_rows` gives it: a meta tensor if flattening would copy."""
    if t.dim() == 2:
        return t
    shape = t.shape[:-1].numel(), t.shape[-1]
    try:
        return t.view(shape)
    except RuntimeError:  # its strides allow no view
        return torch.empty(shape, dtype=t.dtype, device="meta")


def _major(t: torch.Tensor) -> str | None:
    """The major of a matrix that TMA can address; None for another one."""
    if _rows_addressable(t):
        return "k"
    return "mn" if _rows_addressable(t.mT) else None


def storable(t: torch.Tensor) -> bool:
    """Whether TMA can store to ``t`` [M, N], and a pair of columns is one aligned access."""
    return t.shape[1] % 2 == 0 and _rows_addressable(t)


def addressable(t: torch.Tensor, kernel: str, name: str) -> torch.Tensor:
    """``t`` [..., D], or a contiguous copy, such that TMA can address it."""
    if is_addressable(t):
        return t
    log.copied(kernel, name, t, _ROWS)
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)


def is_addressable(t: torch.Tensor) -> bool:
    """Whether TMA can address ``t`` [..., D].

    The strides of dimensions of size 1 are part of the descriptor too.
    """
    step = ALIGN // t.itemsize
    *outer, last = t.stride()
    unit = math.gcd(*outer) if 0 not in outer else 1
    return last == 1 and unit % step == 0 and t.data_ptr() % ALIGN == 0


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
    width = padded_width(columns, like.dtype)
    out = like.new_empty(rows, width)
    return out if width == columns else out[:, :columns]


def padded_width(columns: int, dtype: torch.dtype) -> int:
    """The least number of columns, not below ``columns``, whose rows are whole 16 bytes."""
    step = ALIGN // dtype.itemsize
    return -(-columns // step) * step


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
    sms = arch.describe(device).units
    return min(cap, sms) if cap else sms


def _rows_addressable(t: torch.Tensor) -> bool:
    row, column = t.stride()
    # The row stride of a single row is still part of the descriptor; so is the order of the two.
    return column == 1 and row >= t.shape[1] and (row * t.itemsize | t.data_ptr()) % ALIGN == 0


def empty_rows_like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a dense tensor of the shape and layout of ``t`` whose rows are contiguous.

    It is contiguous where those of ``t`` are not.
    """
    out = torch.empty_like(t, dtype=dtype)
    if out.stride(-1) == 1:
        return out
    return torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format)
