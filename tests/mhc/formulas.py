"""TransformerEngine's formulas in torch at its precision, to compare errors with.

Its products are TF32: operands have 10 bits of mantissa, sums are fp32.
"""

from __future__ import annotations

import torch

from cute_kernels.mhc.config import mappings
from tests.mhc import cases
from tests.mhc.cases import FP32, Case, Inputs


def rms(t: torch.Tensor) -> float:
    """√ of the mean square."""
    return t.double().square().mean().sqrt().item()


def tf32(t: torch.Tensor) -> torch.Tensor:
    """fp32 with 10 bits of mantissa, to nearest, ties away: as cvt.rna.tf32 has it."""
    raw = t.to(FP32).contiguous().view(torch.int32)
    return ((raw + (1 << 12)) & -(1 << 13)).view(FP32)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, L] · b [L, N]."""
    return tf32(a) @ tf32(b)


def te_projection(x, phi, norm_weight=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(H, ms) of rows."""
    psi = phi.float() if norm_weight is None else phi.float() * norm_weight.float()
    x = x.float()
    return product(x, psi.mT), (x * x).sum(1) / x.shape[1]


def _streams(t: torch.Tensor) -> torch.Tensor:
    return t.float().mT  # [M, C, n] to [M, n, C]


def _project(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    up, rows = cases.upstream_of(case, x), x.x.flatten(1).float()
    h, ms = te_projection(rows, x.phi, x.norm_weight)
    weight = x.norm_weight.float()
    dx = product(up.h, x.phi.float() * weight) + rows * (up.ms * (2 / rows.shape[1]))[:, None]
    d_psi = product(up.h.mT, rows)
    made = {"h": h, "ms": ms, "d_x": dx.to(x.x.dtype), "d_phi": (d_psi * weight).to(x.phi.dtype)}
    d_weight = (d_psi * x.phi.float()).sum(0)
    return made | {"d_norm_weight": d_weight.to(x.norm_weight.dtype)}


def _collapse(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    """tl.dot of streams and pre."""
    up, rows = cases.upstream_of(case, x), _streams(x.x)
    out = (tf32(rows) * tf32(x.pre)[:, :, None]).sum(1)
    dx = up.out.float()[:, None] * x.pre[:, :, None]
    d_pre = (tf32(rows) * tf32(up.out.float())[:, None]).sum(2)
    return {"out": out.to(x.x.dtype), "d_x": dx.mT.to(x.x.dtype), "d_pre": d_pre}


def _expand(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    up, rows, n = cases.upstream_of(case, x), _streams(x.x), case.n
    dtype = x.x.dtype
    f = x.f.float() + x.bias.float()
    mixed = torch.einsum("mic,mij->mjc", tf32(rows), tf32(x.res))
    y = f[:, None] * x.post[:, :, None] + mixed
    dy = _streams(up.y)
    df = (dy * x.post[:, :, None]).sum(1)
    d_post = (tf32(dy) * tf32(f)[:, None]).sum(2)
    dx = torch.einsum("mjc,mij->mic", tf32(dy), tf32(x.res))
    d_res = torch.einsum("mic,mjc->mij", tf32(rows), tf32(dy))
    return {
        "y": y.mT.to(dtype),
        "d_f": df.to(dtype),
        "d_post": d_post,
        "d_x": dx.mT.to(dtype),
        "d_res": d_res.reshape(-1, n, n),
    }


def te_sinkhorn(z: torch.Tensor, iterations: int) -> torch.Tensor:
    """The log form in fp32."""
    g = torch.zeros_like(z[:, 0])
    for _ in range(iterations):
        f = -torch.logsumexp(z + g[:, None], 2)
        g = -torch.logsumexp(z + f[:, :, None], 1)
    return torch.exp(z + f[:, :, None] + g[:, None])


def _sinkhorn(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    z = case.spread * cases.normal(case.m, case.n, case.n, seed=case.seed + 7)
    leaf = z.requires_grad_()
    p = te_sinkhorn(leaf, case.options.iterations)
    p.backward(cases.upstream_of(case, x).res)
    return {"p": p.detach(), "d_z": leaf.grad}


def _mix(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    """out, post and res of a site, of TF32's H."""
    n, o = case.n, case.options
    h, ms = te_projection(x.x.flatten(1), x.phi, x.norm_weight)
    sizes = torch.tensor([n, n, n * n])
    r = torch.sqrt(ms + o.eps)[:, None]
    z = x.alpha.float().repeat_interleave(sizes) * h / r + x.beta.float().view(1, mappings(n))
    pre, post = z[:, :n].sigmoid(), 2 * z[:, n : 2 * n].sigmoid()
    out = (tf32(_streams(x.x)) * tf32(pre)[:, :, None]).sum(1)
    res = te_sinkhorn(z[:, 2 * n :].reshape(-1, n, n), o.iterations)
    return {"out": out.to(x.x.dtype), "post": post, "res": res}


#: By the names of `runs.FUNCTIONS`.
TE = {
    "project": _project,
    "sinkhorn": _sinkhorn,
    "collapse": _collapse,
    "expand": _expand,
    "mix": _mix,
}
