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
    kept: Factors of what is read with q, and with k.  weighted: Rows that update it.  whole: G_C.
    """

    lower: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    read: torch.Tensor | float
    kept: torch.Tensor | float
    weighted: torch.Tensor
    whole: torch.Tensor


def of_heads(q, k, g, beta, scale, count) -> Inside:
    """One gate [64] of a head."""
    steps = torch.ones(CHUNK, CHUNK).tril() * g
    while steps.shape[1] > 1:
        steps = steps[:, ::2] + steps[:, 1::2]
    decay = steps[:, 0]
    grown, last = decay.exp2()[:, None], decay[count - 1]
    weight = (decay[:, None] - decay).exp2()
    weighted = (k.float() * (last - decay).exp2()[:, None]).to(BF16)
    lower = beta[:, None] * chain(k, k) * weight
    p = chain(q, k) * (weight * scale)
    return Inside(lower, p, q, k, grown * scale, grown, weighted, last)


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
    return Inside(beta[:, None] * kk, qk * scale, q, keys, 1.0, 1.0, weighted, last[:, None])


def _chunk(q, k, v, g, beta, state, scale):
    count = len(q)
    q, k, v = (torch.nn.functional.pad(t, (0, 0, 0, CHUNK - count)) for t in (q, k, v))
    log2e = torch.tensor(elementary.LOG2E_FP32[0], dtype=torch.float32)
    after = (0, 0) * (g.dim() - 1) + (0, CHUNK - count)
    g, beta = torch.nn.functional.pad(g * log2e, after), torch.nn.functional.pad(beta, after[-2:])
    made = (of_heads if g.dim() == 1 else of_channels)(q, k, g, beta, scale, count)
    i, high = torch.arange(CHUNK), upper_plane(state).mT.contiguous()  # [V, K]
    lower = torch.where(i[:, None] > i, made.lower, 0.0)
    rest = beta[:, None] * fma(-made.kept, chain(made.k, high), v.float())
    r = (rest + 0.0).to(BF16)
    r[count:] = 0
    u = (chain(_inverse(lower).to(BF16), r.mT.contiguous()) + 0.0).to(BF16)
    u[count:] = 0
    columns = u.mT.contiguous()
    p = torch.where(i[:, None] >= i, made.p, 0.0).to(BF16)
    out = chain(p, columns, chain(made.q, high) * made.read) + 0.0
    made.weighted[count:] = 0
    update = chain(made.weighted.mT.contiguous(), columns) + 0.0
    return out[:count].to(BF16), fma(made.whole.exp2(), state, update)


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
