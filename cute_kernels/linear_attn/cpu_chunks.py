"""Chunks of rows of sequences, for the CPU backends of recurrences.

Sequences of one length are computed at once, by lane: a head of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .tensors import Last, Sequences

#: Numbers of the states of a chunk's rows that are computed at once; no bit depends on it.
AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Group:
    """Consecutive sequences of one length, whose rows are computed at once.

    sequence, first, slot: The first one's number, first row and slot of its first chunk.
    size: Rows of a chunk.
    """

    sequence: int
    count: int
    length: int
    first: int
    slot: int
    size: int

    def chunks(self) -> Iterator[Chunk]:
        for start in range(0, self.length, self.size):
            yield Chunk(self, start, min(start + self.size, self.length))

    def store_last(self, last: Last | None, state: torch.Tensor, end: int) -> None:
        """Store the states by lane behind row ``end`` if they are those that ``last`` takes."""
        if end == self.row_of_last(last, self.size):
            self.of_sequences(last.states)[:] = self.by_sequence(state)

    def row_of_last(self, last: Last | None, rows: int) -> int:
        """The row behind which ``last`` takes states, a multiple of ``rows``; -1: it takes none."""
        if last is None:
            return -1
        return self.length if last.lag < 0 else max(self.length - last.lag, 0) // rows * rows

    def of_sequences(self, states: torch.Tensor) -> torch.Tensor:
        """States of these sequences among those of all [S, H, ...]."""
        return states[self.sequence : self.sequence + self.count]

    def states(self, given: torch.Tensor | None, sizes: tuple[int, ...]) -> torch.Tensor:
        """A copy of the states of these sequences, or zeros, by lane: [count H, ...], fp32.

        sizes: (H, ...) of a state.
        """
        if given is not None:
            return self.of_sequences(given).flatten(0, 1).clone()
        heads, *others = sizes
        return torch.zeros(self.count * heads, *others, dtype=torch.float32, device="cpu")

    def by_sequence(self, state: torch.Tensor) -> torch.Tensor:
        return state.unflatten(0, (self.count, -1))


@dataclass(frozen=True)
class Chunk:
    """Rows from ``start`` up to ``end`` of each sequence of a group."""

    group: Group
    start: int
    end: int

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """These among all rows [N, H, ...]: a view [rows, count, H, ...]."""
        first, sizes = self.group.first, (self.group.count, self.group.length)
        rows = rows[first : first + sizes[0] * sizes[1]].unflatten(0, sizes)
        return rows[:, self.start : self.end].swapdims(0, 1)

    def write(self, rows: torch.Tensor, lanes: torch.Tensor) -> None:
        """Round what is computed by lane [rows, count H', ...] to all rows [N, H, ...].

        Of H below H': the sum of the H' / H heads that each one serves, ascending.
        """
        target = self.read(rows)
        heads = lanes.unflatten(1, (self.group.count, target.shape[2], -1)).unbind(3)
        total = heads[0]
        for head in heads[1:]:
            total = total + head
        target[:] = total

    def states_of(self, states: torch.Tensor) -> torch.Tensor:
        """The saved states before this chunk, among those of all slots: a view [count, H, ...]."""
        chunks = -(-self.group.length // self.group.size)
        first = self.group.slot + self.start // self.group.size
        return states[first::chunks][: self.group.count]


def groups(sequences: Sequences, size: int) -> Iterator[Group]:
    """All of a batch, or each sequence of a pack, in chunks of ``size`` rows."""
    if sequences.offsets is None:
        yield Group(0, sequences.count, sequences.length, 0, 0, size)
        return
    for s, (first, end) in enumerate(sequences.bounds()):
        yield Group(s, 1, end - first, first, first // size + s, size)


def to_lanes(rows: torch.Tensor) -> torch.Tensor:
    """[rows, count, H, ...] -> [rows, lanes, ...], fp64."""
    return rows.flatten(1, 2).double()


def lanes_at_once(lanes: int, each: int) -> Iterator[slice]:
    """Lanes that are computed at once, where one has ``each`` numbers."""
    step = max(1, AT_ONCE // each)
    return (slice(i, i + step) for i in range(0, lanes, step))
