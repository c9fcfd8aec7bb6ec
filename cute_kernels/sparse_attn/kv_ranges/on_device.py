"""Ranges (``ranges``) made where their tensors are: nothing is read back, and graphs hold them.

A graph of ``torch.compile`` has the operations of plain causal ranges itself, for inductor to fuse.

Sequences are not packed here: all queries of a batch row are of one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def seen_of(dense: Tensor) -> Tensor:
    """(first, end) of the True columns of each row: [B, 1, T, S] -> int32 [B, 1, T, 2].

    Columns between them count as seen: whoever may wait looks for gaps first.
    """
    count = dense.sum(dim=-1, dtype=torch.int32)
    marks = dense.to(torch.uint8)
    first = marks.argmax(dim=-1).to(torch.int32)
    end = dense.shape[-1] - marks.flip(-1).argmax(dim=-1).to(torch.int32)
    return torch.stack((first, torch.where(count > 0, end, first)), dim=-1)


def kv_ranges(
    seen: Tensor | None,
    padding: Tensor | None,
    q_offset: int | Tensor,
    kv_offset: int,
    sizes: tuple[int, int, int],
    device: torch.device,
) -> Tensor:
    """Apply ``ranges.kv_ranges`` to sequences that are not packed; on ``device``."""
    batch, rows, columns = sizes
    padding = None if padding is None else padding.to(device, torch.bool)
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.to(device, non_blocking=True)
    positions = torch.arange(rows, device=device) + (q_offset - kv_offset)
    begin = torch.zeros((batch, 1), dtype=torch.int64, device=device)
    position, last, real = begin + kv_offset, begin + columns, None
    if padding is not None:
        count = padding.sum(dim=1, keepdim=True)
        left = padding.to(torch.uint8).argmax(dim=1, keepdim=True)
        begin, position = (left - kv_offset).clamp(min=0), (kv_offset - left).clamp(min=0)
        last = left + count - kv_offset
        row_columns = positions + kv_offset
        # Columns beyond the mask are those of a static cache that are not filled yet.
        width = padding.shape[1]
        real = padding[:, row_columns.clamp(0, width - 1)] & (row_columns < width)
    if seen is None:
        first, end = begin, torch.minimum(positions + 1, last).clamp(max=columns)
    else:
        first, end = seen[:, 0].long().unbind(-1)
    if real is not None:
        end = torch.where(real, end, first)
    fields = torch.broadcast_tensors(
        begin, position, first, torch.maximum(first, end), positions[None]
    )
    return torch.stack(fields[:4], dim=-1)[:, None].to(torch.int32)
