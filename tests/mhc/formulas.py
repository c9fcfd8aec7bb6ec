"""TransformerEngine's formulas in torch at its precision, to compare errors with.

Its arithmetic, from its main of 2026-08-22, d0067d0, with its default ``use_tf32=True``:

    projection      H: a tensor core product of TF32 operands, x and phi (⊙ norm_weight in fp32);
                    ms: fp32, in steps along the row.  Backward: TF32 products, the rest fp32
    scale           fp32; 1 / r is multiplied by, e^z is exp2 of a rounded z log2 e; so backward.
                    Sums over tokens: a tree of 128, then one after another
    sinkhorn        fp32, the log form: logsumexp by e^z as above
    aggregate       fp32 FMAs over the streams.  Backward: dx fp32; dpre a tensor core product, TF32
                    operands of an fp32 x, exact ones of a bf16 x
    expand_combine  fp32 FMAs: bias, f, then the streams.  Backward: df and dx FMAs; dpost (of f,
                    then of bias) and dres products as dpre; dbias: a tree of 4 tokens, then a chain

Operands of TF32 have 10 bits of mantissa.  Where an order of additions is not the compiler's to
choose it is followed here; inside a step of a product sums are exact, which is kinder than a card.
"""

from __future__ import annotations

import math

import torch

from cute_kernels.mhc.config import mappings
from tests.mhc import cases, runs
from tests.mhc.cases import FP32, Case, Inputs

#: Elements of a step: of a product of the tensor cores, and of the sum of squares.
_STEP, _SQUARES = 16, 256
#: Tokens that a block of `scale`, and of expand_combine's backward, adds before others do.
_BLOCK, _FEW = 128, 4
#: Fewer are a few.
_NUMBERS = 64
_LOG2E = math.log2(math.e)


def rms(t: torch.Tensor) -> float:
    """√ of the mean square."""
    return t.double().square().mean().sqrt().item()


def errors(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    value: torch.Tensor,
    added: torch.Tensor | None = None,
) -> tuple[float, float, float]:
    """Our error of a result, theirs, and by how much ours may be above theirs by chance.

    Each is the root of the mean square, of the result's own; of sums of terms of either sign, of
    what was ``added`` to each (`ADDED`), which a sum may have left little of.

    The room: of bf16, whose rounding is far above all that goes before it, and the same for both,
    2% of theirs: half a unit would hide a second rounding.  Of fp32, half a unit of the last place;
    of a few numbers 8 times that, as one sum of thousands of terms is as good as another.
    """
    size = (rms(value) or 1.0) if added is None else added.reshape(value.shape)
    own, other = (rms((t.reshape(value.shape).double() - value) / size) for t in (ours, theirs))
    if ours.dtype is not FP32:
        return own, other, 0.02 * other
    return own, other, 2.0**-24 * (8 if value.numel() < _NUMBERS else 1)


def tf32(t: torch.Tensor) -> torch.Tensor:
    """Round fp32 to 10 bits of mantissa, to nearest, ties away: as cvt.rna.tf32 does."""
    raw = t.to(FP32).contiguous().view(torch.int32)
    return ((raw + (1 << 12)) & -(1 << 13)).view(FP32)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, L] · b [L, N]."""
    return tf32(a) @ tf32(b)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | float) -> torch.Tensor:
    """a b + c, rounded to fp32 once."""
    return (a.double() * b.double() + c).to(FP32)


def exp(z: torch.Tensor) -> torch.Tensor:
    """e^z of fp32 as a GPU has it."""
    return torch.exp2(z * _LOG2E)


def chain(parts: torch.Tensor) -> torch.Tensor:
    """Σ over the first dimension: one after another, in fp32."""
    total = parts[0].to(FP32)
    for part in parts[1:]:
        total = (total.double() + part).to(FP32)
    return total


def tree(rows: torch.Tensor) -> torch.Tensor:
    """Σ over the first dimension: halves are added to each other, in fp32."""
    while len(rows) > 1:
        half = (len(rows) + 1) // 2
        rows = torch.cat([rows[: len(rows) - half] + rows[half:], rows[len(rows) - half : half]])
    return rows[0]


def blocks(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Σ over tokens: a tree of each ``size``, then a chain."""
    return chain(torch.stack([tree(block) for block in rows.split(size)]))


def _steps(t: torch.Tensor, size: int) -> torch.Tensor:
    """[..., L] as [..., L / size, size], zeros behind."""
    return torch.nn.functional.pad(t, (0, -t.shape[-1] % size)).unflatten(-1, (-1, size))


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Σ over channels of [M, p, C] and [M, q, C]: [M, p, q], fp32."""
    left, right = (_steps(tf32(t), _STEP).double() for t in (a, b))
    # Not a product of a million matrices of 4 x 16: [steps, M, q] of each p.
    rows = [(one[:, None] * right).sum(-1).permute(2, 0, 1) for one in left.unbind(1)]
    return chain(torch.stack(rows, 2))


def te_projection(x, phi, norm_weight=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(H, ms) of rows."""
    psi = phi.float() if norm_weight is None else phi.float() * norm_weight.float()
    squares = _steps(x.float(), _SQUARES).double().square().sum(2)
    return product(x.float(), psi.mT), chain(squares.mT) / x.shape[1]


