"""Are bytes equal, and do they repeat?"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

REPEATS = 20


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors hold the same raw bytes."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    x, y = (t.contiguous().view(torch.uint8) for t in (x, y))
    return bool((x == y).all())


def repeats(call: Callable[[], tuple[Tensor, ...]], times: int = REPEATS) -> bool:
    """Whether `times` calls give the same bytes."""
    first = [t.clone() for t in call()]
    for _ in range(times - 1):
        if not all(same_bytes(x, y) for x, y in zip(call(), first, strict=True)):
            return False
    return True


def fp32_bits(values: Sequence[float]) -> list[int]:
    """The bytes of fp32 numbers, as integers."""
    return list(struct.unpack(f"<{len(values)}i", struct.pack(f"<{len(values)}f", *values)))
