"""The walk of the CPU backends of recurrences over chunks of rows of sequences.

Sequences of one length are computed at once, by lane: a head of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..cpu.ieee import ieee
from .tensors import DeltaRule, DeltaSaved, Last, Sequences, StateSpace, StateSpaceSaved

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

    def row_of_last(self, last: Last | None, rows: int) -> int:
        """The row after which ``last`` takes states, a multiple of ``rows``; -1: it takes none."""
        if last is None:
            return -1
        return self.length if last.lag < 0 else max(self.length - last.lag, 0) // rows * rows

    def of_sequences(self, states: torch.Tensor) -> torch.Tensor:
        """States of these sequences among those of all [S, H, ...]."""
        return states[self.sequence : self.sequence + self.count]

    def states(self, initial: torch.Tensor | None, sizes: tuple[int, ...]) -> torch.Tensor:
        """A copy of the states of these sequences, or zeros, by lane: [count H, ...], fp32.

        sizes: (H, ...) of a state.
        """
        if initial is not None:
            return self.of_sequences(initial).flatten(0, 1).clone()
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


class Recurrence:
    """A recurrence over rows; a subclass has its formulas.  Between chunks its state is fp32.

    chunk: Rows between the states that are saved.
    step: Rows between those that `Last` may take.
    sizes: operands -> (H, ...) of a state.
    rows: (operands, chunk) -> a tuple of its rows by lane, [rows, lanes, ...] in fp64, or None.
    results: (rows, the state before) -> (out [rows, lanes, ...], states [rows + 1, lanes, ...]).
    gradients: (rows, the state before, the gradient of out, that of the state after) -> those of
        rows by lane, and of the state before.
    """

    chunk: int
    step: int
    sizes: Callable[..., tuple[int, ...]]
    rows: Callable[..., NamedTuple]
    results: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gradients: Callable[..., tuple[torch.Tensor | None, ...]]

    def forward(
        self,
        operands: DeltaRule | StateSpace,
        sequences: Sequences,
        out: torch.Tensor,
        last: Last | None,
        saved: DeltaSaved | StateSpaceSaved,
    ) -> None:
        """Write out, 0 for rows of no sequence, the last states, and those before each chunk."""
        out.zero_()
        saved.states.zero_()
        with ieee():
            for group in groups(sequences, self.chunk):
                state = group.states(operands.initial, self.sizes(operands))
                taken, end = state.clone(), group.row_of_last(last, self.step)
                for chunk in group.chunks():
                    chunk.states_of(saved.states)[:] = group.by_sequence(state)
                    rows, parts = self.rows(operands, chunk), []
                    for lanes in _lanes(chunk, state):
                        part, states = self.results(_part(rows, lanes), state[lanes])
                        state[lanes] = states[-1]
                        if chunk.start < end <= chunk.end:
                            taken[lanes] = states[end - chunk.start]
                        parts.append(part)
                    chunk.write(out, torch.cat(parts, 1))
                if last is not None:
                    group.of_sequences(last.states)[:] = group.by_sequence(taken)

    def backward(
        self,
        d_out: torch.Tensor,
        d_final: torch.Tensor | None,
        operands: DeltaRule | StateSpace,
        sequences: Sequences,
        saved: DeltaSaved | StateSpaceSaved,
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Write gradients, the last of ``initial``; those of rows of no sequence are 0."""
        *of_rows, of_initial = gradients
        for gradient in of_rows:
            if gradient is not None:
                gradient.zero_()
        with ieee():
            for group in groups(sequences, self.chunk):
                slope = group.states(d_final, self.sizes(operands))
                for chunk in reversed(list(group.chunks())):
                    rows, states = (
                        self.rows(operands, chunk),
                        chunk.states_of(saved.states).flatten(0, 1),
                    )
                    slopes, parts = to_lanes(chunk.read(d_out)), []
                    for lanes in _lanes(chunk, slope):
                        *part, slope[lanes] = self.gradients(
                            _part(rows, lanes), states[lanes], slopes[:, lanes], slope[lanes]
                        )
                        parts.append(part)
                    for gradient, pieces in zip(of_rows, zip(*parts, strict=True), strict=True):
                        if gradient is not None:
                            chunk.write(gradient, torch.cat(pieces, 1))
                if of_initial is not None:
                    group.of_sequences(of_initial)[:] = group.by_sequence(slope)


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


def _part(rows: NamedTuple, lanes: slice) -> NamedTuple:
    return type(rows)(*(None if t is None else t[:, lanes] for t in rows))


def _lanes(chunk: Chunk, state: torch.Tensor) -> Iterator[slice]:
    """Lanes that are computed at once, of states [lanes, ...]."""
    step = max(1, AT_ONCE // ((chunk.end - chunk.start) * state[0].numel()))
    return (slice(i, i + step) for i in range(0, len(state), step))