def _streams(t: torch.Tensor) -> torch.Tensor:
    return t.float().mT  # [M, C, n] to [M, n, C]


def _mixed(streams: list[torch.Tensor], weights: list[torch.Tensor], total=0.0) -> torch.Tensor:
    """Σ of [M, C] by numbers [M], FMAs onto ``total``."""
    for t, weight in zip(streams, weights, strict=True):
        total = fma(t, weight[:, None], total)
    return total


def _project(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    up, rows = cases.upstream_of(case, x), x.x.flatten(1).float()
    h, ms = te_projection(rows, x.phi, x.norm_weight)
    weight = 1.0 if x.norm_weight is None else x.norm_weight.float()
    dx = product(up.h, x.phi.float() * weight) + rows * (up.ms * (2 / rows.shape[1]))[:, None]
    d_psi = product(up.h.mT, rows)
    out = {"h": h, "ms": ms, "d_x": dx.to(x.x.dtype), "d_phi": (d_psi * weight).to(x.phi.dtype)}
    if x.norm_weight is None:
        return out
    d_weight = (d_psi * x.phi.float()).sum(0)
    return out | {"d_norm_weight": d_weight.to(x.norm_weight.dtype)}


def _logits(case: Case, x: Inputs, h: torch.Tensor, ms: torch.Tensor) -> tuple:
    """(z, alpha of each column, r) of H and ms."""
    sizes = torch.tensor([case.n, case.n, case.n**2])
    alpha = x.alpha.float().repeat_interleave(sizes)
    r = torch.sqrt(ms + case.options.eps)[:, None]
    beta = x.beta.float().view(1, mappings(case.n))
    return fma(alpha * h, 1.0 / r, beta), alpha, r


def _sigmoid(z: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + exp(-z))


def _gate(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    """Gate with a pre_eps of 0 and a post_scale of 2."""
    up, n = cases.upstream_of(case, x), case.n
    h, ms = x.h[:, : mappings(n)], x.ms
    z, alpha, r = _logits(case, x, h, ms)
    pre, post = _sigmoid(z[:, :n]), 2 * _sigmoid(z[:, n : 2 * n])
    g_pre, g_post = up.pre * pre * (1 - pre), up.post * post * 0.5 * (2 - post)
    g = torch.cat([g_pre, g_post, up.res.flatten(1)], 1)
    d_alpha = blocks(h * g / r, _BLOCK)
    d_r = (-g * h * alpha).sum(1) / (r * r)[:, 0]
    return {
        "pre": pre,
        "post": post,
        "res": z[:, 2 * n :].unflatten(1, (n, n)),
        "d_alpha": torch.stack([tree(t) for t in d_alpha.split([n, n, n * n])]).to(x.alpha.dtype),
        "d_beta": blocks(g, _BLOCK).to(x.beta.dtype),
        "d_h": alpha * g / r,
        "d_ms": d_r / (2 * r[:, 0]),
    }


def _collapse(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    up, rows = cases.upstream_of(case, x), _streams(x.x)
    out = _mixed(list(rows.unbind(1)), list(x.pre.unbind(1)))
    dx = up.out.float()[:, None] * x.pre[:, :, None]
    d_pre = dot(up.out[:, None], rows)[:, 0]
    return {"out": out.to(x.x.dtype), "d_x": dx.mT.to(x.x.dtype), "d_pre": d_pre}


def _expand(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    up, rows, n = cases.upstream_of(case, x), _streams(x.x), case.n
    dtype, dy = x.x.dtype, _streams(up.y)
    of_sublayer = [x.f] if x.bias is None else [x.bias.expand_as(x.f), x.f]
    y = []
    for j in range(n):
        begun = _mixed(of_sublayer, [x.post[:, j]] * len(of_sublayer))
        y.append(_mixed(list(rows.unbind(1)), list(x.res[:, :, j].unbind(1)), begun))
    df = _mixed(list(dy.unbind(1)), list(x.post.unbind(1)))
    dx = [_mixed(list(dy.unbind(1)), list(x.res[:, i].unbind(1))) for i in range(n)]
    d_post = sum(dot(t[:, None], dy)[:, 0] for t in reversed(of_sublayer))
    out = {
        "y": torch.stack(y, 2).to(dtype),
        "d_f": df.to(dtype),
        "d_post": d_post,
        "d_x": torch.stack(dx, 2).to(dtype),
        "d_res": dot(rows, dy),
    }
    return out if x.bias is None else out | {"d_bias": blocks(df, _FEW).to(dtype)}


def _line(z: torch.Tensor, dim: int) -> torch.Tensor:
    """-logsumexp."""
    top = z.amax(dim, keepdim=True)
    return -(exp(z - top).sum(dim).log()) - top.squeeze(dim)


def te_sinkhorn(z: torch.Tensor, iterations: int) -> torch.Tensor:
    """The log form in fp32."""
    g = torch.zeros_like(z[:, 0])
    for _ in range(iterations):
        f = _line(z + g[:, None], 2)
        g = _line(z + f[:, :, None], 1)
    return exp(z + f[:, :, None] + g[:, None])


def _sinkhorn(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    """dP ⊙ P, then back through the iterations, of which f and g are kept."""
    z, d_p, form = x.z, cases.upstream_of(case, x).res, case.options
    f, g = [None], [torch.zeros_like(z[:, 0])]
    for _ in range(form.iterations):
        f.append(_line(z + g[-1][:, None], 2))
        g.append(_line(z + f[-1][:, :, None], 1))
    p = exp(z + f[-1][:, :, None] + g[-1][:, None])
    of_log = d_p * p
    d_g, d_z = of_log.sum(1), of_log
    for t in range(form.iterations, 0, -1):
        of_g = -d_g[:, None] * exp(f[t][:, :, None] + z + g[t][:, None])
        d_f = (of_g + of_log).sum(2)
        of_log = torch.zeros_like(of_log)
        of_f = -d_f[:, :, None] * exp(f[t][:, :, None] + z + g[t - 1][:, None])
        d_g = of_f.sum(1)
        d_z = d_z + (of_f + of_g)
    return {"res": p, "d_z": d_z}


def _mix(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    """out, post and res of a site, of TF32's H."""
    n = case.n
    z, _, _ = _logits(case, x, *te_projection(x.x.flatten(1), x.phi, x.norm_weight))
    pre, post = _sigmoid(z[:, :n]), 2 * _sigmoid(z[:, n : 2 * n])
    out = _mixed(list(_streams(x.x).unbind(1)), list(pre.unbind(1)))
    res = te_sinkhorn(z[:, 2 * n :].reshape(-1, n, n), case.options.iterations)
    return {"out": out.to(x.x.dtype), "post": post, "res": res}


#: By the names of `calls.CALLS`.
TE = {
    "projection": _project,
    "scale": _gate,
    "sinkhorn": _sinkhorn,
    "aggregate": _collapse,
    "expand_combine": _expand,
    "mix_and_aggregate": _mix,
}


# ---- what is added -------------------------------------------------------------------------------


def _added_by_gate(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    up, n = cases.upstream_of(case, x), case.n
    h, r = x.h[:, : mappings(n)].double(), (x.ms.double() + case.options.eps).sqrt()[:, None]
    sizes = torch.tensor([n, n, n * n])
    alpha = x.alpha.double().repeat_interleave(sizes)
    s = (alpha * h / r + x.beta.double().view(1, -1)).sigmoid()
    slope = s * (1 - s)
    g = torch.cat([up.pre * slope[:, :n], 2 * up.post * slope[:, n : 2 * n], up.res.flatten(1)], 1)
    of_alpha = (g * h / r).square().sum(0)
    return {
        "d_alpha": torch.stack([t.sum() for t in of_alpha.split(sizes.tolist())]).sqrt(),
        "d_beta": g.square().sum(0).sqrt(),
        "d_ms": (g * alpha * h).square().sum(1).sqrt() / (2 * r[:, 0] ** 3),
    }


def _added_by_collapse(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    d_out = cases.upstream_of(case, x).out.double()
    return {"d_pre": (d_out.square()[:, None] @ x.x.double().square())[:, 0].sqrt()}


def _added_by_expand(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    dy = cases.upstream_of(case, x).y.double().square()
    f = x.f.double() if x.bias is None else x.f.double() + x.bias.double()
    d_post, d_res = (f.square()[:, None] @ dy)[:, 0], (x.x.double().square().mT @ dy).flatten(1)
    return {"d_post": d_post.sqrt(), "d_res": d_res.sqrt()}


#: Of results that are sums of terms of either sign: the root of the sum of the terms' squares.
ADDED = {
    "scale": _added_by_gate,
    "aggregate": _added_by_collapse,
    "expand_combine": _added_by_expand,
}


def above(name: str, case: Case, x: Inputs) -> dict[str, tuple[float, float]]:
    """Results and gradients whose error is above TransformerEngine's: (our error, theirs).

    Where both are nothing but the last rounding, chance decides: `errors`.
    """
    got, want = runs.compared(name, case, x)
    added = ADDED[name](case, x) if name in ADDED else {}
    out = {}
    for key, theirs in TE[name](case, x).items():
        ours, other, room = errors(got[key].detach(), theirs, want[key].value, added.get(key))
        if ours > other + room:
            out[key] = (ours, other)
    return out
