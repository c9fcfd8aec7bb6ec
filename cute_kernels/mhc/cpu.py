"""CPU backend: sums over channels in fixed chunks, each by halving; IEEE arithmetic.

Products are gemm's: a row's bits do not depend on the rows beside it.  e^x is made of
`ieee.exp2`, so that no bit depends on where a vector register begins.
"""

from __future__ import annotations

import math

import torch

from ..cpu.ieee import exp2, halves, ieee
from ..runtime import products
from .config import CPU, TOKENS, WIDTH, chunk_channels, mappings
from .tensors import (
    Coefficients,
    Combined,
    Expand,
    Gates,
    Mapping,
    Parts,
    Projected,
    ProjectionGradients,
    Reduced,
    Sinkhorn,
    Streams,
    Upstream,
)

_LOG2E = math.log2(math.e)


# ---- forward -------------------------------------------------------------------------------------


def project(
    x: torch.Tensor, mapping: Mapping, streams: Streams, expand: Expand | None = None
) -> Projected:
    """Sum over x [M, K], or over the streams y that ``expand`` makes of it."""
    y = None if expand is None else combine(x, streams, None, expand).y
    streams_in = x if y is None else y
    m = len(x)
    channels = x.shape[1] // streams.n
    step = chunk_channels(streams.n, mapping.precision)
    chunks = range(0, channels, step)
    with ieee():
        sums = torch.empty(len(chunks), m, len(mapping.phi), dtype=torch.float32, device="cpu")
        squares = torch.empty(len(chunks), m, dtype=torch.float32, device="cpu")
        psi = _psi(mapping)
        for i, first in enumerate(chunks):
            span = slice(first, min(first + step, channels))
            part = _channels(streams_in, streams, span).to(torch.float32)
            sums[i] = products.product(part, _channels(psi, streams, span))
            squares[i] = _sum(part * part)
    return Projected(sums, squares, y)


