"""CPU backend of the gated delta rule: the recurrence itself, row by row, fp64 inside.

    S ← e^g S,  u = beta (v - Sᵀ k),  S ← S + k uᵀ,  o = scale Sᵀ q

In Kimi delta attention each row of S [K, V] has a decay of its own.

Every operation is elementwise and IEEE's; sums over K and V are halving trees.  So no bit depends
on threads, on other heads or sequences, or on how many of them are computed at once.  S, and its
gradient in the backward, are rounded to fp32 where a chunk of 64 rows of a sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..cpu import elementary
from ..cpu.ieee import halves, ieee
from .config import DELTA_CHUNK
from .cpu_chunks import Chunk, groups, lanes_at_once, to_lanes
from .tensors import DeltaGradients, DeltaRule, DeltaSaved, Last, Sequences


def delta_rule(
    operands: DeltaRule,
    sequences: Sequences,
    scale: float,
    out: torch.Tensor,
    last: Last | None,
    saved: DeltaSaved,
) -> None:
    """Write o to out [N, HV, V], 0 for rows of no sequence, and the last states."""
    out.zero_()
    saved.states.zero_()
    with ieee():
        for group in groups(sequences, DELTA_CHUNK):
            state = group.states(operands.initial, _sizes(operands))
            group.store_last(last, state, 0)
            for chunk in group.chunks():
                chunk.states_of(saved.states)[:] = group.by_sequence(state)
                rows = _rows(operands, chunk)
                results = torch.empty_like(rows.v)
                for lanes in _lanes(rows):
                    some = rows.of(lanes)
                    states, _ = _recurrence(some, state[lanes])
                    results[:, lanes] = halves(states[1:] * some.q[..., None], 2) * scale
                    state[lanes] = states[-1]
                chunk.write(out, results)
                group.store_last(last, state, chunk.end)


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
        for group in groups(sequences, DELTA_CHUNK):
            slope = group.states(d_final, _sizes(operands))
            for chunk in reversed(list(group.chunks())):
                rows, states = _rows(operands, chunk), chunk.states_of(saved.states).flatten(0, 1)
                slopes = to_lanes(chunk.read(d_out))
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


class _Rows(NamedTuple):
    """Rows of a chunk by lane, a v head of a sequence, in fp64.

    q, k: [rows, lanes, K].  v: [rows, lanes, V].  decay: [rows, lanes, K or 1, 1].
    beta: [rows, lanes].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    def of(self, lanes: slice) -> _Rows:
        return _Rows(*(t[:, lanes] for t in self))


def _rows(operands: DeltaRule, chunk: Chunk) -> _Rows:
    q, k, v, g, beta = (chunk.read(t) for t in operands[:5])
    times = v.shape[2] // k.shape[2]
    q, k = (t.repeat_interleave(times, 2) for t in (q, k))
    q, k, v, g, beta = map(to_lanes, (q, k, v, g, beta))
    return _Rows(q, k, v, elementary.exp(g).view(*v.shape[:2], -1, 1), beta)


def _lanes(rows: _Rows) -> Iterator[slice]:
    return lanes_at_once(rows.k.shape[1], len(rows.k) * rows.k.shape[2] * rows.v.shape[2])


def _sizes(operands: DeltaRule) -> tuple[int, int, int]:
    """(HV, K, V) of a state."""
    return operands.v.shape[1], operands.k.shape[2], operands.v.shape[2]


# ---- the recurrence ------------------------------------------------------------------------------


def _recurrence(rows: _Rows, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [rows + 1, lanes, K, V] before and after each row, and v - Sᵀ k [rows, lanes, V]."""
    states = before.new_empty(len(rows.k) + 1, *before.shape, dtype=torch.float64)
    states[0] = before
    residuals = torch.empty_like(rows.v)
    columns, betas = rows.k[..., None], rows.beta[..., None]
    for t, (k, v, decay, beta) in enumerate(zip(columns, rows.v, rows.decay, betas, strict=True)):
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
    decays, betas = rows.decay, rows.beta[..., None]
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
    d_g = halves(decayed * read, 3)
    if decays.shape[2] == 1:
        d_g = halves(d_g, 2)
    return d_q, d_k, d_residuals, d_g, halves(d_u * residuals, 2), slope
