"""CPU backend of the gated delta rule: the recurrence itself, row by row, fp64 inside.

    S ← e^g S,  u = beta (v - Sᵀ k),  S ← S + k uᵀ,  o = scale Sᵀ q

Every operation is elementwise and IEEE's; sums over K and V are halving trees.  So no bit depends
on threads, on other heads or sequences, or on how many of them are computed at once.  S, and its
gradient in the backward, are rounded to fp32 where a chunk of 64 rows of a sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..cpu import elementary
from ..cpu.ieee import halves, ieee
from .config import DELTA_CHUNK
from .tensors import DeltaGradients, DeltaRule, DeltaSaved, Sequences

#: Numbers of the states of a chunk's rows that are computed at once; no bit depends on it.
_AT_ONCE = 1 << 20


def delta_rule(
    operands: DeltaRule,
    sequences: Sequences,
    scale: float,
    out: torch.Tensor,
    final: torch.Tensor | None,
    saved: DeltaSaved,
) -> None:
    """Write o to out [N, HV, V], 0 for rows of no sequence, and the last states to ``final``."""
    out.zero_()
    saved.states.zero_()
    with ieee():
        for group in _groups(sequences):
            state = group.states(operands.initial, operands)
            for chunk in group.chunks():
                chunk.states_of(saved)[:] = group.by_sequence(state)
                rows = _rows(operands, chunk)
                results = torch.empty_like(rows.v)
                for lanes in _lanes(rows):
                    some = rows.of(lanes)
                    states, _ = _recurrence(some, state[lanes])
                    results[:, lanes] = halves(states[1:] * some.q[..., None], 2) * scale
                    state[lanes] = states[-1]
                chunk.write(out, results)
            if final is not None:
                group.of_sequences(final)[:] = group.by_sequence(state)


def delta_rule_backward(
    d_out: torch.Tensor,
    d_final: torch.Tensor | None,
    operands: DeltaRule,
    sequences: Sequences,
    scale: float,
    saved: DeltaSaved,
    gradients: DeltaGradients,
) -> None:
    """Write the gradients of `delta_rule`; those of rows of no sequence are 0."""
    *of_rows, of_initial = gradients
    for gradient in of_rows:
        if gradient is not None:
            gradient.zero_()
    with ieee():
        for group in _groups(sequences):
            slope = group.states(d_final, operands)
            for chunk in reversed(list(group.chunks())):
                rows, states = _rows(operands, chunk), chunk.states_of(saved).flatten(0, 1)
                slopes = _to_lanes(chunk.read(d_out))
                parts = []
                for lanes in _lanes(rows):
                    some = rows.of(lanes)
                    *part, slope[lanes] = _gradients(
                        some, states[lanes], slopes[:, lanes], slope[lanes], scale
                    )
                    parts.append(part)
                for gradient, pieces in zip(of_rows, zip(*parts, strict=True), strict=True):
                    if gradient is not None:
                        chunk.write(gradient, torch.cat(pieces, 1))
            if of_initial is not None:
                group.of_sequences(of_initial)[:] = group.by_sequence(slope)


# ---- rows of sequences ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Consecutive sequences of one length, whose rows are computed at once.

    sequence, first, slot: The first one's number, first row and slot of its first chunk.
    """

    sequence: int
    count: int
    length: int
    first: int
    slot: int

    def chunks(self) -> Iterator[_Chunk]:
        for start in range(0, self.length, DELTA_CHUNK):
            yield _Chunk(self, start, min(start + DELTA_CHUNK, self.length))

    def of_sequences(self, states: torch.Tensor) -> torch.Tensor:
        """States of these sequences among those of all [S, HV, K, V]."""
        return states[self.sequence : self.sequence + self.count]

    def states(self, given: torch.Tensor | None, operands: DeltaRule) -> torch.Tensor:
        """A copy of the states of these sequences, or zeros, by lane: [count HV, K, V], fp32."""
        if given is not None:
            return self.of_sequences(given).flatten(0, 1).clone()
        sizes = self.count * operands.v.shape[1], operands.k.shape[2], operands.v.shape[2]
        return torch.zeros(sizes, dtype=torch.float32, device="cpu")

    def by_sequence(self, state: torch.Tensor) -> torch.Tensor:
        return state.unflatten(0, (self.count, -1))


