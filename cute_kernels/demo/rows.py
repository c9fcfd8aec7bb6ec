"""The parts that have no op of ours, each row computed alone: norm, SiLU, log-softmax.

Why plain torch is not enough: an elementwise kernel runs vectors of 16 or 32 elements and a scalar
tail whose ``exp`` may round differently, and a large tensor is cut between threads where its size
says.  So the bits of a row could follow from how many rows there are.  Here every function sees one
shape only, [block_rows(D), D] with D a multiple of 64 and fewer elements than torch cuts between
threads: no tail, no cut, and autograd's backward runs on the same blocks.  What is left of the
model is look-ups, adds and multiplies, which are correctly rounded one by one and so have the same
bits anywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..errors import ShapeError, expected

LANES = 64
#: at::internal::GRAIN_SIZE: torch gives smaller elementwise work to one thread.
_ONE_THREAD = 32768


def block_rows(width: int) -> int:
    """The largest power of two of rows whose elements one thread takes: it reads width only."""
    return 1 << ((_ONE_THREAD - 1) // width).bit_length() - 1


def fixed_rows(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """fn over the rows of x [R, D] in blocks of B = block_rows(D) rows.

    Args:
        fn: Maps [B, D] to [B, E], each row alone.
        x: [R, D]; D a multiple of 64, below 32768.  Missing rows of the last block are zeros.

    Returns:
        [R, E].

    Raises:
        ShapeError: x is not 2-D, or torch would give its D a scalar tail or several threads.
    """
    if x.dim() != 2 or x.shape[1] % LANES or not 0 < x.shape[1] < _ONE_THREAD:
        want = f"[R, D] with D a multiple of {LANES} from {LANES} to {_ONE_THREAD - LANES}"
        raise ShapeError(expected("x", want, list(x.shape)))
    count, size = x.shape[0], block_rows(x.shape[1])
    missing = -count % size
    if missing:
        x = torch.cat([x, x.new_zeros(missing, x.shape[1])])
    return torch.cat([fn(block) for block in x.contiguous().split(size)])[:count]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight, in fp32 inside; x [..., D]."""

    def norm(block: torch.Tensor) -> torch.Tensor:
        wide = block.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(block.dtype)

    return _flat(norm, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x); x [..., D]."""
    return _flat(F.silu, x)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """log softmax over the last dimension in fp32; x [..., D]."""
    return _flat(lambda block: F.log_softmax(block.to(torch.float32), dim=-1), x)


def _flat(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return fixed_rows(fn, x.reshape(-1, x.shape[-1])).view(x.shape)
