"""Run the public functions of mhc, forward and backward, beside the oracle's results."""

from __future__ import annotations

import torch

from cute_kernels.mhc import (
    aggregate,
    connect,
    expand_combine,
    head,
    mix_and_aggregate,
    post_pre,
    projection,
    scale,
    sinkhorn,
)
from cute_kernels.mhc.config import mappings
from tests.mhc import cases
from tests.mhc.cases import Case, Inputs
from tests.oracles import mhc as reference
from tests.oracles.error_bounds import Near, exact

Results = tuple[dict[str, torch.Tensor], dict[str, Near | None]]


def leaves_of(x: Inputs, leading: tuple[int, ...] | None = None) -> Inputs:
    """Copies that need gradients; tokens in ``leading`` dimensions."""
    m, out = len(x.x), []
    for name, t in zip(x._fields, x, strict=True):
        if t is not None:
            of_tokens = name in ("x", "f", "pre", "post", "res")
            t = t.view(*leading, *t.shape[1:]) if leading is not None and of_tokens else t
            t = t.detach().clone().requires_grad_()
        out.append(t)
    assert leading is None or m == torch.Size(leading).numel()
    return Inputs(*out)


def gradients(leaves: Inputs, *names: str) -> dict[str, torch.Tensor]:
    """Gradients that are not None, by name."""
    out = {f"d_{name}": getattr(leaves, name) for name in names}
    return {name: t.grad for name, t in out.items() if t is not None}


def _backward(made: list[torch.Tensor], upstream: list[torch.Tensor]) -> None:
    shaped = [g.reshape(t.shape) for t, g in zip(made, upstream, strict=True)]
    torch.autograd.backward(made, shaped)


def _named(made, prefix: str = "d_") -> dict[str, Near | None]:
    return {prefix + name: t for name, t in zip(made._fields, made, strict=True)}


# ---- the five ops --------------------------------------------------------------------------------


