"""The state space scan in the order of its GPU kernels, by the model of Hopper's tensor cores."""

from __future__ import annotations

import torch

from cute_kernels.cpu import elementary
from perf.probes.truncation import chain
from tests.oracles.delta_chunks import BF16, fma

CHUNK = 128


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, P] fp32, last state [P, N] fp32) of one sequence and head.

    x [T, P], B and C [T, N] bf16; dt [T], A and D numbers, fp32; state fp32.  Exact where 2^G is:
    where log2(e) A dt is a whole number.
    """
    outs = []
    rate = A * torch.tensor(elementary.LOG2E_FP32[0], dtype=torch.float32)
    for start in range(0, len(x), CHUNK):
        rows = slice(start, start + CHUNK)
        out, state = _chunk(x[rows], dt[rows], rate, B[rows], C[rows], D, state)
        outs.append(out)
    return torch.cat(outs), state


def decays(dt: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """G of a chunk's rows."""
    decay, total = torch.zeros(CHUNK), torch.zeros(())
    for i, step in enumerate(dt):
        total = decay[i] = fma(rate, step, total)
    return decay


def padded(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t.new_zeros(CHUNK - len(t), *t.shape[1:])])


def _chunk(x, dt, rate, B, C, D, state):
    count, decay = len(x), decays(dt, rate)
    x, dt, B, C = map(padded, (x, dt, B, C))
    i = torch.arange(CHUNK)
    weight = (decay[:, None] - decay).exp2() * dt
    p = torch.where(i[:, None] >= i, chain(C, B) * weight, 0.0).to(BF16)
    high = state.to(BF16)
    columns = x.mT.contiguous()
    y = chain(p, columns, chain(C, high) * decay.exp2()[:, None]) + 0.0
    if D is not None:
        y = fma(D, x.float(), y)
    last = decay[count - 1]
    scaled = torch.where(i < count, (last - decay).exp2() * dt, 0.0)
    weighted = (B.float() * scaled[:, None]).to(BF16)
    update = chain(columns, weighted.mT.contiguous()) + 0.0
    return y[:count], fma(last.exp2(), state, update)