def add_chunks(projected: Projected, size: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (H [M, W], Σ x² / K [M]) of sums over chunks of ``size`` = K elements."""
    with ieee():
        h, squares = projected.sums[0].clone(), projected.squares[0].clone()
        for i in range(1, len(projected.sums)):
            h += projected.sums[i]
            squares += projected.squares[i]
        return torch.nn.functional.pad(h, (0, WIDTH[n] - h.shape[1])), squares / size


def gate(
    h: torch.Tensor, ms: torch.Tensor, gates: Gates, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (pre [M, n], post [M, n], res [M, n²]) of H [M, N or more]."""
    with ieee():
        z_pre, z_post, res = _split(_logits(h, ms, gates, n), n)
        pre, post = _sigmoid(z_pre), _sigmoid(z_post)
        return pre + gates.pre_eps, post * gates.post_scale, res.contiguous()


def sinkhorn(z: torch.Tensor, n: int, form: Sinkhorn) -> torch.Tensor:
    """Compute P [M, n²] of logits [M, n²], row-major."""
    with ieee():
        *_, last = _normalisations(z.reshape(-1, n, n), form)
        return last[0].reshape(-1, n * n)


def coefficients(
    projected: Projected, size: int, gates: Gates, n: int, form: Sinkhorn
) -> Coefficients:
    """Run `add_chunks`, `gate` and `sinkhorn` of res, with their bits."""
    h, ms = add_chunks(projected, size, n)
    pre, post, z = gate(h, ms, gates, n)
    return Coefficients(h, ms, pre, post, sinkhorn(z, n, form))


def combine(
    x: torch.Tensor, streams: Streams, pre: torch.Tensor | None, expand: Expand | None
) -> Combined:
    """Make y [M, K] of ``expand``, and out [M, C] = Σ_i y_i pre_i, of x without an ``expand``."""
    with ieee():
        rows = _streams(x, streams).to(torch.float32)
        y = None
        if expand is not None:
            n = streams.n
            f = _with_bias(expand)
            mixed = []
            for j in range(n):
                total = f * expand.post[:, j, None]
                for i in range(n):
                    total = total + rows[:, i] * expand.res[:, i * n + j, None]
                mixed.append(total)
            y = _joined(torch.stack(mixed, 1), streams).to(x.dtype)
            rows = _streams(y, streams).to(torch.float32)
        out = None if pre is None else _mixed(rows, pre).to(x.dtype)
        return Combined(y, out)


def recompute(x: torch.Tensor, streams: Streams, sites: tuple[Expand, ...]) -> list[torch.Tensor]:
    """Return y [M, K] of each site, of x and then of the y before it.

    Either all sites have a bias, or none.
    """
    ys = []
    for site in sites:
        x = combine(x, streams, None, site).y
        ys.append(x)
    return ys


# ---- backward ------------------------------------------------------------------------------------


def gate_backward(
    h: torch.Tensor, ms: torch.Tensor, gates: Gates, n: int, *upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Parts]:
    """Return (dH [M, W], dms [M], parts of dalpha and dbeta [T, 3 + N]).

    upstream: d_pre, d_post, d_res.
    """
    d_pre, d_post, d_res = upstream
    with ieee():
        r = _root(ms, gates)
        z_pre, z_post, _ = _split(_logits(h, ms, gates, n), n)
        g = torch.cat(
            [
                d_pre * _slope(z_pre),
                d_post * (gates.post_scale * _slope(z_post)),
                d_res,
            ],
            1,
        )
        used = h[:, : mappings(n)]
        alpha = _column_alpha(gates, n)
        d_h = torch.nn.functional.pad(alpha * g / r, (0, WIDTH[n] - used.shape[1]))
        # dms = -½ r⁻³ Σ_j g_j α_j H_j
        d_ms = _sum(g * alpha * used) * (-0.5 / (r[:, 0] * (ms + gates.eps)))
        of_alpha = g * used / r
        parts = []
        for chunk in range(0, len(h), TOKENS):
            rows = slice(chunk, chunk + TOKENS)
            per_row = torch.stack([_sum(block) for block in _split(of_alpha[rows], n)], 1)
            parts.append(_sum(torch.cat([per_row, g[rows]], 1).mT))
        return d_h, d_ms, Parts(torch.stack(parts))


def sinkhorn_backward(z: torch.Tensor, d_p: torch.Tensor, n: int, form: Sinkhorn) -> torch.Tensor:
    """Compute dz [M, n²]; L = dlog of each matrix, last to first: L - y Σ L."""
    with ieee():
        steps = list(_normalisations(z.reshape(-1, n, n), form))
        gradient = d_p.reshape(-1, n, n) * steps[-1][0]
        for y, dim, before in reversed(steps):
            gradient = gradient - y * _line_sum(gradient, dim)
            if before is not None:
                gradient = gradient * before
        return gradient.reshape(-1, n * n)


def coefficients_backward(
    h: torch.Tensor, ms: torch.Tensor, gates: Gates, n: int, form: Sinkhorn, *upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Parts]:
    """Run `gate_backward` of `sinkhorn_backward`, with their bits."""
    d_pre, d_post, d_res = upstream
    with ieee():
        z = _split(_logits(h, ms, gates, n), n)[2]
    return gate_backward(h, ms, gates, n, d_pre, d_post, sinkhorn_backward(z, d_res, n, form))


def reduce_channels(
    x: torch.Tensor | None,
    streams: Streams,
    upstream: Upstream,
    expand: Expand | None = None,
    want_dx: bool = False,
) -> Reduced:
    """Results of one pass over the streams x [M, K] and the incoming gradients.

    df, d_post, d_bias: with an ``expand`` (and ``upstream.dy``).
    d_res: with x and ``upstream.dy``.  d_pre: with x and ``upstream.d_out``.
    dx: by ``upstream``, if ``want_dx``.
    """
    with ieee():
        n, results = range(streams.n), {}
        dy, d_out = _upstream(upstream, streams)
        rows = None if x is None else _streams(x, streams).to(torch.float32)
        if expand is not None:
            f, d_f = _with_bias(expand), _mixed(dy, expand.post)
            results["df"] = d_f.to(expand.f.dtype)
            results["d_post"] = torch.stack([_channel_sum(dy[:, j] * f) for j in n], 1)
            if expand.bias is not None:
                parts = [_sum(part.mT) for part in d_f.split(TOKENS)]
                results["d_bias"] = Parts(torch.stack(parts))
        if rows is not None and dy is not None:
            d_res = [_channel_sum(rows[:, i] * dy[:, j]) for i in n for j in n]
            results["d_res"] = torch.stack(d_res, 1)
        if rows is not None and d_out is not None:
            results["d_pre"] = torch.stack([_channel_sum(rows[:, i] * d_out) for i in n], 1)
        if want_dx:
            dtype = (upstream.d_out if upstream.dy is None else upstream.dy).dtype
            grad = _passed(dy, d_out, upstream, streams.n)
            results["dx"] = _joined(grad, streams).to(dtype)
        return Reduced(**results)


def project_backward(
    x: torch.Tensor,
    d_h: torch.Tensor,
    d_ms: torch.Tensor,
    mapping: Mapping,
    streams: Streams,
    upstream: Upstream,
    want: tuple[bool, bool],
) -> ProjectionGradients:
    """Compute dx = dH psi + (2 / K) dms x + the terms of ``upstream``, and dpsi, as in ``want``."""
    (m, k), n = x.shape, streams.n
    g = d_h[:, : mappings(n)]
    with ieee():
        rows = x.to(torch.float32)
        dx = parts = None
        if want[0]:
            grad = products.product(g, _psi(mapping).mT)
            grad = grad + rows * (d_ms * (2.0 / k))[:, None]
            dy, d_out = _upstream(upstream, streams)
            if dy is not None or d_out is not None:
                grad = grad + _joined(_passed(dy, d_out, upstream, n), streams)
            dx = grad.to(x.dtype)
        if want[1]:
            chunks = [slice(first, first + TOKENS) for first in range(0, m, TOKENS)]
            values = [products.product(g[c].mT, rows[c].mT) for c in chunks]
            parts = Parts(torch.stack(values))
        return ProjectionGradients(dx, parts)


def weights(
    parts: Parts, mapping: Mapping, into_phi: torch.Tensor, into_weight: torch.Tensor | None
) -> None:
    """Add, chunk by chunk, dpsi ⊙ w to into_phi [N, K] and Σ_j dpsi_j phi_j to into_weight [K]."""
    with ieee():
        for d_psi in parts.values:
            if mapping.norm_weight is None:
                into_phi += d_psi
                continue
            into_phi += d_psi * mapping.norm_weight
            if into_weight is not None:
                total = d_psi[0] * mapping.phi[0]
                for j in range(1, len(d_psi)):
                    total = total + d_psi[j] * mapping.phi[j]
                into_weight += total


def add_parts(parts: Parts, into: torch.Tensor) -> None:
    """Compute into [L] += the chunks' sums, ascending."""
    with ieee():
        for chunk in parts.values.view(-1, parts.group, into.numel()):
            total = chunk[0].clone()
            for part in chunk[1:]:
                total += part
            into += total.view(into.shape)


# ---- helpers -------------------------------------------------------------------------------------


def _streams(x: torch.Tensor, streams: Streams) -> torch.Tensor:
    """View [M, K] as [M, n, C]."""
    if streams.layout == "nc":
        return x.view(len(x), streams.n, -1)
    return x.view(len(x), -1, streams.n).mT


def _joined(rows: torch.Tensor, streams: Streams) -> torch.Tensor:
    """Convert [M, n, C] to [M, K], contiguous."""
    rows = rows if streams.layout == "nc" else rows.mT
    return rows.reshape(len(rows), -1)


def _channels(x: torch.Tensor, streams: Streams, span: slice) -> torch.Tensor:
    """Select the elements of some channels, in the order of the layout: [M, n c]."""
    if streams.layout == "nc":
        return x.view(len(x), streams.n, -1)[:, :, span].reshape(len(x), -1)
    return x.view(len(x), -1, streams.n)[:, span].reshape(len(x), -1)


def _with_bias(expand: Expand) -> torch.Tensor:
    """Compute f + bias, [M, C] in fp32."""
    f = expand.f.to(torch.float32)
    return f if expand.bias is None else f + expand.bias.to(torch.float32)


def _psi(mapping: Mapping) -> torch.Tensor:
    return mapping.phi if mapping.norm_weight is None else mapping.phi * mapping.norm_weight


def _column_alpha(gates: Gates, n: int) -> torch.Tensor:
    """Return alpha for each of N columns."""
    counts = torch.tensor([n, n, n * n], dtype=torch.int64, device="cpu")
    return gates.alpha.repeat_interleave(counts)


def _logits(h: torch.Tensor, ms: torch.Tensor, gates: Gates, n: int) -> torch.Tensor:
    """Compute z = α H / r + β, r = √(ms + ε)."""
    r = _root(ms, gates)
    return _column_alpha(gates, n) * h[:, : mappings(n)] / r + gates.beta


def _root(ms: torch.Tensor, gates: Gates) -> torch.Tensor:
    """Compute √(ms + ε) [M, 1], rounded once: fp32 roots of libraries can be an ulp off."""
    return torch.sqrt((ms + gates.eps).double()).to(torch.float32)[:, None]


def _split(columns: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    """Split [..., N] into pre, post and res."""
    return columns.split([n, n, n * n], -1)


def _sigmoid(z: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + _exp(-z))


def _slope(z: torch.Tensor) -> torch.Tensor:
    """Compute p (1 - p) of the gate p: 1 - p is the gate of -z, exact where p is near 1."""
    return _sigmoid(z) * _sigmoid(-z)


def _exp(x: torch.Tensor) -> torch.Tensor:
    return exp2(x * _LOG2E)


def _normalisations(z: torch.Tensor, form: Sinkhorn):
    """Return (y, dim, factor) of each normalisation of [M, n, n]: y sums to 1 over dim.

    factor: what a gradient of log y's predecessor is multiplied with on its way back, or None.
    The first two start from logits, so that no row or column of finite ones is lost:
    S = softmax over j; then E_ij = S_ij / max_i S_ij over its sum over i.
    """
    d = z - z.amax(2, keepdim=True)
    e = _exp(d)
    row = _line_sum(e, 2)
    s = e / row
    if form.form == "log":
        yield s, 2, None
        e = _exp(d - d.amax(1, keepdim=True)) / row
        y = e / _line_sum(e, 1)
        yield y, 1, None
    else:
        q = s + form.eps
        yield s, 2, None
        y = q / (_line_sum(q, 1) + form.eps)
        # dS of dlog Q: Q = S + e.
        yield y, 1, s / q
    eps = form.eps if form.form == "epsilon" else 0.0
    for _ in range(form.iterations - 1):
        for dim in (2, 1):
            y = y / (_line_sum(y, dim) + eps)
            yield y, dim, None


def _line_sum(y: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over the rows' (2) or columns' (1) elements: neighbours first."""
    parts = list(y.split(1, dim))
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _mixed(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute Σ_i rows_i w_i of [M, n, C] and [M, n]: one chain."""
    total = rows[:, 0] * weights[:, 0, None]
    for i in range(1, rows.shape[1]):
        total = total + rows[:, i] * weights[:, i, None]
    return total


def _upstream(upstream: Upstream, streams: Streams) -> tuple[torch.Tensor | None, ...]:
    """Return (dy [M, n, C], d_out [M, C]) in fp32."""
    dy, d_out = upstream.dy, upstream.d_out
    return (
        None if dy is None else _streams(dy, streams).to(torch.float32),
        None if d_out is None else d_out.to(torch.float32),
    )


def _passed(dy, d_out, upstream: Upstream, n: int) -> torch.Tensor:
    """Compute Σ_j dy_j res[i, j] + d_out pre_i, [M, n, C]; dy itself without ``res``."""
    grads = []
    for i in range(n):
        total = None
        if dy is not None and upstream.res is None:
            total = dy[:, i]
        elif dy is not None:
            total = _mixed(dy, upstream.res[:, i * n : i * n + n])
        if d_out is not None:
            collapse_grad = d_out * upstream.pre[:, i, None]
            total = collapse_grad if total is None else total + collapse_grad
        grads.append(total)
    return torch.stack(grads, 1)


def _channel_sum(t: torch.Tensor) -> torch.Tensor:
    """Sum over the channels of [M, C]: chunks from zero, added ascending."""
    total = None
    for part in t.split(CPU.channels, 1):
        chunk_sum = _sum(part)
        total = chunk_sum if total is None else total + chunk_sum
    return total


def _sum(t: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension by halving; zeros up to a power of two."""
    size = 1 << max(0, t.shape[-1] - 1).bit_length()
    return halves(torch.nn.functional.pad(t, (0, size - t.shape[-1])), -1)
