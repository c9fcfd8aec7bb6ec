"""The five ops in float64, written as they are read, with torch's own gradients.

`tests.oracles.mhc` has the same with bounds of errors, backwards written out, and many times
the memory: too much for the largest sizes on a card.  A test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_kernels.mhc.config import mappings
from tests.mhc import cases, runs
from tests.mhc.cases import Case, Inputs

Named = dict[str, torch.Tensor]


def _gradients(made: list[torch.Tensor], given: list[torch.Tensor], leaves: Named) -> Named:
    present = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    given = [g.double().reshape(t.shape) for t, g in zip(made, given, strict=True)]
    grads = torch.autograd.grad(made, list(present.values()), given)
    return {f"d_{name}": g for name, g in zip(present, grads, strict=True)}


def _leaves(**tensors: torch.Tensor | None) -> Named:
    return {
        name: None if t is None else t.detach().double().requires_grad_()
        for name, t in tensors.items()
    }


def _project(case: Case, x: Inputs) -> Named:
    up = cases.upstream_of(case, x)
    a = _leaves(x=x.x.flatten(1), phi=x.phi, norm_weight=x.norm_weight)
    psi = a["phi"] if a["norm_weight"] is None else a["phi"] * a["norm_weight"]
    h, ms = a["x"] @ psi.mT, a["x"].square().mean(1)
    return {"h": h.detach(), "ms": ms.detach()} | _gradients([h, ms], [up.h, up.ms], a)


def _gate(case: Case, x: Inputs) -> Named:
    up, o, n = cases.upstream_of(case, x), case.options, case.n
    h, ms = runs.h_of(case, x)
    a = _leaves(h=h[:, : mappings(n)], ms=ms, alpha=x.alpha, beta=x.beta.view(-1))
    alpha = a["alpha"].repeat_interleave(torch.tensor([n, n, n * n]))
    z = alpha * a["h"] / (a["ms"] + o.eps).sqrt()[:, None] + a["beta"]
    pre, post = z[:, :n].sigmoid() + o.pre_eps, z[:, n : 2 * n].sigmoid() * o.post_scale
    out = [pre, post, z[:, 2 * n :]]
    values = {name: t.detach() for name, t in zip(("pre", "post", "res"), out, strict=True)}
    return values | _gradients(out, [up.pre, up.post, up.res], a)


def _sinkhorn(case: Case, x: Inputs) -> Named:
    a = _leaves(z=runs.logits_of(case))
    rows = a["z"]
    for _ in range(case.options.iterations):
        rows = rows.log_softmax(2).log_softmax(1)
    p = rows.exp()
    return {"p": p.detach()} | _gradients([p], [cases.upstream_of(case, x).res], a)


def _collapse(case: Case, x: Inputs) -> Named:
    a = _leaves(x=x.x, pre=x.pre)
    out = (a["x"] @ a["pre"][:, :, None])[:, :, 0]
    return {"out": out.detach()} | _gradients([out], [cases.upstream_of(case, x).out], a)


def _expand(case: Case, x: Inputs) -> Named:
    a = _leaves(f=x.f, bias=x.bias, post=x.post, x=x.x, res=x.res)
    f = a["f"] if a["bias"] is None else a["f"] + a["bias"]
    y = f[:, :, None] * a["post"][:, None] + a["x"] @ a["res"]
    return {"y": y.detach()} | _gradients([y], [cases.upstream_of(case, x).y], a)


# ---- what is added -------------------------------------------------------------------------------


def _added_by_gate(case: Case, x: Inputs) -> Named:
    up, o, n = cases.upstream_of(case, x), case.options, case.n
    h, ms = (t.double() for t in runs.h_of(case, x))
    h, r = h[:, : mappings(n)], (ms + o.eps).sqrt()[:, None]
    sizes = torch.tensor([n, n, n * n])
    alpha = x.alpha.double().repeat_interleave(sizes)
    s = (alpha * h / r + x.beta.double().view(1, -1)).sigmoid()
    slope = s * (1 - s)
    g = torch.cat([up.pre * slope[:, :n], up.post * slope[:, n : 2 * n] * o.post_scale], 1)
    g = torch.cat([g, up.res.flatten(1)], 1)
    of_alpha = (g * h / r).square().sum(0)
    return {
        "d_alpha": torch.stack([t.sum() for t in of_alpha.split(sizes.tolist())]).sqrt(),
        "d_beta": g.square().sum(0).sqrt(),
        "d_ms": (g * alpha * h).square().sum(1).sqrt() / (2 * r[:, 0] ** 3),
    }


def _added_by_collapse(case: Case, x: Inputs) -> Named:
    d_out = cases.upstream_of(case, x).out.double()
    return {"d_pre": (d_out.square()[:, None] @ x.x.double().square())[:, 0].sqrt()}


def _added_by_expand(case: Case, x: Inputs) -> Named:
    dy = cases.upstream_of(case, x).y.double().square()
    f = x.f.double() if x.bias is None else x.f.double() + x.bias.double()
    d_post = (f.square()[:, None] @ dy)[:, 0]
    d_res = (x.x.double().square().mT @ dy).flatten(1)
    return {"d_post": d_post.sqrt(), "d_res": d_res.sqrt()}


#: Of results that are sums of terms of either sign: the root of the sum of the terms' squares.
ADDED: dict[str, Callable[[Case, Inputs], Named]] = {
    "gate": _added_by_gate,
    "collapse": _added_by_collapse,
    "expand": _added_by_expand,
}

#: By the names of `runs.OPS`; of the layout "cn" and the form "log".
EXACT: dict[str, Callable[[Case, Inputs], Named]] = {
    "project": _project,
    "gate": _gate,
    "sinkhorn": _sinkhorn,
    "collapse": _collapse,
    "expand": _expand,
}
