"""Byte comparison: how many numbers, and how many bytes, are not the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..errors import ShapeError, expected


@dataclass(frozen=True)
class Tally:
    """Result of a comparison; `+` joins two."""

    numbers: int = 0
    differing: int = 0  # numbers with any bit different
    bytes: int = 0
    differing_bytes: int = 0
    largest: float = 0.0  # |difference|, over the differing numbers

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.numbers + other.numbers,
            self.differing + other.differing,
            self.bytes + other.bytes,
            self.differing_bytes + other.differing_bytes,
            max(self.largest, other.largest),
        )


def tally(left: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> Tally:
    """Compares two lists of tensors of equal shapes and dtypes, by raw bytes.

    -0 and +0 differ; two NaNs of one bit pattern do not.  ShapeError for unequal shapes or dtypes.
    """
    return sum((_pair(a, b) for a, b in zip(left, right, strict=True)), Tally())


def _pair(a: torch.Tensor, b: torch.Tensor) -> Tally:
    if a.shape != b.shape or a.dtype != b.dtype:
        want = f"{a.dtype} {list(a.shape)}, as the left one"
        raise ShapeError(expected("right", want, f"{b.dtype} {list(b.shape)}"))
    size = a.element_size()
    unequal = _bytes(a, size) != _bytes(b, size)
    differing = unequal.any(dim=1)
    gaps = (a.flatten().double() - b.flatten().double()).abs()[differing]
    largest = gaps.nan_to_num(nan=torch.inf).max().item() if len(gaps) else 0.0
    return Tally(a.numel(), int(differing.sum()), unequal.numel(), int(unequal.sum()), largest)


def _bytes(t: torch.Tensor, size: int) -> torch.Tensor:
    return t.contiguous().flatten().view(torch.uint8).view(-1, size)
