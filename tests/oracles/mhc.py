"""Oracles for tests, never dispatched: every op and fusion of mhc in float64, and its error bound.

Functions take float64 tensors (or `Near` numbers, or None) and return `Near` numbers: the exact
value, and the most by which an implementation in fp32 may differ from it.  Backwards are explicit
formulas; nothing here is differentiated by torch.  H has N columns, without padding.

The model of an implementation is that of `error_bounds`.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from cute_kernels.mhc.config import TOKENS, chunk_channels, mappings
from cute_kernels.mhc.tensors import Expand, Gates, Mapping, Sinkhorn, Streams

from .error_bounds import DIVISION, EXP, SLACK, TINY, Near, U, exact, joined, product

#: Error of one normalisation: three additions of positive numbers and a division.
_NORMALISED = 3 * U + DIVISION
#: Error of the float64 formula itself, in which dP and the logits cancel.
_FORMULA = 2.0**-47
#: Tokens at once where a token has 2 T matrices [n², n²].
_SLICE = 128


def _streams(x: Near, streams: Streams) -> Near:
    """View [M, K] as [M, n, C]."""
    m = len(x.value)
    if streams.layout == "nc":
        return x.reshape(m, streams.n, -1)
    return x.reshape(m, -1, streams.n).mT


def _flat(x: Near, streams: Streams) -> Near:
    """View [M, n, C] as [M, K]."""
    return (x if streams.layout == "nc" else x.mT).reshape(len(x.value), -1)


# ---- projection (14, 15) -------------------------------------------------------------------------


class ProjectionGradients(NamedTuple):
    """Gradients of `projection`; norm_weight: None without one."""

    x: Near
    phi: Near
    norm_weight: Near | None


def _psi(mapping: Mapping) -> Near:
    phi = exact(mapping.phi)
    return phi if mapping.norm_weight is None else phi * mapping.norm_weight


def projection(x, mapping: Mapping, streams: Streams) -> tuple[Near, Near]:
    """Return (H [M, N], ms [M]) of x [M, K].

    ψ = φ ⊙ w;  H = x ψᵀ;  ms = Σ x² / K
    """
    x = exact(x)
    chunk = chunk_channels(streams.n, mapping.precision) * streams.n
    h = product(x, _psi(mapping).mT, mapping.precision, chunk)
    return h, (x * x).sum(-1) / x.value.shape[1]


def projection_backward(x, d_h, d_ms, mapping: Mapping) -> ProjectionGradients:
    """Backward of `projection` from dH [M, N] and dms [M].

    dx = dH ψ + (2 / K) dms x;  dψ = dHᵀ x;  dφ = dψ ⊙ w;  dw_k = Σ_j dψ_jk φ_jk
    """
    x, d_h, d_ms = exact(x), exact(d_h), exact(d_ms)
    d_projected = product(d_h, _psi(mapping), mapping.precision, mappings(4))
    dx = d_projected + x * (d_ms * (2 / x.value.shape[1]))[:, None]
    d_psi = product(d_h.mT, x, mapping.precision, TOKENS)
    if mapping.norm_weight is None:
        return ProjectionGradients(dx, d_psi, None)
    d_weight = (d_psi * mapping.phi).sum(0)
    # Chunks of tokens are multiplied before they are added: a product has its own rounding each.
    return ProjectionGradients(dx, d_psi * mapping.norm_weight, d_weight.rounded(2 * U))


# ---- scale (16 to 18) ----------------------------------------------------------------------------


class ScaleGradients(NamedTuple):
    """Gradients of `scale`: dH [M, N], dms [M], dalpha [3], dbeta [N]."""

    h: Near
    ms: Near
    alpha: Near
    beta: Near


def _alpha(gates: Gates, n: int) -> torch.Tensor:
    """Return α for each column: n of pre, n of post, n² of res."""
    blocks = [block.expand(size) for block, size in zip(gates.alpha, (n, n, n * n), strict=True)]
    return torch.cat(blocks).double()


def _logits(h: Near, ms: Near, gates: Gates, n: int) -> tuple[Near, Near]:
    """Return (z, r):  r = √(ms + ε);  z = α H / r + β.  β is added after the division."""
    r = (ms + gates.eps).sqrt()
    return h * _alpha(gates, n) / r[:, None] + gates.beta.reshape(-1), r


def scale(h, ms, gates: Gates, n: int) -> tuple[Near, Near, Near]:
    """Return (pre [M, n], post [M, n], res [M, n²]) of H [M, N].

    pre = σ(z) + pre_eps;  post = post_scale σ(z);  res = z
    """
    z, _ = _logits(exact(h), exact(ms), gates, n)
    pre, post = z[:, :n].sigmoid(), z[:, n : 2 * n].sigmoid()
    return pre + gates.pre_eps, post * gates.post_scale, z[:, 2 * n :]


def scale_backward(h, ms, gates: Gates, n: int, upstream: tuple) -> ScaleGradients:
    """Backward of `scale` from dpre, dpost and dres [M, ...].

    g_pre = dpre p (1 - p);  g_post = dpost post_scale s (1 - s);  g_res = dres;  of σ(z)
    dβ = Σ_m g;  dα_b = Σ_m Σ_(j ∈ b) g H / r;  dH = α g / r;  dms = -½ r⁻³ Σ_j g_j α_j H_j
    """
    h, ms = exact(h), exact(ms)
    d_pre, d_post, d_res = (exact(g) for g in upstream)
    z, r = _logits(h, ms, gates, n)
    p, s = z[:, :n].sigmoid(), z[:, n : 2 * n].sigmoid()
    negated = exact(0.0, z) - z[:, : 2 * n]
    p_rest, s_rest = negated[:, :n].sigmoid(), negated[:, n:].sigmoid()
    g_post = d_post * (s * s_rest * gates.post_scale)
    g = joined([d_pre * (p * p_rest), g_post, d_res], 1)
    alpha = _alpha(gates, n)
    d_ms = (g * alpha * h).sum(1) * (exact(-0.5, z) / (r * r * r))
    of_alpha = g * h / r[:, None]
    edges = (0, n, 2 * n, mappings(n))
    blocks = [of_alpha[:, a:b].sum(1)[:, None] for a, b in itertools.pairwise(edges)]
    return ScaleGradients(g * alpha / r[:, None], d_ms, joined(blocks, 1).sum(0), g.sum(0))


# ---- sinkhorn (19) -------------------------------------------------------------------------------


class _Step(NamedTuple):
    """One normalisation: y [M, n, n] sums to 1 over ``dim``; factor: S / Q of the epsilon form."""

    y: torch.Tensor
    dim: int
    factor: torch.Tensor | None = None


def _log_form(z: torch.Tensor, iterations: int) -> tuple[list, list]:
    """Return (f_1 .. f_T, g_0 .. g_T) of z [M, n, n].

    g_0 = 0;  f_t[i] = -LSE_j(z_ij + g_(t-1)[j]);  g_t[j] = -LSE_i(z_ij + f_t[i])
    """
    f, g = [], [z.new_zeros(z[:, 0].shape)]
    for _ in range(iterations):
        f.append(-torch.logsumexp(z + g[-1][:, None, :], 2))
        g.append(-torch.logsumexp(z + f[-1][:, :, None], 1))
    return f, g


def _steps(z: torch.Tensor, form: Sinkhorn) -> list[_Step]:
    """Return every normalisation, first to last."""
    if form.form == "log":
        f, g = _log_form(z, form.iterations)
        rows = [torch.exp(z + a[:, :, None] + b[:, None]) for a, b in zip(f, g[:-1], strict=True)]
        columns = [torch.exp(z + a[:, :, None] + b[:, None]) for a, b in zip(f, g[1:], strict=True)]
        pairs = zip(rows, columns, strict=True)
        return [step for r, c in pairs for step in (_Step(r, 2), _Step(c, 1))]
    # S = softmax_j(z);  Q = S + e;  Q / (column sums + e);  then rows and columns, T - 1 times
    e = form.eps
    s = torch.softmax(z, 2)
    q = s + e
    steps = [_Step(s, 2), _Step(q / (q.sum(1, keepdim=True) + e), 1, s / q)]
    for _ in range(form.iterations - 1):
        for dim in (2, 1):
            y = steps[-1].y
            steps.append(_Step(y / (y.sum(dim, keepdim=True) + e), dim))
    return steps


def sinkhorn(z, n: int, form: Sinkhorn) -> Near:
    """Compute P [M, n²] of logits [M, n²]: P = exp(f_T + z + g_T) in the log form."""
    z = exact(z)
    square = z.value.reshape(-1, n, n)
    p = _steps(square, form)[-1].y
    ratio = [
        _relative_of_last(*block, form) for block in _slices(square, z.error.reshape(-1, n, n))
    ]
    error = p * torch.expm1(torch.cat(ratio) * SLACK) + TINY
    return Near(p, error).reshape(-1, n * n)


def sinkhorn_backward(z, d_p, n: int, form: Sinkhorn) -> Near:
    """Compute dz [M, n²]."""
    z, d_p = exact(z), exact(d_p)
    square, upstream = z.value.reshape(-1, n, n), d_p.reshape(-1, n, n)
    backward = _log_backward if form.form == "log" else _epsilon_backward
    value = backward(square, upstream.value, form)
    of_z = z.error.reshape(-1, n, n)
    error = [
        _backward_error(*parts, form)
        for parts in _slices(square, of_z, upstream.value, upstream.error)
    ]
    return Near(value, torch.cat(error)).reshape(-1, n * n)


def _log_backward(z: torch.Tensor, d_p: torch.Tensor, form: Sinkhorn) -> torch.Tensor:
    """Compute L = dP ⊙ P;  dz = L;  dg = Σ_i L.  For t = T .. 1:

    A = -dg[j] exp(z + f_t + g_t);  df = Σ_j A (+ Σ_j L for t = T)
    B = -df[i] exp(z + f_t + g_(t-1));  dg = Σ_i B;  dz += A + B
    """
    f, g = _log_form(z, form.iterations)
    last = d_p * torch.exp(z + f[-1][:, :, None] + g[-1][:, None])
    dz, d_g = last.clone(), last.sum(1)
    for t in range(form.iterations, 0, -1):
        rows = z + f[t - 1][:, :, None]
        a = -d_g[:, None] * torch.exp(rows + g[t][:, None])
        d_f = a.sum(2) + (last.sum(2) if t == form.iterations else 0.0)
        b = -d_f[:, :, None] * torch.exp(rows + g[t - 1][:, None])
        d_g = b.sum(1)
        dz += a + b
    return dz


def _epsilon_backward(z: torch.Tensor, d_p: torch.Tensor, form: Sinkhorn) -> torch.Tensor:
    """Compute dq = (dy - Σ dy y) / (Σ q + e), last to first;  dz = S ⊙ (d - Σ_j d S)."""
    e, s = form.eps, torch.softmax(z, 2)
    inputs, y = [], s + e
    for i in range(2 * form.iterations - 1):
        dim = 2 if i % 2 else 1
        inputs.append((y, dim))
        y = y / (y.sum(dim, keepdim=True) + e)
    d = d_p
    for q, dim in reversed(inputs):
        divisor = q.sum(dim, keepdim=True) + e
        d = (d - (d * q / divisor).sum(dim, keepdim=True)) / divisor
    return s * (d - (d * s).sum(2, keepdim=True))


def _slices(*tensors: torch.Tensor):
    return zip(*(t.split(_SLICE) for t in tensors), strict=True)


def _local(z: torch.Tensor, of_z: torch.Tensor, steps: list[_Step]) -> list[torch.Tensor]:
    """Relative errors introduced by the logits and then by each normalisation.

    The first normalisation of rows and of columns each take e^d of logits without their maximum.
    """
    d = z - z.amax(2, keepdim=True)
    of_rows = EXP + 3 * U * d.abs()
    errors = [of_z + of_rows]
    for i, step in enumerate(steps):
        error = _NORMALISED + TINY / step.y.clamp(min=TINY)
        if i == 1:
            error = error + EXP + 3 * U * (d - d.amax(1, keepdim=True)).abs() + of_rows
        errors.append(error)
    return errors


def _relative_of_last(z: torch.Tensor, of_z: torch.Tensor, form: Sinkhorn) -> torch.Tensor:
    """Relative error of P, to first order: δ log y' = δ log y - Σ_line y' δ log y.

    The error of each step goes through the steps after it, with its sign; magnitudes are added
    at the end.  Added at each step they would double 2 T times.
    """
    steps = _steps(z, form)
    local = _local(z, of_z, steps)
    # [M, n², n, n]: from log y after a step to log P.
    carried = _identity(z)
    total = local[-1]
    for step, error in zip(reversed(steps), reversed(local[:-1]), strict=True):
        carried = carried - step.y[:, None] * carried.sum(step.dim + 1, keepdim=True)
        if step.factor is not None:
            carried = carried * step.factor[:, None]
        total = total + _carried(carried, error)
    return total


def _relative(z: torch.Tensor, of_z: torch.Tensor, form: Sinkhorn) -> list[torch.Tensor]:
    """Relative error of y after each step, as `_relative_of_last`, in fp32."""
    steps = _steps(z, form)
    local = [error.float() for error in _local(z, of_z, steps)]
    m, n, _ = z.shape
    # [M, n, n, sources, n²]: by what an element of log y moves with each of a source.
    moved = torch.zeros(m, n, n, len(local), n * n, dtype=torch.float32, device=z.device)
    for i, error in enumerate(local):
        moved[:, :, :, i] = torch.diag_embed(error.reshape(m, -1)).view(m, n, n, n * n)
    errors = []
    for i, step in enumerate(steps):
        source_moves, y = moved[:, :, :, : i + 1], step.y.float()[..., None, None]
        if step.factor is not None:
            source_moves *= step.factor.float()[..., None, None]
        lines = zip(source_moves.split(1, step.dim), y.split(1, step.dim), strict=True)
        source_moves -= sum(line * weight for line, weight in lines)
        errors.append(moved[:, :, :, : i + 2].abs().sum((3, 4)).double())
    return errors


def _identity(z: torch.Tensor) -> torch.Tensor:
    m, n, _ = z.shape
    eye = torch.eye(n * n, dtype=z.dtype, device=z.device)
    return eye.view(1, -1, n, n).expand(m, -1, -1, -1)


def _backward_error(
    z: torch.Tensor,
    of_z: torch.Tensor,
    d_p: torch.Tensor,
    of_d_p: torch.Tensor,
    form: Sinkhorn,
) -> torch.Tensor:
    """Error of dz [M, n, n], to first order: L of every step, last to first, is L - y Σ_line L.

    An error of L of a step goes to dz through the steps before it, with its sign.
    """
    steps, relative, n = _steps(z, form), _relative(z, of_z, form), z.shape[1]
    # through[s]: [M, n², n, n], from L after step s to dz.
    through = [_identity(z)]
    for step in steps:
        before = through[-1]
        if step.factor is not None:
            before = before * step.factor[:, None]
        through.append(before - (before * step.y[:, None]).sum(step.dim + 1, keepdim=True))
    gradient = d_p * steps[-1].y
    reach = [torch.expm1(r * SLACK) for r in relative]
    error = gradient.abs() * (reach[-1] + U) + of_d_p * steps[-1].y * (1 + reach[-1])
    error = error + TINY * d_p.abs()
    total = _carried(through[-1], error)
    for i in range(len(steps) - 1, -1, -1):
        step = steps[i]
        line = gradient.sum(step.dim, keepdim=True)
        size = gradient.abs().sum(step.dim, keepdim=True)
        # y is wrong; Σ has n - 1 roundings, the product one, the difference one.
        step_error = (step.y * reach[i] + TINY) * line.abs() + U * (
            n * step.y * size + gradient.abs()
        )
        gradient = gradient - step.y * line
        if step.factor is None:
            total = total + _carried(through[i], step_error)
            continue
        step_error = step_error * step.factor + 8 * U * gradient.abs() * step.factor
        # S / Q is wrong by what S is.
        step_error = step_error + gradient.abs() * step.factor * reach[0]
        gradient = gradient * step.factor
        total = total + _carried(through[i], step_error)
    magnitude = (d_p * steps[-1].y).abs().sum((1, 2), keepdim=True)
    return total * SLACK + _FORMULA * (1 + z.abs().amax((1, 2), keepdim=True)) * magnitude


def _carried(through: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    return (through.abs() * error[:, None]).sum((2, 3)).reshape(error.shape)


# ---- aggregate, expand_combine, repeat -----------------------------------------------------------


def aggregate(x, pre, streams: Streams) -> Near:
    """Compute out_c = Σ_i x_ci pre_i: [M, C]."""
    return (_streams(exact(x), streams) * exact(pre)[:, :, None]).sum(1)


def aggregate_backward(x, pre, d_out, streams: Streams) -> tuple[Near, Near]:
    """(dx [M, K], dpre [M, n]).

    dx_ci = dout_c pre_i;  dpre_i = Σ_c dout_c x_ci
    """
    d_out = exact(d_out)[:, None]
    dx = d_out * exact(pre)[:, :, None]
    return _flat(dx, streams), (_streams(exact(x), streams) * d_out).sum(2)


def _with_bias(by: Expand) -> Near:
    f = exact(by.f)
    return f if by.bias is None else f + by.bias


def expand_combine(x, by: Expand, streams: Streams) -> Near:
    """Compute y [M, K]:  y_cj = (f_c + bias_c) post_j + Σ_i x_ci R_ij, in one chain."""
    n, rows = streams.n, _streams(exact(x), streams)
    post, res = exact(by.post)[:, None], exact(by.res).reshape(-1, n, n)
    f = _with_bias(by)[:, :, None] * post
    terms = [f] + [rows[:, i, :, None] * res[:, i, None] for i in range(n)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return _flat(total.mT, streams)


class ExpandGradients(NamedTuple):
    """Gradients of `expand_combine`; bias: None without one."""

    f: Near
    bias: Near | None
    post: Near
    x: Near
    res: Near


def expand_combine_backward(x, by: Expand, dy, streams: Streams) -> ExpandGradients:
    """Backward of `expand_combine` from dy [M, K].

    df = Σ_j dy_j post_j;  dbias = Σ_m df;  dpost_j = Σ_c dy_cj (f + bias)_c
    dx_i = Σ_j dy_j R_ij;  dR_ij = Σ_c x_ci dy_cj
    """
    n, rows, dy = streams.n, _streams(exact(x), streams), _streams(exact(dy), streams)
    res = exact(by.res).reshape(-1, n, n)
    df = (dy * exact(by.post)[:, :, None]).sum(1)
    d_post = (dy * _with_bias(by)[:, None]).sum(2)
    dx = (dy[:, None] * res[:, :, :, None]).sum(2)
    d_res = (rows[:, :, None] * dy[:, None]).sum(3).reshape(-1, n * n)
    d_bias = None if by.bias is None else df.sum(0)
    return ExpandGradients(df, d_bias, d_post, _flat(dx, streams), d_res)


def repeat(embedding, streams: Streams) -> Near:
    """Repeat [M, C] n times: [M, K]."""
    e = exact(embedding)
    copies = joined([e[:, None]] * streams.n, 1)
    return _flat(copies, streams)


def repeat_backward(dx, streams: Streams) -> Near:
    """Sum over the streams: [M, C]."""
    return _streams(exact(dx), streams).sum(1)


# ---- a site, and two -----------------------------------------------------------------------------


class Site(NamedTuple):
    """Weights and options of a site."""

    streams: Streams
    mapping: Mapping
    gates: Gates
    form: Sinkhorn


class Made(NamedTuple):
    """Results of a site's forward: out [M, C], pre, post, res, H [M, N], ms."""

    out: Near
    pre: Near
    post: Near
    res: Near
    h: Near
    ms: Near


