"""Positions where a culprit's bytes differ: their count, and the first with both bit patterns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .trace import Table


@dataclass(frozen=True)
class Count:
    """Bytes that differ, of those compared, and the first element that does.

    tensor: the path of its output, "" for a module with one; a parameter's name.  first: (sequence,
    position, column in the row), or an index of a parameter; None if nothing differs.  want, got:
    its bits, with the reference and under the transform, in hexadecimal.
    """

    differing: int
    compared: int
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
    total, compared, first = 0, 0, None
    for path in want.keys() & got.keys():
        compared += int((want[path].seen & got[path].seen).sum()) * want[path].width
        types = want[path].dtype, got[path].dtype
        for cell in sorted(want[path].kept.keys() & got[path].kept.keys()):
            if not bool(culprit[cell]):
                continue
            pair = (want[path].kept[cell], got[path].kept[cell])
            differing, column = unlike(pair, types)
            total += differing
            if differing and (first is None or (cell, path) < first[:2]):
                first = (cell, path, column, _patterns(pair, types, column))
    if first is None:
        return Count(total, compared)
    cell, path, column, patterns = first
    sequence = bisect_right(starts, cell) - 1
    return Count(total, compared, path, (sequence, cell - starts[sequence], column), *patterns)


def of_gradient(name: str, want: torch.Tensor, got: torch.Tensor) -> Count:
    """Count the differing bytes of a parameter's gradient."""
    types = (want.dtype, got.dtype)
    pair = tuple(t.contiguous().flatten().view(torch.uint8) for t in (want, got))
    differing, element = unlike(pair, types)
    if not differing:
        return Count(0, want.nbytes, name)
    flat_index = torch.tensor(element, dtype=torch.int64, device="cpu")
    index = tuple(int(i) for i in torch.unravel_index(flat_index, want.shape))
    return Count(differing, want.nbytes, name, index, *_patterns(pair, types, element))


def unlike(
    pair: tuple[torch.Tensor, torch.Tensor], types: tuple[torch.dtype, torch.dtype]
) -> tuple[int, int]:
    """Return (number of differing bytes, first differing element) of two byte strings."""
    want, got = pair
    if types[0] != types[1] or want.shape != got.shape:
        return max(len(want), len(got)), 0
    differs = (want != got).nonzero().flatten()
    return len(differs), int(differs[0]) // types[0].itemsize if len(differs) else 0


def _patterns(pair, types, element: int) -> tuple[str, str]:
    """Return an element's bits in both: ``0x3f80``."""
    patterns = []
    for data, dtype in zip(pair, types, strict=True):
        size = dtype.itemsize
        raw = bytes(data[element * size : (element + 1) * size].tolist())
        patterns.append(f"0x{int.from_bytes(raw, 'little'):0{2 * size}x}")
    return patterns[0], patterns[1]
