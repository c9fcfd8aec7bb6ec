"""CPU backend of the state space scans: the recurrence itself, row by row, fp64 inside.

    dt' = clamp(softplus(dt + dt_bias)),  S ← e^(A dt') S + dt' x Bᵀ,  y = S C + D x,  y silu(z)

As in cpu_delta.py every operation is elementwise and IEEE's.  Mamba-2 (`ssd_scan`): sums over P and
N are halving trees, and S [P, N] and its gradient are rounded to fp32 where a chunk of 128 rows of
a sequence ends.  Mamba-1 (`selective_scan`): a channel is a head of P = 1, with an A for each n;
sums over N are chains, n ascending, and S and its gradient are rounded to fp32 after each row.
Sums over rows, those of the gradients of A, D and dt_bias, are chains of a chunk's rows, ascending.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..cpu import elementary
from ..cpu.ieee import halves, ieee
from .config import SELECTIVE_CHUNK, SOFTPLUS_LINEAR, SSD_CHUNK
from .cpu import add_chunks
from .cpu_chunks import Chunk, Recurrence, to_lanes
from .tensors import Last, Sequences, StateSpace, StateSpaceSaved, StepOptions


def ssd_scan(operands: StateSpace, sequences: Sequences, options: StepOptions, *results) -> None:
    """Write y to out [N, H, P], and the last states: `Recurrence.forward`."""
    _Ssd(options).forward(operands, sequences, *results)


def ssd_scan_backward(d_out, d_final, operands, sequences, options, saved, gradients) -> None:
    """Make the gradients of `ssd_scan`: `Recurrence.backward`."""
    _Ssd(options).backward(d_out, d_final, operands, sequences, saved, gradients)


def selective_scan(
    operands: StateSpace,
    sequences: Sequences,
    options: StepOptions,
    out: torch.Tensor,
    last: Last | None,
    saved: StateSpaceSaved,
) -> None:
    """Write y to out [N, D], and the last states: `Recurrence.forward`."""
    results = out.unsqueeze(2), last and _as_heads(last), _as_heads(saved)
    _Selective(options).forward(_as_heads(operands), sequences, *results)


def selective_scan_backward(d_out, d_final, operands, sequences, options, saved, gradients) -> None:
    """Make the gradients of `selective_scan`: `Recurrence.backward`."""
    slopes = d_out.unsqueeze(2), None if d_final is None else d_final.unsqueeze(2)
    others = _as_heads(operands), sequences, _as_heads(saved), _as_heads(gradients)
    _Selective(options).backward(*slopes, *others)


def _as_heads(of_channels: NamedTuple):
    """A tuple of operands, results or gradients whose channels are heads of P = 1: views."""
    views = {
        name: t.unsqueeze(2)
        for name, t in of_channels._asdict().items()
        if name in ("x", "z", "initial", "states") and t is not None
    }
    return of_channels._replace(**views)


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


@dataclass(frozen=True)
class _Ssd(Recurrence):
    """Mamba-2's scan: an A of a head."""

    options: StepOptions
    chunk = step = SSD_CHUNK
    by_state = False

    def round(self, state: torch.Tensor) -> torch.Tensor:
        return state

    def over_state(self, t: torch.Tensor) -> torch.Tensor:
        """Σ over the last dimension, n."""
        return halves(t, t.dim() - 1)

    def sizes(self, operands: StateSpace) -> tuple[int, int, int]:
        return *operands.x.shape[1:], operands.B.shape[2]

    def rows(self, operands: StateSpace, chunk: Chunk) -> _Rows:
        options, count = self.options, chunk.group.count
        x, dt, B, C, z = (
            None if t is None else chunk.read(t)
            for t in (operands.x, operands.dt, operands.B, operands.C, operands.z)
        )
        times = x.shape[2] // B.shape[2]
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

    def results(self, rows: _Rows, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.states(rows, before)
        return _gated(rows, self.ungated(rows, states)), states

    def states(self, rows: _Rows, before: torch.Tensor) -> torch.Tensor:
        """States [rows + 1, lanes, P, N] before and after each row."""
        states = before.new_empty(len(rows.x) + 1, *before.shape, dtype=torch.float64)
        states[0] = before
        torch.mul((rows.x * rows.step[..., None])[..., None], rows.B[:, :, None], out=states[1:])
        for t, decay in enumerate(rows.decay[:, :, None]):
            states[t + 1] += states[t] * decay
            states[t + 1] = self.round(states[t + 1])
        return states

    def ungated(self, rows: _Rows, states: torch.Tensor) -> torch.Tensor:
        """S C + D x: [rows, lanes, P]."""
        y = self.over_state(states[1:] * rows.C[:, :, None])
        return y if rows.D is None else y + rows.D * rows.x

    def gradients(
        self, rows: _Rows, before: torch.Tensor, slopes: torch.Tensor, slope: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, dt, B, C, z, terms of those of A, dt_bias, D, and that of the state."""
        states = self.states(rows, before)
        d_z = None
        if rows.z is not None:
            d_z = slopes * self.ungated(rows, states) * elementary.derivative("silu", rows.z)
            slopes = _gated(rows, slopes)
        # A_t = dS + dy Cᵀ after row t;  dS ← e^(A dt') A_t
        after = slopes[..., None] * rows.C[:, :, None]
        slope = slope.double()
        for t in reversed(range(len(after))):
            after[t] += slope
            slope = self.round(after[t] * rows.decay[t, :, None])
        read = self.over_state(after * rows.B[:, :, None])
        d_x = read * rows.step[..., None]
        # Of A dt': [rows, lanes, N or 1]
        d_decay = after * states[:-1]
        if not self.by_state:
            d_decay = halves(d_decay, 3)[..., None]
        d_decay = halves(d_decay, 2) * rows.decay
        d_step = halves(read * rows.x, 2) + self.over_state(rows.A * d_decay)
        # Steps beyond the limits have none, of one sign.
        d_dt = torch.where(rows.opening == 0.0, 0.0, d_step * rows.opening)
        d_B = halves(after * (rows.x * rows.step[..., None])[..., None], 2)
        d_C = halves(states[1:] * slopes[..., None], 2)
        d_D = None
        if rows.D is not None:
            d_x, d_D = d_x + rows.D * slopes, slopes * rows.x
        d_A = d_decay * rows.step[..., None]
        d_A = d_A if self.by_state else d_A[..., 0]
        return d_x, d_dt, d_B, d_C, d_z, d_A, d_dt, d_D, slope

    def backward(self, d_out, d_final, operands, sequences, saved, gradients) -> None:
        """Write gradients of rows, and add those of A, dt_bias and D."""
        # Their terms by row; D has one a channel.
        of_A, of_bias, of_D = (
            d_out.new_empty(len(d_out), *shape, dtype=torch.float64)
            for shape in (operands.A.shape, d_out.shape[1:2], d_out.shape[1:])
        )
        of_D = None if gradients.D is None else of_D
        dx, d_dt, dB, dC, dz = (getattr(gradients, name) for name in ("x", "dt", "B", "C", "z"))
        written = dx, d_dt, dB, dC, dz, of_A, of_bias, of_D, gradients.initial
        super().backward(d_out, d_final, operands, sequences, saved, written)
        with ieee():
            if of_D is not None and gradients.D.dim() == 1:
                of_D = halves(of_D, 2)
            sums = (gradients.A, of_A), (gradients.dt_bias, of_bias), (gradients.D, of_D)
            for into, terms in sums:
                if into is not None:
                    for first, end in sequences.bounds():
                        add_chunks(into, terms[first:end], self.chunk)


@dataclass(frozen=True)
class _Selective(_Ssd):
    """Mamba-1's scan: an A for each n, sums over n ascend, and each row's S is rounded."""

    chunk, step, by_state = SELECTIVE_CHUNK, 1, True

    def round(self, state: torch.Tensor) -> torch.Tensor:
        return state.float().double()

    def over_state(self, t: torch.Tensor) -> torch.Tensor:
        return functools.reduce(torch.add, t.unbind(-1))


def _gated(rows: _Rows, y: torch.Tensor) -> torch.Tensor:
    return y if rows.z is None else y * elementary.value("silu", rows.z)
