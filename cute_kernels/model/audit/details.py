"""Positions where a culprit's bytes differ: their count, and the first with both bit patterns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .trace import Table


@dataclass(frozen=True)
class Count:
    """Bytes that differ, of those compared, and the first element that does.

    tensor: the path of its output, "" for a module with one; a parameter's name.  first: (sequence,
    position, column in the row), or an index of a parameter; None if nothing differs.  want, got:
    its bits, with the reference and under the transform, in hexadecimal.
    """

    bytes: int
    of_bytes: int
    tensor: str = ""
    first: tuple[int, ...] | None = None
    want: str = ""
    got: str = ""


def of_rows(
    want: Mapping[str, Table],
    got: Mapping[str, Table],
    culprit: torch.Tensor,
    starts: Sequence[int],
) -> Count:
    """Count the differing bytes over the stored rows of a culprit's outputs."""
    compared, counts = 0, {}
    for path in want.keys() & got.keys():
        one, other = want[path], got[path]
        compared += int((one.seen & other.seen).sum()) * one.width
        for cell in one.stored.keys() & other.stored.keys():
            if bool(culprit[cell]):
                pair = (one.stored[cell], one.dtype), (other.stored[cell], other.dtype)
                counts[cell, path] = _count(path, *pair)
    counts = {place: count for place, count in counts.items() if count.bytes}
    if not counts:
        return Count(0, compared)
    cell, path = place = min(counts)
    sequence = bisect_right(starts, cell) - 1
    first = (sequence, cell - starts[sequence], *counts[place].first)
    total = sum(count.bytes for count in counts.values())
    return replace(counts[place], bytes=total, of_bytes=compared, first=first)


def of_gradient(name: str, want: torch.Tensor, got: torch.Tensor) -> Count:
    """Count the differing bytes of a parameter's gradient."""
    flat = (t.contiguous().flatten().view(torch.uint8) for t in (want, got))
    count = _count(name, *zip(flat, (want.dtype, got.dtype), strict=True))
    if count.first is None:
        return count
    element = torch.tensor(count.first[0], dtype=torch.int64, device="cpu")
    index = torch.unravel_index(element, want.shape)
    return replace(count, first=tuple(int(i) for i in index))


#: Bytes, and the dtype of their elements.
_Data = tuple[torch.Tensor, torch.dtype]


def _count(tensor: str, want: _Data, got: _Data) -> Count:
    """Count the differing bytes of two rows of bytes; ``first`` is the number of an element."""
    (one, dtype), (other, _) = want, got
    if dtype != got[1] or one.shape != other.shape:
        differing, element = max(len(one), len(other)), 0
    else:
        places = (one != other).nonzero().flatten()
        if not len(places):
            return Count(0, len(one), tensor)
        differing, element = len(places), int(places[0]) // dtype.itemsize
    patterns = (_pattern(*data, element) for data in (want, got))
    return Count(differing, len(one), tensor, (element,), *patterns)


def _pattern(data: torch.Tensor, dtype: torch.dtype, element: int) -> str:
    """Return an element's bits: ``0x3f80``."""
    size = dtype.itemsize
    raw = bytes(data[element * size : (element + 1) * size].tolist())
    return f"0x{int.from_bytes(raw, 'little'):0{2 * size}x}"
