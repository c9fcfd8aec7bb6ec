"""The gated delta rule in the order of its GPU kernels, by the model of Hopper's tensor cores."""

from __future__ import annotations

import torch

from cute_kernels.cpu import elementary
from perf.probes.truncation import chain

CHUNK, BLOCK = 64, 16
BF16 = torch.bfloat16


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a b + c of fp32 numbers, rounded once: fp64 holds the product."""
    return (a.double() * b.double() + c.double()).float()


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [T, V] bf16, last state [K, V] fp32) of one sequence and head.

    q, k [T, K] and v [T, V] bf16, g and beta [T] fp32, state fp32.  Exact where 2^G is: where g
    is a whole number in log2 units.
    """
    outs = []
    for start in range(0, len(q), CHUNK):
        rows = slice(start, start + CHUNK)
        out, state = _chunk(q[rows], k[rows], v[rows], g[rows], beta[rows].float(), state, scale)
        outs.append(out)
    return torch.cat(outs), state


def _chunk(q, k, v, g, beta, state, scale):
    count = len(q)
    blocks = [slice(b, b + BLOCK) for b in range(0, CHUNK, BLOCK)]
    q, k, v = (torch.nn.functional.pad(t, (0, 0, 0, CHUNK - count)) for t in (q, k, v))
    g, beta = (torch.nn.functional.pad(t, (0, CHUNK - count)) for t in (g, beta))
    decay = g.new_empty(CHUNK)
    total = g.new_zeros(())
    for i, step in enumerate(g * torch.tensor(elementary.LOG2E_FP32[0], dtype=torch.float32)):
        total = decay[i] = total + step
    grown, i = decay.exp2()[:, None], torch.arange(CHUNK)
    weight = (decay[:, None] - decay).exp2()
    high = _upper_plane(state).mT.contiguous()  # [V, K]
    lower = torch.where(i[:, None] > i, beta[:, None] * chain(k, k) * weight, 0.0)
    rest = beta[:, None] * fma(-grown, chain(k, high), v.float())
    u = torch.zeros_like(v)
    for b, own in enumerate(blocks):
        acc = rest[own]
        for other in blocks[:b]:
            acc = chain(-lower[own, other].to(BF16), u[other].mT.contiguous(), acc)
        h = (acc + 0.0).to(BF16)
        u[own] = (chain(_inverse(lower[own, own]).to(BF16), h.mT.contiguous()) + 0.0).to(BF16)
    u[count:] = 0
    columns = u.mT.contiguous()
    p = torch.where(i[:, None] >= i, chain(q, k) * (weight * scale), 0.0).to(BF16)
    out = chain(p, columns, chain(q, high) * (grown * scale)) + 0.0
    last = decay[count - 1]
    weighted = (k.float() * (last - decay).exp2()[:, None]).to(BF16)
    weighted[count:] = 0
    update = chain(weighted.mT.contiguous(), columns) + 0.0
    return out[:count].to(BF16), fma(last.exp2(), state, update)


def _upper_plane(state: torch.Tensor) -> torch.Tensor:
    bits = (state.view(torch.int32) + 0x8000) >> 16
    return bits.to(torch.int16).view(BF16)


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    """(I + L)⁻¹ by forward substitution."""
    t = torch.eye(BLOCK)
    for i in range(BLOCK):
        for m in range(i):
            t[i] = fma(-lower[i, m], t[m], t[i])
    return t
