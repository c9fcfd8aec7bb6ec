"""Rows of sequences in slots of rings, and new rows by sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Pieces(NamedTuple):
    """New rows of a call, [1, N, ...], by sequence.

    sequence: [N], of a row; what lies behind a pack belongs to the last one.  place: [N], of a row
    among those of its sequence.  inside: [N], whether a row belongs to a sequence.  first, count:
    [S], of the rows of a sequence.
    """

    sequence: torch.Tensor
    place: torch.Tensor
    inside: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor


def pieces_of(rows: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Pieces:
    """Return the pieces of rows [B, T, ...], or of a pack [1, N, ...]."""
    (batch, length), device = rows.shape[:2], rows.device
    row = torch.arange(batch * length, device=device)
    if cu_seqlens is None:
        first = torch.arange(batch, device=device) * length
        sequence = row // max(length, 1)
        inside = torch.ones_like(row, dtype=torch.bool)
        return Pieces(sequence, row - first[sequence], inside, first, first * 0 + length)
    offsets = cu_seqlens.long()
    sequence = sequence_of(row, offsets)
    first = offsets[:-1]
    return Pieces(sequence, row - first[sequence], row < offsets[-1], first, offsets.diff())


def sequence_of(row: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sequence of each row; the last one's of those behind it."""
    return (torch.searchsorted(offsets, row, right=True) - 1).clamp(max=len(offsets) - 2)


class Ring:
    """The last rows of each slot, the one at position p of a sequence in row p mod ``rows``."""

    def __init__(self, slots: int, rows: int, shape: tuple[int, ...], dtype, device):
        self.slots, self.rows = slots, rows
        # One row more, which takes what nobody will read.
        self.data = torch.zeros(slots * rows + 1, *shape, dtype=dtype, device=device)

    def read(self, slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Rows at positions of slots, tensors of one shape."""
        return self.data[slot * self.rows + position % self.rows]

    def write(self, slot, position, keep: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep some of the rows [N, ...]."""
        index = torch.where(keep, slot * self.rows + position % self.rows, len(self.data) - 1)
        self.data.index_copy_(0, index, rows.to(self.data.dtype))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots onto slots."""
        by_slot = self.data[:-1].view(self.slots, self.rows, *self.data.shape[1:])
        by_slot[target] = by_slot[source]

    def select(self, slots: torch.Tensor, rows: int, length: torch.Tensor) -> Ring:
        """Return a ring of these slots, whose sequences have ``length`` rows, and of other size."""
        new = Ring(len(slots), rows, self.data.shape[1:], self.data.dtype, self.data.device)
        back = torch.arange(-min(rows, self.rows), 0, device=self.data.device)
        position = length[:, None] + back
        slot = torch.arange(len(slots), device=slots.device)[:, None].expand_as(position)
        newest = self.read(slots[:, None], position).flatten(0, 1)
        new.write(slot.flatten(), position.flatten(), (position >= 0).flatten(), newest)
        return new