@dataclass(frozen=True)
class _Chunk:
    """Rows from ``start`` up to ``end`` of each sequence of a group."""

    group: _Group
    start: int
    end: int

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """These among all rows [N, H, ...]: a view [rows, count, H, ...]."""
        first, sizes = self.group.first, (self.group.count, self.group.length)
        rows = rows[first : first + sizes[0] * sizes[1]].unflatten(0, sizes)
        return rows[:, self.start : self.end].swapdims(0, 1)

    def write(self, rows: torch.Tensor, lanes: torch.Tensor) -> None:
        """Round what is computed by lane [rows, count HV, ...] to all rows [N, H, ...].

        Of k heads: the sum of the v heads that each one serves, ascending.
        """
        target = self.read(rows)
        heads = lanes.unflatten(1, (self.group.count, target.shape[2], -1)).unbind(3)
        total = heads[0]
        for head in heads[1:]:
            total = total + head
        target[:] = total

    def states_of(self, saved: DeltaSaved) -> torch.Tensor:
        """The saved states before this chunk: a view [count, HV, K, V]."""
        chunks = -(-self.group.length // DELTA_CHUNK)
        first = self.group.slot + self.start // DELTA_CHUNK
        return saved.states[first::chunks][: self.group.count]


def _groups(sequences: Sequences) -> Iterator[_Group]:
    """All of a batch, or each sequence of a pack."""
    if sequences.offsets is None:
        yield _Group(0, sequences.count, sequences.length, 0, 0)
        return
    for s, (first, end) in enumerate(sequences.bounds()):
        yield _Group(s, 1, end - first, first, first // DELTA_CHUNK + s)


class _Rows(NamedTuple):
    """Rows of a chunk by lane, a v head of a sequence, in fp64.

    q, k: [rows, lanes, K].  v: [rows, lanes, V].  decay, beta: [rows, lanes].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    def of(self, lanes: slice) -> _Rows:
        return _Rows(*(t[:, lanes] for t in self))


def _rows(operands: DeltaRule, chunk: _Chunk) -> _Rows:
    q, k, v, g, beta = (chunk.read(t) for t in operands[:5])
    times = v.shape[2] // k.shape[2]
    q, k = (t.repeat_interleave(times, 2) for t in (q, k))
    q, k, v, g, beta = map(_to_lanes, (q, k, v, g, beta))
    return _Rows(q, k, v, elementary.exp(g), beta)


def _to_lanes(rows: torch.Tensor) -> torch.Tensor:
    return rows.flatten(1, 2).double()


def _lanes(rows: _Rows) -> Iterator[slice]:
    """Lanes that are computed at once."""
    count, lanes, size = rows.k.shape
    step = max(1, _AT_ONCE // (count * size * rows.v.shape[2]))
    return (slice(i, i + step) for i in range(0, lanes, step))


# ---- the recurrence ------------------------------------------------------------------------------


def _recurrence(rows: _Rows, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [rows + 1, lanes, K, V] before and after each row, and v - Sᵀ k [rows, lanes, V]."""
    states = before.new_empty(len(rows.k) + 1, *before.shape, dtype=torch.float64)
    states[0] = before
    residuals = torch.empty_like(rows.v)
    columns, decays, betas = rows.k[..., None], rows.decay[..., None, None], rows.beta[..., None]
    for t, (k, v, decay, beta) in enumerate(zip(columns, rows.v, decays, betas, strict=True)):
        state = torch.mul(states[t], decay, out=states[t + 1])
        torch.sub(v, halves(state * k, 1), out=residuals[t])
        state += k * (beta * residuals[t])[:, None]
    return states, residuals


def _gradients(
    rows: _Rows, before: torch.Tensor, slopes: torch.Tensor, slope: torch.Tensor, scale: float
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v, g, beta by lane, and of the state before the chunk.

    slopes: Gradient of o [rows, lanes, V].  slope: Gradient of the state behind the chunk.
    """
    states, residuals = _recurrence(rows, before)
    # A = dS + scale q doᵀ after row t;  d(residual) = beta Aᵀ k;  dS ← e^g (A - k d(residual)ᵀ)
    after, decayed = torch.empty_like(states[1:]), torch.empty_like(states[1:])
    d_u, d_residuals = torch.empty_like(residuals), torch.empty_like(residuals)
    reads, columns = (rows.q * scale)[..., None], rows.k[..., None]
    decays, betas = rows.decay[..., None, None], rows.beta[..., None]
    slope = slope.double()
    for t in reversed(range(len(reads))):
        torch.add(slope, reads[t] * slopes[t][:, None], out=after[t])
        d_u[t] = halves(after[t] * columns[t], 1)
        torch.mul(betas[t], d_u[t], out=d_residuals[t])
        torch.sub(after[t], columns[t] * d_residuals[t][:, None], out=decayed[t])
        slope = decayed[t] * decays[t]
    u, read = betas * residuals, states[:-1] * decays
    d_q = halves(states[1:] * slopes[:, :, None], 3) * scale
    d_k = halves(after * u[:, :, None] - read * d_residuals[:, :, None], 3)
    d_g = halves(halves(decayed * read, 3), 2)
    return d_q, d_k, d_residuals, d_g, halves(d_u * residuals, 2), slope
