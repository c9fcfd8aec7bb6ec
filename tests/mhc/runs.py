"""Run the public functions of mhc, forward and backward, beside the oracle's results."""

from __future__ import annotations

import functools

import torch

from cute_kernels.mhc import mix_and_aggregate
from cute_kernels.mhc.config import mappings
from tests.mhc import calls, cases
from tests.mhc.cases import Case, Inputs
from tests.oracles import mhc as reference
from tests.oracles.error_bounds import Near, exact

Named = dict[str, torch.Tensor]
Wanted = dict[str, Near | None]


def run(
    name: str, case: Case, x: Inputs, leading: tuple | None = None, mains: bool = False
) -> Named:
    """Results by name, and gradients as d_<leaf>; columns of H's padding are left out.

    With ``mains``, what is added to main_grads of zeros is given as the gradients of weights.
    """
    call, up = calls.CALLS[name], cases.upstream_of(case, x)
    a = calls.leaves_of(calls.weights_of(name, x), leading)
    leaves = {leaf: t for leaf in call.leaves if (t := getattr(a, leaf)) is not None}
    sums = {
        w: torch.zeros_like(t).float() for w, t in leaves.items() if mains and w in calls.WEIGHTS
    }
    out = dict(zip(call.results, call(a, case, sums if mains else None), strict=True))
    if "h" in out:
        out["h"] = out["h"][:, : mappings(case.n)]
    upstream = [getattr(up, result).reshape(t.shape) for result, t in out.items()]
    torch.autograd.backward(list(out.values()), upstream)
    grads = {f"d_{leaf}": t.grad for leaf, t in leaves.items() if t.grad is not None}
    if "d_h" in grads:
        grads["d_h"] = grads["d_h"][:, : mappings(case.n)]
    return out | grads | {f"d_{weight}": t.detach() for weight, t in sums.items()}


# ---- the oracle ----------------------------------------------------------------------------------


def _named(made, prefix: str = "d_") -> Wanted:
    return {prefix + name: t for name, t in zip(made._fields, made, strict=True)}


def _given(case: Case, x: Inputs, *names: str) -> reference.Given:
    """Upstream gradients of a site; ``names``: those that there are, x's is that of y."""
    up = cases.upstream_of(case, x)._asdict()
    up["x"] = up["y"]
    return reference.Given(**{name: cases.rows(up[name]) for name in names})


def _projection(case: Case, x: Inputs, got: Named) -> Wanted:
    up, mapping, rows = cases.upstream_of(case, x), cases.mapping_of(case, x), cases.rows(x.x)
    h, ms = reference.projection(rows, mapping, case.streams)
    back = reference.projection_backward(rows, up.h.double(), up.ms.double(), mapping)
    return {"h": h, "ms": ms} | _named(back)


def _scale(case: Case, x: Inputs, got: Named) -> Wanted:
    up, n = cases.upstream_of(case, x), case.n
    given = (x.h[:, : mappings(n)].double(), x.ms.double(), cases.gates_of(case, x), n)
    want = dict(zip(("pre", "post", "res"), reference.scale(*given), strict=True))
    upstream = tuple(cases.rows(t) for t in (up.pre, up.post, up.res))
    return want | _named(reference.scale_backward(*given, upstream))


def _sinkhorn(case: Case, x: Inputs, got: Named) -> Wanted:
    n, form, z = case.n, cases.form_of(case.options), cases.rows(x.z)
    back = reference.sinkhorn_backward(z, cases.rows(cases.upstream_of(case, x).res), n, form)
    return {"res": reference.sinkhorn(z, n, form), "d_z": back}


def _aggregate(case: Case, x: Inputs, got: Named) -> Wanted:
    tensors, d_out = (cases.rows(x.x), x.pre.double()), cases.upstream_of(case, x).out.double()
    dx, d_pre = reference.aggregate_backward(*tensors, d_out, case.streams)
    return {"out": reference.aggregate(*tensors, case.streams), "d_x": dx, "d_pre": d_pre}


