"""CPU backend of the state space scans: the recurrence itself, row by row, fp64 inside.

    dt' = clamp(softplus(dt + dt_bias)),  S ← e^(A dt') S + dt' x Bᵀ,  y = S C + D x,  y silu(z)

As in cpu_delta.py every operation is elementwise and IEEE's.  Mamba-2 (`ssd_scan`): sums over P and
N are halving trees, and S [P, N] and its gradient are rounded to fp32 where a chunk of 128 rows of
a sequence ends.  Mamba-1 (`selective_scan`): a channel is a head of P = 1, with an A for each n;
sums over N are chains, n ascending, and S and its gradient are rounded to fp32 behind each row.
Sums over rows, those of the gradients of A, D and dt_bias, are chains of a chunk's rows, ascending.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..cpu import elementary
from ..cpu.ieee import halves, ieee
from .config import SELECTIVE_CHUNK, SOFTPLUS_LINEAR, SSD_CHUNK
from .cpu import add_chunks
from .cpu_chunks import Chunk, groups, lanes_at_once, to_lanes
from .tensors import Last, Sequences, StateSpace, StateSpaceGradients, StateSpaceSaved, StepOptions


class Rule(NamedTuple):
    """Order of a scan.

    chunk: Rows between the states that are saved, and of a part of a sum over rows.
    each_row: Whether S is rounded behind each row, and n ascends in sums.
    """

    chunk: int
    each_row: bool

    def round(self, state: torch.Tensor) -> torch.Tensor:
        return state.float().double() if self.each_row else state

    def over_state(self, t: torch.Tensor) -> torch.Tensor:
        """Σ over the last dimension, n."""
        if self.each_row:
            return functools.reduce(torch.add, t.unbind(-1))
        return halves(t, t.dim() - 1)


_SSD, _SELECTIVE = Rule(SSD_CHUNK, each_row=False), Rule(SELECTIVE_CHUNK, each_row=True)


def ssd_scan(
    operands: StateSpace,
    sequences: Sequences,
    options: StepOptions,
    out: torch.Tensor,
    last: Last | None,
    saved: StateSpaceSaved,
    rule: Rule = _SSD,
) -> None:
    """Write y to out [N, H, P], 0 for rows of no sequence, and the last states."""
    out.zero_()
    saved.states.zero_()
    with ieee():
        for group in groups(sequences, rule.chunk):
            state = group.states(operands.initial, _sizes(operands))
            taken = state.clone()
            behind = group.row_of_last(last, 1 if rule.each_row else rule.chunk)
            for chunk in group.chunks():
                chunk.states_of(saved.states)[:] = group.by_sequence(state)
                rows = _rows(operands, options, chunk)
                results = torch.empty_like(rows.x)
                for lanes in _lanes(rows):
                    some = rows.of(lanes)
                    states = _recurrence(rule, some, state[lanes])
                    results[:, lanes] = _gated(some, _ungated(rule, some, states))
                    state[lanes] = states[-1]
                    if chunk.start < behind <= chunk.end:
                        taken[lanes] = states[behind - chunk.start]
                chunk.write(out, results)
            if last is not None:
                group.of_sequences(last.states)[:] = group.by_sequence(taken)


def selective_scan(
    operands: StateSpace,
    sequences: Sequences,
    options: StepOptions,
    out: torch.Tensor,
    last: Last | None,
    saved: StateSpaceSaved,
) -> None:
    """Write y to out [N, D], 0 for rows of no sequence, and the last states."""
    last = None if last is None else last._replace(states=last.states.unsqueeze(2))
    saved = saved._replace(states=saved.states.unsqueeze(2))
    others = sequences, options, out.unsqueeze(2), last, saved
    ssd_scan(_as_heads(operands), *others, _SELECTIVE)


def selective_scan_backward(
    d_out: torch.Tensor,
    d_final: torch.Tensor | None,
    operands: StateSpace,
    sequences: Sequences,
    options: StepOptions,
    saved: StateSpaceSaved,
    gradients: StateSpaceGradients,
) -> None:
    """Make the gradients of `selective_scan`; those of rows of no sequence are 0."""
    d_final = None if d_final is None else d_final.unsqueeze(2)
    saved = saved._replace(states=saved.states.unsqueeze(2))
    others = sequences, options, saved, _as_heads(gradients)
    ssd_scan_backward(d_out.unsqueeze(2), d_final, _as_heads(operands), *others, _SELECTIVE)


def _as_heads(of_channels):
    """Operands or gradients whose channels are heads of P = 1: views."""
    names = ("x", "z", "initial")
    views = {n: t.unsqueeze(2) for n in names if (t := getattr(of_channels, n)) is not None}
    return of_channels._replace(**views)


def ssd_scan_backward(
    d_out: torch.Tensor,
    d_final: torch.Tensor | None,
    operands: StateSpace,
    sequences: Sequences,
    options: StepOptions,
    saved: StateSpaceSaved,
    gradients: StateSpaceGradients,
    rule: Rule = _SSD,
) -> None:
    """Make the gradients of `ssd_scan`; those of rows of no sequence are 0."""
    of_rows = gradients.x, gradients.dt, gradients.B, gradients.C, gradients.z
    for gradient in of_rows:
        if gradient is not None:
            gradient.zero_()
    # Terms of the gradients of A, dt_bias and D, by row; D has one a channel.
    heads, size, _ = _sizes(operands)
    with ieee():
        of_A, of_bias = (
            d_out.new_zeros(len(d_out), *shape, dtype=torch.float64)
            for shape in (operands.A.shape, (heads,))
        )
        of_D = (
            d_out.new_zeros(d_out.shape, dtype=torch.float64) if gradients.D is not None else None
        )
        for group in groups(sequences, rule.chunk):
            slope = group.states(d_final, (heads, size, operands.B.shape[2]))
            for chunk in reversed(list(group.chunks())):
                rows = _rows(operands, options, chunk)
                states = chunk.states_of(saved.states).flatten(0, 1)
                slopes = to_lanes(chunk.read(d_out))
                parts = []
                for lanes in _lanes(rows):
                    *part, slope[lanes] = _gradients(
                        rule, rows.of(lanes), states[lanes], slopes[:, lanes], slope[lanes]
                    )
                    parts.append(part)
                whole = [
                    None if p[0] is None else torch.cat(p, 1) for p in zip(*parts, strict=True)
                ]
                for gradient, of_lanes in zip((*of_rows, of_A, of_bias, of_D), whole, strict=True):
                    if gradient is not None:
                        chunk.write(gradient, of_lanes)
            if gradients.initial is not None:
                group.of_sequences(gradients.initial)[:] = group.by_sequence(slope)
        if of_D is not None and gradients.D.dim() == 1:
            of_D = halves(of_D, 2)
        for into, terms in ((gradients.A, of_A), (gradients.dt_bias, of_bias), (gradients.D, of_D)):
            if into is not None:
                for first, end in sequences.bounds():
                    add_chunks(into, terms[first:end], rule.chunk)


class _Rows(NamedTuple):
    """Rows of a chunk by lane, a head of a sequence, in fp64.

    x, z: [rows, lanes, P]; z may be None.  B, C: [rows, lanes, N].  step, opening: [rows, lanes]:
    dt', its derivative.  decay: [rows, lanes, N or 1]: e^(A dt').  A: [1, lanes, N or 1].  D: [1,
    lanes, P or 1], or None.
    """

    x: torch.Tensor
    z: torch.Tensor | None
    B: torch.Tensor
    C: torch.Tensor
    step: torch.Tensor
    opening: torch.Tensor
    decay: torch.Tensor
    A: torch.Tensor
    D: torch.Tensor | None

    def of(self, lanes: slice) -> _Rows:
        return _Rows(*(None if t is None else t[:, lanes] for t in self))


def _rows(operands: StateSpace, options: StepOptions, chunk: Chunk) -> _Rows:
    x, dt, B, C, z = (
        None if t is None else chunk.read(t)
        for t in (operands.x, operands.dt, operands.B, operands.C, operands.z)
    )
    times, count = x.shape[2] // B.shape[2], x.shape[1]
    B, C = (t.repeat_interleave(times, 2) for t in (B, C))
    if operands.dt_bias is not None:
        dt = dt.double() + operands.dt_bias.double()
    x, dt, B, C = map(to_lanes, (x, dt, B, C))
    step, opening = dt, torch.ones_like(dt)
    if options.softplus:
        linear = dt > SOFTPLUS_LINEAR
        step = torch.where(linear, dt, elementary.softplus(dt))
        opening = torch.where(linear, 1.0, elementary.value("sigmoid", dt))
    inside = (step >= options.low) & (step <= options.high)
    step, opening = step.clamp(options.low, options.high), torch.where(inside, opening, 0.0)
    A, D = (
        None if t is None else t.double().view(len(t), -1).repeat(count, 1)[None]
        for t in (operands.A, operands.D)
    )
    decay = elementary.exp(A * step[..., None])
    return _Rows(x, None if z is None else to_lanes(z), B, C, step, opening, decay, A, D)


def _lanes(rows: _Rows) -> Iterator[slice]:
    count, lanes, size = rows.x.shape
    return lanes_at_once(lanes, count * size * rows.B.shape[2])


def _sizes(operands: StateSpace) -> tuple[int, int, int]:
    """(H, P, N) of a state."""
    return *operands.x.shape[1:], operands.B.shape[2]


# ---- the recurrence ------------------------------------------------------------------------------


def _recurrence(rule: Rule, rows: _Rows, before: torch.Tensor) -> torch.Tensor:
    """States [rows + 1, lanes, P, N] before and after each row."""
    states = before.new_empty(len(rows.x) + 1, *before.shape, dtype=torch.float64)
    states[0] = before
    torch.mul((rows.x * rows.step[..., None])[..., None], rows.B[:, :, None], out=states[1:])
    for t, decay in enumerate(rows.decay[:, :, None]):
        states[t + 1] += states[t] * decay
        states[t + 1] = rule.round(states[t + 1])
    return states


def _ungated(rule: Rule, rows: _Rows, states: torch.Tensor) -> torch.Tensor:
    """S C + D x: [rows, lanes, P]."""
    y = rule.over_state(states[1:] * rows.C[:, :, None])
    return y if rows.D is None else y + rows.D * rows.x


def _gated(rows: _Rows, y: torch.Tensor) -> torch.Tensor:
    return y if rows.z is None else y * elementary.value("silu", rows.z)


def _gradients(
    rule: Rule, rows: _Rows, before: torch.Tensor, slopes: torch.Tensor, slope: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, dt, B, C, z by lane, terms of those of A, dt_bias, D, and that of the state.

    slopes: Gradient of out [rows, lanes, P].  slope: Gradient of the state behind the chunk.
    """
    states = _recurrence(rule, rows, before)
    d_z = None
    if rows.z is not None:
        d_z = slopes * _ungated(rule, rows, states) * elementary.derivative("silu", rows.z)
        slopes = _gated(rows, slopes)
    # A_t = dS + dy Cᵀ after row t;  dS ← e^(A dt') A_t
    after = slopes[..., None] * rows.C[:, :, None]
    slope = slope.double()
    for t in reversed(range(len(after))):
        after[t] += slope
        slope = rule.round(after[t] * rows.decay[t, :, None])
    read = rule.over_state(after * rows.B[:, :, None])
    d_x = read * rows.step[..., None]
    # Of A dt': [rows, lanes, N or 1]
    d_decay = after * states[:-1]
    if not rule.each_row:
        d_decay = halves(d_decay, 3)[..., None]
    d_decay = halves(d_decay, 2) * rows.decay
    d_step = halves(read * rows.x, 2) + rule.over_state(rows.A * d_decay)
    # Steps beyond the limits have none, of one sign.
    d_dt = torch.where(rows.opening == 0.0, 0.0, d_step * rows.opening)
    d_B = halves(after * (rows.x * rows.step[..., None])[..., None], 2)
    d_C = halves(states[1:] * slopes[..., None], 2)
    d_D = None
    if rows.D is not None:
        d_x, d_D = d_x + rows.D * slopes, slopes * rows.x
    d_A = d_decay * rows.step[..., None]
    d_A = d_A if rule.each_row else d_A[..., 0]
    return d_x, d_dt, d_B, d_C, d_z, d_A, d_dt, d_D, slope
