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
    q, k, v = (torch.nn.functional.pad(t, (0, 0, 0, CHUNK - count)) for t in (q, k, v))
    g, beta = (torch.nn.functional.pad(t, (0, CHUNK - count)) for t in (g, beta))
    log2e = torch.tensor(elementary.LOG2E_FP32[0], dtype=torch.float32)
    steps = torch.ones(CHUNK, CHUNK).tril() * (g * log2e)
    while steps.shape[1] > 1:
        steps = steps[:, ::2] + steps[:, 1::2]
    decay = steps[:, 0]
    grown, i = decay.exp2()[:, None], torch.arange(CHUNK)
    weight = (decay[:, None] - decay).exp2()
    high = upper_plane(state).mT.contiguous()  # [V, K]
    lower = torch.where(i[:, None] > i, beta[:, None] * chain(k, k) * weight, 0.0)
    rest = beta[:, None] * fma(-grown, chain(k, high), v.float())
    r = (rest + 0.0).to(BF16)
    r[count:] = 0
    u = (chain(_inverse(lower).to(BF16), r.mT.contiguous()) + 0.0).to(BF16)
    u[count:] = 0
    columns = u.mT.contiguous()
    p = torch.where(i[:, None] >= i, chain(q, k) * (weight * scale), 0.0).to(BF16)
    out = chain(p, columns, chain(q, high) * (grown * scale)) + 0.0
    last = decay[count - 1]
    weighted = (k.float() * (last - decay).exp2()[:, None]).to(BF16)
    weighted[count:] = 0
    update = chain(weighted.mT.contiguous(), columns) + 0.0
    return out[:count].to(BF16), fma(last.exp2(), state, update)


def upper_plane(state: torch.Tensor) -> torch.Tensor:
    bits = (state.view(torch.int32) + 0x8000) >> 16
    return bits.to(torch.int16).view(BF16)


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    """(I + L)⁻¹: blocks of 16 rows by forward substitution, then pairs of blocks."""
    t, block = torch.eye(CHUNK), torch.arange(CHUNK) // BLOCK
    for i in range(CHUNK):
        for m in range(i // BLOCK * BLOCK, i):
            t[i] = fma(-lower[i, m], t[m], t[i])
    while block.max() > 0:
        between = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
        right = _product(torch.where(between, lower, 0.0), t, torch.zeros_like(t))
        t, block = _product(t, -right, t), block // 2
    return t + 0.0


def _product(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    """acc + a b of operands in two bf16 terms, small products first."""
    (a_high, a_low), (b_high, b_low) = _terms(a), _terms(b.mT.contiguous())
    acc = chain(a_low, b_high, acc)
    return chain(a_high, b_high, chain(a_high, b_low, acc))


def _terms(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = x.to(BF16)
    return high, (x - high.float()).to(BF16)