def _expand(case: Case, x: Inputs, got: Named, dy: Near | None = None) -> Wanted:
    rows, by = cases.rows(x.x), cases.expand_of(x)
    dy = cases.rows(cases.upstream_of(case, x).y) if dy is None else dy
    back = reference.expand_combine_backward(rows, by, dy, case.streams)
    return {"y": reference.expand_combine(rows, by, case.streams)} | _named(back)


def _mix(case: Case, x: Inputs, got: Named) -> Wanted:
    rows, site = cases.rows(x.x), cases.site_of(case, x)
    given = _given(case, x, "out", "post", "res")
    back = reference.mix_and_aggregate_backward(rows, site, given)
    return _named(reference.mix_and_aggregate(rows, site), "") | _named(back)


def _head(case: Case, x: Inputs, got: Named) -> Wanted:
    """A site whose other rows are zeros."""
    whole, n = {name: getattr(x, name).clone() for name in ("phi", "alpha", "beta")}, case.n
    whole["phi"][n:], whole["alpha"][1:], whole["beta"][:, n:] = 0, 0, 0
    rows, site = cases.rows(x.x), cases.site_of(case, x._replace(**whole))
    back = _named(reference.mix_and_aggregate_backward(rows, site, _given(case, x, "out")))
    for name, size in {"d_phi": n, "d_alpha": 1, "d_beta": n}.items():
        back[name] = Near(back[name].value[:size], back[name].error[:size])
    return {"out": reference.mix_and_aggregate(rows, site).out} | back


def _post_pre(case: Case, x: Inputs, got: Named) -> Wanted:
    """The y that was made is where the next site begins."""
    site, y, shifted = cases.site_of(case, x), cases.rows(got["y"]), None
    given = _given(case, x, "out", "post", "res", "x")
    if "pre" in got:
        shifted = x.pre.double()
        given = given._replace(pre=_given(case, x, "pre").pre)
    of_site = _named(reference.mix_and_aggregate(y, site, shifted), "")
    back = reference.mix_and_aggregate_backward(y, site, given, shifted)
    end = _expand(case, x, got, back.x.stored(x.x.dtype))
    return of_site | _named(back) | end | {"d_pre": back.shifted}


def _connect(case: Case, x: Inputs, got: Named) -> Wanted:
    rows, site, dtype = cases.rows(x.x), cases.site_of(case, x), x.x.dtype
    weights = {"norm_weight": x.norm_weight, "options": case.options}
    out, *_ = mix_and_aggregate(x.x, x.phi, x.alpha, x.beta, **weights)
    made = reference.mix_and_aggregate(rows, site)
    f = exact(cases.rows(out) * 1.5).stored(dtype)
    by = reference.Expand(f, x.bias, made.post, made.res)
    dy = cases.rows(cases.upstream_of(case, x).y)
    back = reference.expand_combine_backward(rows, by, dy, case.streams)
    d_out = (back.f.stored(dtype) * 1.5).stored(dtype)
    given = reference.Given(d_out, None, back.post, back.res, back.x)
    of_site = reference.mix_and_aggregate_backward(rows, site, given)
    want = {"y": reference.expand_combine(rows, by, case.streams), "d_bias": back.bias}
    return want | _named(of_site)


def _repeat(case: Case, x: Inputs, got: Named) -> Wanted:
    dy = cases.rows(cases.upstream_of(case, x).y)
    repeated = reference.repeat(x.f.double(), case.streams)
    return {"y": repeated, "d_f": reference.repeat_backward(dy, case.streams)}


ORACLES = {
    "projection": _projection,
    "scale": _scale,
    "sinkhorn": _sinkhorn,
    "aggregate": _aggregate,
    "expand_combine": _expand,
    "mix_and_aggregate": _mix,
    "post_pre": _post_pre,
    "shifted": _post_pre,
    "connect": _connect,
    "head": _head,
    "expand_from_embedding": _repeat,
}


def compared(name: str, case: Case, x: Inputs, **options) -> tuple[Named, Wanted]:
    """Results and gradients of a function, and what they must be."""
    got = run(name, case, x, **options)
    return got, ORACLES[name](case, x, got)


#: Function of a case and its tensors -> `compared`.
FUNCTIONS = {name: functools.partial(compared, name) for name in calls.CALLS}
FUNCTIONS["head, main_grads"] = functools.partial(compared, "head", mains=True)
