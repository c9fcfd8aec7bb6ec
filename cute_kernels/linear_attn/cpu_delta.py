"""CPU backend of the gated delta rule: the recurrence itself, row by row, fp64 inside.

    S ← e^g S,  u = beta (v - Sᵀ k),  S ← S + k uᵀ,  o = scale Sᵀ q

In Kimi delta attention each row of S [K, V] has a decay of its own.

Every operation is elementwise and IEEE's; sums over K and V are halving trees.  So no bit depends
on threads, on other heads or sequences, or on how many of them are computed at once.  S, and its
gradient in the backward, are rounded to fp32 where a chunk of 64 rows of a sequence ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..cpu import elementary
from ..cpu.ieee import halves
from .config import DELTA_CHUNK
from .cpu_chunks import Chunk, Recurrence, to_lanes
from .tensors import DeltaRule, Sequences


def delta_rule(operands: DeltaRule, sequences: Sequences, scale: float, *results) -> None:
    """Write o to out [N, HV, V], and the last states: `Recurrence.forward`."""
    _DeltaRule(scale).forward(operands, sequences, *results)


def delta_rule_backward(d_out, d_final, operands, sequences, scale, saved, gradients) -> None:
    """Write the gradients of `delta_rule`: `Recurrence.backward`."""
    _DeltaRule(scale).backward(d_out, d_final, operands, sequences, saved, gradients)


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


@dataclass(frozen=True)
class _DeltaRule(Recurrence):
    scale: float
    chunk = step = DELTA_CHUNK

    def sizes(self, operands: DeltaRule) -> tuple[int, int, int]:
        return operands.v.shape[1], operands.k.shape[2], operands.v.shape[2]

    def rows(self, operands: DeltaRule, chunk: Chunk) -> _Rows:
        q, k, v, g, beta = (chunk.read(t) for t in operands[:5])
        times = v.shape[2] // k.shape[2]
        q, k = (t.repeat_interleave(times, 2) for t in (q, k))
        q, k, v, g, beta = map(to_lanes, (q, k, v, g, beta))
        return _Rows(q, k, v, elementary.exp(g).view(*v.shape[:2], -1, 1), beta)

    def results(self, rows: _Rows, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states, _ = _recurrence(rows, before)
        return halves(states[1:] * rows.q[..., None], 2) * self.scale, states

    def gradients(
        self, rows: _Rows, before: torch.Tensor, slopes: torch.Tensor, slope: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of q, k, v, g, beta by lane, and of the state before the chunk."""
        states, residuals = _recurrence(rows, before)
        # A = dS + scale q doᵀ after row t;  d(residual) = beta Aᵀ k;  dS ← e^g (A - k d(residual)ᵀ)
        after, decayed = torch.empty_like(states[1:]), torch.empty_like(states[1:])
        d_u, d_residuals = torch.empty_like(residuals), torch.empty_like(residuals)
        reads, columns = (rows.q * self.scale)[..., None], rows.k[..., None]
        decays, betas = rows.decay, rows.beta[..., None]
        slope = slope.double()
        for t in reversed(range(len(reads))):
            torch.add(slope, reads[t] * slopes[t][:, None], out=after[t])
            d_u[t] = halves(after[t] * columns[t], 1)
            torch.mul(betas[t], d_u[t], out=d_residuals[t])
            torch.sub(after[t], columns[t] * d_residuals[t][:, None], out=decayed[t])
            slope = decayed[t] * decays[t]
        u, read = betas * residuals, states[:-1] * decays
        d_q = halves(states[1:] * slopes[:, :, None], 3) * self.scale
        d_k = halves(after * u[:, :, None] - read * d_residuals[:, :, None], 3)
        d_g = halves(decayed * read, 3)
        if decays.shape[2] == 1:
            d_g = halves(d_g, 2)
        return d_q, d_k, d_residuals, d_g, halves(d_u * residuals, 2), slope


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