class Given(NamedTuple):
    """Upstream gradients of a site's results, each may be None.

    pre: beside what comes by way of out.  x: what comes for the streams from elsewhere.
    """

    out: torch.Tensor | Near | None = None
    pre: torch.Tensor | Near | None = None
    post: torch.Tensor | Near | None = None
    res: torch.Tensor | Near | None = None
    x: torch.Tensor | Near | None = None


class SiteGradients(NamedTuple):
    """Gradients of a site; norm_weight: None without one; shifted: of the previous pre."""

    x: Near
    phi: Near
    norm_weight: Near | None
    alpha: Near
    beta: Near
    shifted: Near | None = None


def mix_and_aggregate(x, site: Site, shifted=None) -> Made:
    """Run `projection`, `scale`, `sinkhorn`, `aggregate`; ``shifted``: the pre of the collapse."""
    n = site.streams.n
    h, ms = projection(x, site.mapping, site.streams)
    pre, post, z = scale(h, ms, site.gates, n)
    out = aggregate(x, pre if shifted is None else shifted, site.streams)
    return Made(out, pre, post, sinkhorn(z, n, site.form), h, ms)


def mix_and_aggregate_backward(x, site: Site, out_grads: Given, shifted=None) -> SiteGradients:
    """Backward of `mix_and_aggregate`, last op first: aggregate, sinkhorn, scale, projection.

    x's gradient is the sum of aggregate's, projection's and ``out_grads.x``.
    """
    x, n = exact(x), site.streams.n
    h, ms = projection(x, site.mapping, site.streams)
    pre, post, z = scale(h, ms, site.gates, n)
    sums, d_shifted = [], None
    d_pre = _or_zeros(out_grads.pre, pre)
    if out_grads.out is not None:
        used = pre if shifted is None else exact(shifted)
        d_x, of_used = aggregate_backward(x, used, out_grads.out, site.streams)
        sums.append(d_x)
        if shifted is None:
            d_pre = d_pre + of_used
        else:
            d_shifted = of_used
    d_z = sinkhorn_backward(z, _or_zeros(out_grads.res, z), n, site.form)
    upstream = (d_pre, _or_zeros(out_grads.post, post), d_z)
    of_scale = scale_backward(h, ms, site.gates, n, upstream)
    of_projection = projection_backward(x, of_scale.h, of_scale.ms, site.mapping)
    sums += [of_projection.x] if out_grads.x is None else [exact(out_grads.x), of_projection.x]
    dx = sums[0]
    for term in sums[1:]:
        dx = dx + term
    return SiteGradients(
        dx, of_projection.phi, of_projection.norm_weight, of_scale.alpha, of_scale.beta, d_shifted
    )


def _or_zeros(gradient, like: Near) -> Near:
    return exact(torch.zeros_like(like.value) if gradient is None else gradient)


def post_pre(x, by: Expand, site: Site, dtype: torch.dtype, shifted=None) -> tuple[Near, Made]:
    """Return (y, the next site of y); y is rounded to ``dtype`` in between."""
    y = expand_combine(x, by, site.streams).stored(dtype)
    return y, mix_and_aggregate(y, site, shifted)


def post_pre_backward(
    x, by: Expand, site: Site, out_grads: Given, dtype: torch.dtype, shifted=None
) -> tuple[ExpandGradients, SiteGradients]:
    """Backward of ``out_grads``, whose x is dy; y's whole gradient is rounded to ``dtype``."""
    y = expand_combine(x, by, site.streams).stored(dtype)
    of_site = mix_and_aggregate_backward(y, site, out_grads, shifted)
    return expand_combine_backward(x, by, of_site.x.stored(dtype), site.streams), of_site
