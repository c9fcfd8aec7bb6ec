"""The gated delta rule in the order of its GPU kernels, by the model of Hopper's tensor cores."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.cpu import elementary
from perf.probes.truncation import chain

CHUNK, BLOCK = 64, 16
BF16 = torch.bfloat16


def fma(a: torch.Tensor | float, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a b + c of fp32 numbers, rounded once: fp64 holds the product."""
    return (torch.as_tensor(a).double() * b.double() + c.double()).float()


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

    q, k [T, K] and v [T, V] bf16, g [T] or [T, K] and beta [T] fp32, state fp32.  Exact where 2^G
    is: where g is a whole number in log2 units.
    """
    outs = []
    for start in range(0, len(q), CHUNK):
        rows = slice(start, start + CHUNK)
        out, state = _chunk(q[rows], k[rows], v[rows], g[rows], beta[rows].float(), state, scale)
        outs.append(out)
    return torch.cat(outs), state


class Inside(NamedTuple):
    """What rows of a chunk make of the state.

    lower, p: L and P [64, 64], before their rounding.  q, k: Rows that read the state.  read,
    kept: Factors of what is read with q, and with k.  weighted, to_end: Rows that update it, and
    factors of u then.  whole: G_C.
    """

    lower: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    read: torch.Tensor | float
    kept: torch.Tensor | float
    weighted: torch.Tensor
    to_end: torch.Tensor | float
    whole: torch.Tensor


def of_heads(q, k, g, beta, scale, count) -> Inside:
    """One gate [64] of a head."""
    steps = torch.ones(CHUNK, CHUNK).tril() * g
    while steps.shape[1] > 1:
        steps = steps[:, ::2] + steps[:, 1::2]
    decay = steps[:, 0]
    grown, last = decay.exp2()[:, None], decay[count - 1]
    weight = (decay[:, None] - decay).exp2()
    lower = beta[:, None] * chain(k, k) * weight
    p = chain(q, k) * (weight * scale)
    to_end = (last - decay).exp2()[:, None]
    return Inside(lower, p, q, k, grown * scale, grown, k.clone(), to_end, last)


def running_sums(rows: torch.Tensor) -> torch.Tensor:
    """Sums of the rows up to each, one added after the other."""
    out, total = [], torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
        out.append(total)
    return torch.stack(out)


def of_channels(q, k, g, beta, scale, count) -> Inside:
    """Gates [64, K] of channels: pairs of rows by levels of blocks."""
    decay, i = running_sums(g), torch.arange(CHUNK)
    kk, qk = torch.zeros(2, CHUNK, CHUNK)
    for d in torch.arange(k.shape[1]).split(64):
        kk_part, qk_part = torch.zeros(CHUNK, CHUNK), chain(q[:, d].clone(), k[:, d].clone())
        for size in (32, 16, 8, 4, 2, 1):
            block = i // size
            second = (block % 2 == 1)[:, None]
            e = decay[(block // 2 * 2 + 1) * size - 1][:, d]
            factor = torch.where(second, decay[:, d] - e, e - decay[:, d]).exp2()
            rows, reads = ((t[:, d].float() * factor).to(BF16) for t in (k, q))
            pair = second & (block[:, None] == block + 1)
            kk_part = torch.where(pair, chain(rows, rows), kk_part)
            qk_part = torch.where(pair, chain(reads, rows), qk_part)
        kk, qk = kk + kk_part, qk + qk_part
    grown, last = decay.exp2(), decay[count - 1]
    q, keys, weighted = (
        (t.float() * factor).to(BF16)
        for t, factor in ((q, grown * scale), (k, grown), (k, (last - decay).exp2()))
    )
    return Inside(beta[:, None] * kk, qk * scale, q, keys, 1.0, 1.0, weighted, 1.0, last[:, None])


def _chunk(q, k, v, g, beta, state, scale):
    count = len(q)
    q, k, v = (torch.nn.functional.pad(t, (0, 0, 0, CHUNK - count)) for t in (q, k, v))
    log2e = torch.tensor(elementary.LOG2E_FP32[0], dtype=torch.float32)
    after = (0, 0) * (g.dim() - 1) + (0, CHUNK - count)
    g, beta = torch.nn.functional.pad(g * log2e, after), torch.nn.functional.pad(beta, after[-2:])
    made = (of_heads if g.dim() == 1 else of_channels)(q, k, g, beta, scale, count)
    i, high = torch.arange(CHUNK), state.to(BF16).mT.contiguous()  # [V, K]
    lower = torch.where(i[:, None] > i, made.lower, 0.0)
    rest = beta[:, None] * fma(-made.kept, chain(made.k, high), v.float())
    r = rest.to(BF16)
    r[count:] = 0
    u = chain(_inverse(lower), r.mT.contiguous()) + 0.0
    u[count:] = 0
    columns = u.to(BF16).mT.contiguous()
    p = torch.where(i[:, None] >= i, made.p, 0.0).to(BF16)
    out = chain(p, columns, chain(made.q, high) * made.read) + 0.0
    made.weighted[count:] = 0
    weighted = (u * made.to_end).to(BF16).mT.contiguous()
    update = chain(made.weighted.mT.contiguous(), weighted)
    return out[:count].to(BF16), fma(made.whole.exp2(), state, update)


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    """(I + L)⁻¹ in bf16: blocks of 16 rows by substitution, then one block after another."""
    t, unit = torch.eye(CHUNK), torch.eye(CHUNK)
    for i in range(CHUNK):
        for m in range(i // BLOCK * BLOCK, i):
            t[i] = fma(-lower[i, m], t[m], t[i])
    t = t.to(BF16)
    a = t.clone()
    for first in range(BLOCK, CHUNK, BLOCK):
        own, before = slice(first, first + BLOCK), slice(0, first)
        rest = unit[own] - chain(lower[own, before].to(BF16), a[before].mT.contiguous())
        a[own] = chain(t[own, own].contiguous(), rest.to(BF16).mT.contiguous()).to(BF16)
    return a
