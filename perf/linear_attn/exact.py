"""Results in float64, by autograd through the definitions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..core.passes import Inputs
from .cases import GROUPS, Case

EPS = 1e-6
L2NORM_EPS = 1e-6


def _conv(t: Inputs) -> torch.Tensor:
    taps = t["weight"].shape[1]
    x, rows = F.pad(t["x"], (0, 0, taps - 1, 0)), t["x"].shape[1]
    return F.silu(sum(x[:, w : w + rows] * t["weight"][:, w] for w in range(taps)))


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def _norm_gate(t: Inputs) -> torch.Tensor:
    return _normalised(t["x"]) * t["weight"] * F.silu(t["gate"])


def _gate_norm(t: Inputs) -> torch.Tensor:
    groups = (t["x"] * F.silu(t["gate"])).unflatten(-1, (GROUPS, -1))
    return _normalised(groups).flatten(-2) * t["weight"]


def _delta(t: Inputs) -> torch.Tensor:
    q, k, v, g, beta = (t[name][0] for name in ("q", "k", "v", "g", "beta"))
    if "A_log" in t:
        q, k = (x / (x.square().sum(-1, keepdim=True) + L2NORM_EPS).sqrt() for x in (q, k))
        g = -t["A_log"].exp() * F.softplus(g + t["dt_bias"])
    q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], 1) for x in (q, k))
    state, out = v.new_zeros(*k.shape[1:], v.shape[2]), []
    for i in range(len(v)):
        state = state * g[i].exp()[:, None, None]
        u = beta[i][:, None] * (v[i] - torch.einsum("hkv,hk->hv", state, k[i]))
        state = state + torch.einsum("hk,hv->hkv", k[i], u)
        out.append(torch.einsum("hkv,hk->hv", state, q[i]) * q.shape[-1] ** -0.5)
    return torch.stack(out)[None]


def results(case: Case, t: Inputs) -> dict[str, torch.Tensor]:
    """`case.part` of the result, or of the gradient of each operand, by name."""
    leaves = {
        name: case.part(name, value.detach()).double().requires_grad_(value.requires_grad)
        for name, value in t.items()
    }
    ops = {"conv": _conv, "norm_gate": _norm_gate, "gate_norm": _gate_norm}
    out = ops.get(case.op, _delta)(leaves)
    if case.direction == "fwd":
        return {"out": out.detach()}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(out, list(wanted.values()), leaves["d0"])
    return dict(zip(wanted, gradients, strict=True))