def h_of(case: Case, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """H and ms, that `scale` is given."""
    with torch.no_grad():
        return projection(x.x, x.phi, norm_weight=x.norm_weight, layout=case.layout)


def logits_of(case: Case) -> torch.Tensor:
    """Logits of `sinkhorn`: fp32 [M, n, n], of the case's spread."""
    return case.spread * cases.normal(case.m, case.n, case.n, seed=case.seed + 7)


def of_project(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    """`projection` and its gradients."""
    a, up = leaves_of(x), cases.upstream_of(case, x)
    h, ms = projection(
        a.x,
        a.phi,
        norm_weight=a.norm_weight,
        layout=case.layout,
        precision=case.options.precision,
    )
    used = h[:, : mappings(case.n)]
    _backward([used, ms], [up.h, up.ms])
    return {"h": used, "ms": ms} | gradients(a, "x", "phi", "norm_weight")


def of_gate(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    """`scale` of `h_of`, and its gradients."""
    a, up, o, n = leaves_of(x), cases.upstream_of(case, x), case.options, case.n
    h, ms = (t.requires_grad_() for t in h_of(case, x))
    numbers = {"eps": o.eps, "pre_eps": o.pre_eps, "post_scale": o.post_scale}
    out = scale(h, a.alpha, a.beta, ms, n, **numbers)
    _backward(list(out), [up.pre, up.post, up.res])
    got = dict(zip(("pre", "post", "res"), out, strict=True)) | gradients(a, "alpha", "beta")
    return got | {"d_h": h.grad[:, : mappings(n)], "d_ms": ms.grad}


def of_normalise(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    """`sinkhorn` of `logits_of`, and its gradient."""
    o, z = case.options, logits_of(case).requires_grad_()
    p = sinkhorn(z, case.n, iterations=o.iterations, form=o.form, eps=o.form_eps)
    p.backward(cases.upstream_of(case, x).res)
    return {"p": p, "d_z": z.grad}


def of_collapse(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    """`aggregate` and its gradients."""
    a, up = leaves_of(x), cases.upstream_of(case, x)
    out = aggregate(a.x, a.pre, case.n, layout=case.layout)
    _backward([out], [up.out])
    return {"out": out} | gradients(a, "x", "pre")


def of_expand(
    case: Case, x: Inputs, leading: tuple[int, ...] | None = None
) -> dict[str, torch.Tensor]:
    """`expand_combine` and its gradients."""
    a, up = leaves_of(x, leading), cases.upstream_of(case, x)
    y = expand_combine(a.f, a.bias, a.post, a.x, a.res, case.n, layout=case.layout)
    _backward([y], [up.y])
    return {"y": y} | gradients(a, "f", "bias", "post", "x", "res")


#: By the names of `FUNCTIONS`, without the oracle.
OPS = {
    "project": of_project,
    "gate": of_gate,
    "sinkhorn": of_normalise,
    "collapse": of_collapse,
    "expand": of_expand,
}


def project(case: Case, x: Inputs) -> Results:
    """`projection`."""
    up, mapping, rows = cases.upstream_of(case, x), cases.mapping_of(case, x), cases.rows(x.x)
    want = reference.projection(rows, mapping, case.streams)
    back = reference.projection_backward(rows, up.h, up.ms, mapping)
    return of_project(case, x), {"h": want[0], "ms": want[1]} | _named(back)


def gate(case: Case, x: Inputs) -> Results:
    """`scale`, of the H and ms of the case in fp32."""
    up, n, gates = cases.upstream_of(case, x), case.n, cases.gates_of(case, x)
    h, ms = h_of(case, x)
    exact_h, exact_ms = h[:, : mappings(n)].double(), ms.double()
    want = reference.scale(exact_h, exact_ms, gates, n)
    upstream = tuple(cases.rows(t) for t in (up.pre, up.post, up.res))
    back = reference.scale_backward(exact_h, exact_ms, gates, n, upstream)
    named = dict(zip(("pre", "post", "res"), want, strict=True))
    return of_gate(case, x), named | _named(back)


def normalise(case: Case, x: Inputs) -> Results:
    """`sinkhorn`, of logits of the case's spread."""
    n, form, rows = case.n, cases.form_of(case.options), cases.rows(logits_of(case))
    back = reference.sinkhorn_backward(rows, cases.rows(cases.upstream_of(case, x).res), n, form)
    return of_normalise(case, x), {"p": reference.sinkhorn(rows, n, form), "d_z": back}


def collapse(case: Case, x: Inputs) -> Results:
    """`aggregate`."""
    up, tensors = cases.upstream_of(case, x), (cases.rows(x.x), x.pre.double())
    dx, d_pre = reference.aggregate_backward(*tensors, up.out.double(), case.streams)
    want = {"out": reference.aggregate(*tensors, case.streams), "d_x": dx, "d_pre": d_pre}
    return of_collapse(case, x), want


def expand(case: Case, x: Inputs, leading: tuple[int, ...] | None = None) -> Results:
    """`expand_combine`."""
    up, rows, by = cases.upstream_of(case, x), cases.rows(x.x), cases.expand_of(x)
    back = reference.expand_combine_backward(rows, by, cases.rows(up.y), case.streams)
    want = {"y": reference.expand_combine(rows, by, case.streams)} | _named(back)
    return of_expand(case, x, leading), want


# ---- fusions -------------------------------------------------------------------------------------

_WEIGHTS = ("phi", "norm_weight", "alpha", "beta")


def mix(case: Case, x: Inputs, leading: tuple[int, ...] | None = None) -> Results:
    """`mix_and_aggregate`."""
    a, up = leaves_of(x, leading), cases.upstream_of(case, x)
    weights = {"norm_weight": a.norm_weight, "options": case.options}
    out = mix_and_aggregate(a.x, a.phi, a.alpha, a.beta, **weights)
    _backward(list(out), [up.out, up.post, up.res])
    rows, site = cases.rows(x.x), cases.site_of(case, x)
    want = reference.mix_and_aggregate(rows, site)
    inputs = reference.Given(*(cases.rows(t) for t in (up.out, up.pre, up.post, up.res)))
    back = reference.mix_and_aggregate_backward(rows, site, inputs._replace(pre=None))
    got = dict(zip(("out", "post", "res"), out, strict=True)) | gradients(a, "x", *_WEIGHTS)
    return got, _named(want, "") | _named(back)


def top(case: Case, x: Inputs, mains: bool = False) -> Results:
    """`head`, of the rows of H_pre: to the oracle, a site whose other rows are zeros.

    With ``mains``, what it adds to main_grads of zeros, by the gradients' names.
    """
    up, n = cases.upstream_of(case, x), case.n
    a = leaves_of(x._replace(phi=x.phi[:n], alpha=x.alpha[:1], beta=x.beta[0, :n]))
    own = {name: getattr(a, name) for name in _WEIGHTS if getattr(a, name) is not None}
    sums = {name: torch.zeros_like(t, dtype=torch.float32) for name, t in own.items()}
    weights = {"norm_weight": a.norm_weight, "options": case.options}
    out = head(a.x, a.phi, a.alpha, a.beta, **weights, main_grads=sums if mains else None)
    _backward([out], [up.out])
    got = {"out": out} | gradients(a, "x", *_WEIGHTS)
    got |= {f"d_{name}": t for name, t in sums.items()} if mains else {}
    whole = {name: getattr(x, name).clone() for name in ("phi", "alpha", "beta")}
    whole["phi"][n:], whole["alpha"][1:], whole["beta"][:, n:] = 0, 0, 0
    rows, site = cases.rows(x.x), cases.site_of(case, x._replace(**whole))
    inputs = reference.Given(cases.rows(up.out))
    back = _named(reference.mix_and_aggregate_backward(rows, site, inputs))
    for name, size in {"d_phi": n, "d_alpha": 1, "d_beta": n}.items():
        value, error = back[name]
        back[name] = Near(value[:size], error[:size])
    return got, {"out": reference.mix_and_aggregate(rows, site).out} | back


def top_into_main_grads(case: Case, x: Inputs) -> Results:
    """`head`, whose gradients go into main_grads."""
    return top(case, x, mains=True)


def both(case: Case, x: Inputs, shift: bool = False) -> Results:
    """`post_pre`: the y that it made is where the next site of the oracle begins."""
    a, up = leaves_of(x), cases.upstream_of(case, x)
    out = post_pre(
        a.f, a.bias, a.post, a.x, a.res, a.phi, a.alpha, a.beta,
        H_pre=a.pre if shift else None, norm_weight=a.norm_weight, options=case.options,
    )  # fmt: skip
    upstream = [up.y, up.out, up.post, up.res] + [up.pre] * shift
    _backward(list(out), upstream)
    rows, by, site = cases.rows(x.x), cases.expand_of(x), cases.site_of(case, x)
    y = cases.rows(out[0])
    shifted = x.pre.double() if shift else None
    of_site = reference.mix_and_aggregate(y, site, shifted)
    inputs = reference.Given(
        *(cases.rows(t) for t in (up.out, up.pre, up.post, up.res)), x=cases.rows(up.y)
    )
    inputs = inputs if shift else inputs._replace(pre=None)
    back = reference.mix_and_aggregate_backward(y, site, inputs, shifted)
    d_y = back.x.stored(x.x.dtype)
    end = reference.expand_combine_backward(rows, by, d_y, case.streams)
    names = ("y", "out", "post", "res", "pre")
    got = dict(zip(names, out, strict=False))
    got |= gradients(a, "f", "bias", "post", "x", "res", *_WEIGHTS)
    want = _named(of_site, "") | {"y": reference.expand_combine(rows, by, case.streams)}
    want |= _named(back) | _named(end) | {"d_pre": back.shifted}
    return got | (gradients(a, "pre") if shift else {}), want


def shifted(case: Case, x: Inputs) -> Results:
    """`post_pre` that collapses with the pre of the site before."""
    return both(case, x, shift=True)


def whole(case: Case, x: Inputs) -> Results:
    """`connect`, of a sublayer f = out ⊙ 1.5 in the dtype of x: exact but for its rounding."""
    a, up = leaves_of(x), cases.upstream_of(case, x)
    kept = []

    def sublayer(out):
        kept.append(out)
        return out * 1.5

    others = {"bias": a.bias, "norm_weight": a.norm_weight, "options": case.options}
    y = connect(a.x, sublayer, a.phi, a.alpha, a.beta, **others)
    _backward([y], [up.y])
    rows, site = cases.rows(x.x), cases.site_of(case, x)
    made = reference.mix_and_aggregate(rows, site)
    dtype = x.x.dtype
    # What the sublayer got is in the test's hands.
    f = exact(cases.rows(kept[0]) * 1.5).stored(dtype)
    by = reference.Expand(f, x.bias, made.post, made.res)
    back = reference.expand_combine_backward(rows, by, cases.rows(up.y), case.streams)
    d_out = (back.f.stored(dtype) * 1.5).stored(dtype)
    inputs = reference.Given(d_out, None, back.post, back.res, back.x)
    of_site = reference.mix_and_aggregate_backward(rows, site, inputs)
    want = {"y": reference.expand_combine(rows, by, case.streams), "d_bias": back.bias}
    return {"y": y} | gradients(a, "x", "bias", *_WEIGHTS), want | _named(of_site)


FUNCTIONS = {
    "project": project,
    "gate": gate,
    "sinkhorn": normalise,
    "collapse": collapse,
    "expand": expand,
    "mix": mix,
    "both": both,
    "shifted": shifted,
    "whole": whole,
    "head": top,
    "head, main_grads": top_into_main_grads,
}
