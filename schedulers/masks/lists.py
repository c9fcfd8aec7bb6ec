"""Partial and full blocks as two lists instead of one list with flags, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .build import compact, ragged
from .rules import indices


class SplitLists(NamedTuple):
    """Ascending lists per row (a query block, or a key block), compact: L is the longest row.

    partial_count, full_count: int32 [B, H, R]; partial_index, full_index: int32 [B, H, R, L],
    with an L each.  partial_value, full_value: a value carried along with every index, or None.
    """

    partial_count: Tensor
    partial_index: Tensor
    full_count: Tensor
    full_index: Tensor
    partial_value: Tensor | None = None
    full_value: Tensor | None = None


def split(count: Tensor, index: Tensor, full: Tensor, value: Tensor | None = None) -> SplitLists:
    """Split one merged list (``full`` bool per entry) into a partial and a full one."""
    tables = (index, full) if value is None else (index, full, value)
    row, col, is_full, *carried = ragged(count, *tables)
    halves = []
    for is_listed in (~is_full, is_full):
        columns = [col[is_listed], *(extra[is_listed] for extra in carried)]
        halves.append(compact(row[is_listed], *columns, shape=count.shape))
    partial, full_blocks = halves
    values = (partial[2], full_blocks[2]) if carried else (None, None)
    return SplitLists(partial[0], partial[1], full_blocks[0], full_blocks[1], *values)


def merge(lists: SplitLists) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Invert `split`: (count, index, full, value), ascending; no block may be in both lists."""
    columns = [[lists.partial_index, lists.full_index]]
    if lists.partial_value is not None:
        columns.append([lists.partial_value, lists.full_value])
    partial = ragged(lists.partial_count, *(pair[0] for pair in columns))
    full_blocks = ragged(lists.full_count, *(pair[1] for pair in columns))
    row, col, *carried = (torch.cat(pair) for pair in zip(partial, full_blocks, strict=True))
    full = indices(row.numel(), row.device) >= partial[0].numel()
    order = (row * (int(col.max()) + 1 if col.numel() else 1) + col).argsort()
    values = [col[order], full[order], *(extra[order] for extra in carried)]
    count, index, is_full, *value = compact(row[order], *values, shape=lists.partial_count.shape)
    return count, index, is_full, value[0] if value else None
