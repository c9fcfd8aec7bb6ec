"""Oracles for tests, never dispatched: attention in float64, and a bound of the error of ours."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Half a unit in the last place of fp32, relative.
U32 = 2.0**-24


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] in float64, differentiable.

    q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]; allowed bool, broadcasts to
    [B, Hq, Sq, Sk].  A row that sees nothing gives 0 and -inf, or its sink [Hq], and gets no
    gradient.
    """
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    allowed = allowed.expand(scores.shape)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        masked = torch.cat((scores.masked_fill(~allowed, -math.inf), sink), dim=-1)
        lse = torch.logsumexp(masked, dim=-1)
        weight = torch.exp(masked - lse[..., None])[..., :-1]
        return (weight @ v).transpose(1, 2), lse
    nonempty = allowed.any(dim=-1)
    # An empty row gets scores of 0 and is cut out afterwards: no NaN on the way back.
    masked = scores.masked_fill(~allowed & nonempty[..., None], -math.inf)
    masked = torch.where(nonempty[..., None], masked, 0.0)
    lse = torch.logsumexp(masked, dim=-1) if masked.shape[-1] else masked.new_zeros(nonempty.shape)
    weight = torch.exp(masked - lse[..., None]).masked_fill(~allowed, 0.0)
    return (weight @ v).transpose(1, 2), lse.masked_fill(~nonempty, -math.inf)


class Bounds(NamedTuple):
    """Largest error of an implementation in our order, per element, float64."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Scores(NamedTuple):
    """Score options of `attention`: its arguments of these names."""

    scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None


def error_bounds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    allowed: Tensor,
    *,
    dlse: Tensor | None = None,
    scores: Scores = Scores(),
) -> Bounds:
    """First-order rounding bounds of a kernel that multiplies in fp32 and stores P and dS in ``u``.

    u is half an ulp of the input dtype (relative), t its least positive value (fp16 underflows).
    With e_s the error of a score (a cap brings 2^-21 softcap), P has the relative error
    e_p = 2 e_s + e_lse + 8 U32, and

        out:  (u + 2 e_s + n U32) P|V| + t 1|V|
        delta: dO . err(out) + ..., dP: (Dv + 8) U32 |dO||V|
        dS:   P (e_p |dP - delta| + err(dP) + err(delta)) + u |dS| + t
        dQ, dK, dV: the products of these errors with |K|, |Q|, |dO|, and n U32 of the sums

    each with the last rounding.  A factor of 1.25 covers the terms of second order.
    """
    scale, softcap, sinks = scores
    scale = scale or q.shape[-1] ** -0.5
    info = torch.finfo(q.dtype)
    u, t = info.eps / 2, info.smallest_normal * info.eps
    group = q.shape[2] // k.shape[2]
    kv_shape = k.shape
    q, k, v, dout = (x.double().transpose(1, 2) for x in (q, k, v, dout))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    n, m, d = k.shape[2] + 130, q.shape[2] * group + 130, q.shape[3] + 8
    d_value = v.shape[3] + 8
    allowed = allowed.expand(*q.shape[:3], k.shape[2])
    raw = q @ k.mT * scale
    capped = softcap * torch.tanh(raw / softcap) if softcap else raw
    slope = 1 - (capped / softcap) ** 2 if softcap else torch.ones_like(raw)
    masked = capped.masked_fill(~allowed, -math.inf)
    lse = torch.logsumexp(masked, -1, keepdim=True) if k.shape[2] else masked.sum(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*masked.shape[:3], 1)
        lse = torch.logsumexp(torch.cat((masked, sink), -1), -1, keepdim=True)
    p = torch.exp(masked - lse).nan_to_num(0.0)
    size = capped.abs().masked_fill(~allowed, 0.0)
    e_score = U32 * ((d * (q.abs() @ k.abs().mT) * scale).masked_fill(~allowed, 0.0) + 12 * size)
    if softcap:
        e_score = e_score + (2.0**-21 * softcap) * allowed  # 1 - 2 / (1 + e^x) cancels near 0
    e_row = e_score.amax(-1, keepdim=True) if k.shape[2] else lse * 0
    finite = lse.masked_fill(lse.isinf(), 0.0)
    e_lse = e_row + U32 * (n + 8 * finite.abs() + 8)
    e_p = e_score + e_row + e_lse + 8 * U32
    ones = allowed.double()

    out = p @ v
    e_out = (u + 2 * e_row + n * U32) * (p @ v.abs()) + t * (ones @ v.abs())
    e_out_stored = e_out * 1.25 + u * out.abs() + t
    dp, delta = dout @ v.mT, (dout * out).sum(-1, keepdim=True)
    delta = delta if dlse is None else delta - dlse.double()[..., None]
    e_dp = d_value * U32 * (dout.abs() @ v.abs().mT)
    e_delta = (dout.abs() * (e_out_stored + d_value * U32 * out.abs())).sum(-1, keepdim=True)
    e_delta = e_delta + U32 * delta.abs()
    ds = p * (dp - delta) * slope
    e_slope = 4 * (e_score / softcap + U32) if softcap else 0.0
    e_ds = p * ((e_p * slope + e_slope) * (dp - delta).abs() + (e_dp + e_delta) * slope)
    e_ds = (e_ds + u * ds.abs() + 6 * U32 * ds.abs() + t) * ones
    e_dq = scale * (e_ds @ k.abs() + n * U32 * (ds.abs() @ k.abs()))
    e_dk = scale * (e_ds.mT @ q.abs() + m * U32 * (ds.abs().mT @ q.abs()))
    e_pv = (p * (e_p + u) + t) * ones
    e_dv = e_pv.mT @ dout.abs() + m * U32 * (p.mT @ dout.abs())
    dq, dk, dv = scale * ds @ k, scale * ds.mT @ q, p.mT @ dout

    def fold(x: Tensor) -> Tensor:
        grouped = x.unflatten(1, (kv_shape[2], group)).sum(2)
        return grouped.transpose(1, 2)

    def stored(error: Tensor, value: Tensor) -> Tensor:
        return 1.25 * error + u * (value.abs() + error) + t

    return Bounds(
        e_out_stored.transpose(1, 2),
        1.25 * e_lse.squeeze(-1),
        stored(e_dq, dq).transpose(1, 2),
        stored(fold(e_dk), fold(dk)),
        stored(fold(e_dv), fold(dv)),
    )


def sinks_bound(bounds: Bounds, exact: tuple[Tensor, Tensor], upstream: tuple, sinks: Tensor):
    """Return the largest error of the gradient of ``sinks``, float64 [Hq].

    bounds: of `error_bounds`; exact: `attention`'s (out, lse); upstream: (dout, dlse or None).
    """
    (out, lse), (dout, dlse) = exact, upstream
    dout = dout.double()
    delta = (dout * out).sum(-1).transpose(1, 2)
    delta = delta if dlse is None else delta - dlse.double()
    e_out = bounds.out + (out.shape[3] + 8) * U32 * out.abs()
    e_delta = (dout.abs() * e_out).sum(-1).transpose(1, 2) + U32 * delta.abs()
    sink = sinks.double()[:, None]
    weight = torch.exp(sink - lse)
    e_weight = weight * (bounds.lse + U32 * (4 * sink.abs() + 8))
    error = (e_weight * delta.abs() + weight * e_delta).sum((0, 2))
    return 1.25 * error + U32 * (weight * delta).sum((0, 2)).abs()
