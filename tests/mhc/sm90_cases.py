"""Checks of the launchers of mhc's SM90 kernels, by the oracle's bounds.

A check takes the tensors of a case (`triton_cases.given`) and runs inside `simulated.simulated`.
Where two ways lead to a result, both must have its bytes.
"""

from __future__ import annotations

import torch

from cute_kernels.mhc.config import TOKENS, WIDTH, mappings
from cute_kernels.mhc.tensors import Expand, Gates, Mapping, Parts, Sinkhorn, Upstream
from tests.contract import bits, same_bytes
from tests.mhc.cases import share
from tests.mhc.simulated import launchers as launch
from tests.mhc.triton_cases import FORMS as OTHER_FORMS
from tests.mhc.triton_cases import Given, equal, given
from tests.oracles import mhc as reference
from tests.oracles.error_bounds import Near

FP32 = torch.float32
#: Of three iterations every one shows: of twenty most divide by nearly 1.
FORMS = (*OTHER_FORMS, Sinkhorn(3, "log", 1e-6))
#: The most that H may be wrong by, root mean square, of its own.
RMS = 1e-5


def near(got: torch.Tensor, want: Near) -> None:
    """Every element is finite and within its bound."""
    assert got.numel() and got.isfinite().all()
    assert (out := share(got, want)) <= 1, f"{out:.3g} times the bound"


# ---- the oracle's arguments ----------------------------------------------------------------------


def mapping_of(g: Given) -> Mapping:
    """Mapping of the operands, in float64."""
    weight = g.mapping.norm_weight
    return Mapping(
        g.mapping.phi.double(), None if weight is None else weight.double(), g.mapping.precision
    )


def gates_of(g: Given) -> Gates:
    """Gates of the operands, in float64."""
    return g.gates._replace(alpha=g.gates.alpha.double(), beta=g.gates.beta.double())


def expand_of(g: Given) -> Expand:
    """Expand operands, in float64."""
    return Expand(*(None if t is None else t.double() for t in g.expand))


def added(parts: Parts, columns: int) -> torch.Tensor:
    """Parts of vectors, from zero."""
    total = torch.zeros(columns)
    launch.add_parts(parts, total)
    return total


def sites_of(g: Given) -> tuple[Expand, ...]:
    """Four sites with operands of their own."""
    return tuple(given(g.shape, seed=seed).expand for seed in range(3, 7))


def site_by_site(g: Given, sites: tuple[Expand, ...]) -> list[torch.Tensor]:
    """Streams after each site, by one combine each."""
    x, ys = g.x, []
    for site in sites:
        x, _ = launch.combine(x, g.streams, None, site)
        ys.append(x)
    return ys


# ---- forward -------------------------------------------------------------------------------------


def projection(g: Given) -> None:
    """H and ms, and zeros behind H's columns."""
    out = launch.project(g.x, g.mapping, g.streams)
    assert out.y is None
    h, ms = launch.add_chunks(out, g.x.shape[1], g.shape.n)
    columns = mappings(g.shape.n)
    assert h.shape[1] == WIDTH[g.shape.n] and not bits(h[:, columns:]).any()
    want_h, want_ms = reference.projection(g.x.double(), mapping_of(g), g.streams)
    near(h[:, :columns], want_h)
    near(ms, want_ms)
    error = (h[:, :columns].double() - want_h.value).square().mean().sqrt()
    assert error <= RMS * want_h.value.square().mean().sqrt()


def expanded(g: Given) -> None:
    """Streams that are projected, or collapsed, in the pass that makes them: the bytes of two."""
    y, nothing = launch.combine(g.x, g.streams, None, g.expand)
    none, out = launch.combine(y, g.streams, g.pre, None)
    assert nothing is None and none is None
    fused = launch.project(g.x, g.mapping, g.streams, g.expand)
    equal(fused, (*launch.project(y, g.mapping, g.streams)[:2], y))
    equal(launch.combine(g.x, g.streams, g.pre, g.expand), (y, out))


def combine(g: Given) -> None:
    """y and out, each alone."""
    y, _ = launch.combine(g.x, g.streams, None, g.expand)
    near(y, reference.expand_combine(g.x.double(), expand_of(g), g.streams))
    _, out = launch.combine(g.x, g.streams, g.pre, None)
    near(out, reference.aggregate(g.x.double(), g.pre.double(), g.streams))


def recompute(g: Given) -> None:
    """Streams after 2, 3 and 4 sites in one pass: the bytes of combine, site by site."""
    sites = sites_of(g)
    for count in (2, 3, 4):
        found = launch.recompute(g.x, g.streams, sites[:count])
        equal(found, site_by_site(g, sites[:count]))


def coefficients(g: Given) -> None:
    """Check coefficients: one kernel has the bytes of three, each within its bounds."""
    n, k = g.shape.n, g.x.shape[1]
    out = launch.project(g.x, g.mapping, g.streams)
    h, ms = launch.add_chunks(out, k, n)
    pre, post, z = launch.gate(h, ms, g.gates, n)
    for form in FORMS:
        p = launch.sinkhorn(z, n, form)
        equal(launch.coefficients(out, k, g.gates, n, form), (h, ms, pre, post, p))
        near(
            launch.sinkhorn(g.res, n, form),
            reference.sinkhorn(g.res.double(), n, form),
        )
    coefficients_out = launch.gate(g.h, g.ms, g.gates, n)
    used = g.h[:, : mappings(n)].double()
    for got, want in zip(
        coefficients_out, reference.scale(used, g.ms.double(), gates_of(g), n), strict=True
    ):
        near(got, want)


# ---- backward ------------------------------------------------------------------------------------


def reduce(g: Given) -> None:
    """Every kind of pass that the catalogue has."""
    expand_operands, both = Expand(g.f, g.bias, g.post), Upstream(g.dy, g.d_out, g.res, g.pre)
    of_out = Upstream(d_out=g.d_out, pre=g.pre)
    passes = {
        "df d_bias d_post d_res dx": (g.x, Upstream(g.dy, res=g.res), expand_operands, True),
        "df d_bias d_post": (None, Upstream(g.dy), expand_operands, False),
        "d_res d_pre": (g.x, both, None, False),
        "d_res": (g.x, Upstream(g.dy), None, False),
        "d_pre dx": (g.x, of_out, None, True),
        "d_pre": (g.x, of_out, None, False),
    }
    x, dy, d_out = g.x.double(), g.dy.double(), g.d_out.double()
    end = reference.expand_combine_backward(x, expand_of(g), dy, g.streams)
    dx, d_pre = reference.aggregate_backward(x, g.pre.double(), d_out, g.streams)
    want = {"df": end.f, "d_post": end.post, "d_res": end.res, "d_pre": d_pre, "d_bias": end.bias}
    for names, (read, upstream, expand, want_dx) in passes.items():
        got = launch.reduce_channels(read, g.streams, upstream, expand, want_dx)._asdict()
        present = {name for name, t in got.items() if t is not None}
        expected = set(names.split()) - ({"d_bias"} if g.bias is None else set())
        assert present == expected, names
        if got["d_bias"] is not None:
            got["d_bias"] = added(got["d_bias"], g.shape.c)
        for name in present:
            near(got[name], (want | {"dx": dx if expand is None else end.x})[name])


def gates_backward(g: Given) -> None:
    """Check the gates' backward: one kernel has the bytes of two, each within its bounds."""
    n, other = g.shape.n, given(g.shape, seed=1)
    coming = (other.pre, other.post, other.res)
    d_h, d_ms, parts = launch.gate_backward(g.h, g.ms, g.gates, n, *coming)
    assert not bits(d_h[:, mappings(n) :]).any()
    used, upstream = g.h[:, : mappings(n)].double(), tuple(t.double() for t in coming)
    want = reference.scale_backward(used, g.ms.double(), gates_of(g), n, upstream)
    near(d_h[:, : mappings(n)], want.h)
    near(d_ms, want.ms)
    sums = added(parts, 3 + mappings(n))
    near(sums[:3], want.alpha)
    near(sums[3:], want.beta)
    *_, z = launch.gate(g.h, g.ms, g.gates, n)
    for form in FORMS:
        d_z = launch.sinkhorn_backward(z, other.res, n, form)
        near(d_z, reference.sinkhorn_backward(z.double(), other.res.double(), n, form))
        *fused, own = launch.coefficients_backward(g.h, g.ms, g.gates, n, form, *coming)
        *apart, parts = launch.gate_backward(g.h, g.ms, g.gates, n, *coming[:2], d_z)
        equal((*fused, own.values), (*apart, parts.values))


#: Of a projection's backward: what comes besides.  A kernel each, of which two are compiled by day.
KINDS = ("res and out", "nothing", "add", "out", "add and out", "res")


def upstream_of(g: Given, kind: str) -> Upstream:
    """Upstream gradients by name."""
    dy = None if kind in ("nothing", "out") else g.dy
    out = (g.d_out, g.pre) if "out" in kind else (None, None)
    return Upstream(dy, out[0], g.res if "res" in kind else None, out[1])


def projection_backward(g: Given, kinds: tuple[str, ...] = KINDS[:2]) -> None:
    """dx and dpsi, together and alone, of each kind of upstream."""
    x, d_h, d_ms = g.x.double(), g.h, given(g.shape, seed=2).ms - 0.7
    used = d_h[:, : mappings(g.shape.n)].double()
    own = reference.projection_backward(x, used, d_ms.double(), mapping_of(g))
    end = reference.expand_combine_backward(x, expand_of(g), g.dy.double(), g.streams)
    of_out, _ = reference.aggregate_backward(x, g.pre.double(), g.d_out.double(), g.streams)
    first = None
    for kind in kinds:
        upstream = upstream_of(g, kind)
        of = (g.x, d_h, d_ms, g.mapping, g.streams, upstream)
        dx, parts = launch.project_backward(*of, (True, True))
        want = own.x
        if upstream.dy is not None:
            want = want + (end.x if upstream.res is not None else g.dy.double())
        near(dx, want if upstream.d_out is None else want + of_out)
        assert len(parts.values) == -(-g.shape.m // TOKENS) and parts.group == 1
        first = parts.values if first is None else first
        # What goes on to x besides shows in no weight.
        assert same_bytes(parts.values, first)
    equal(launch.project_backward(*of, (True, False)), (dx, None))
    nothing, alone = launch.project_backward(*of, (False, True))
    assert nothing is None and same_bytes(alone.values, first)
    weights(g, Parts(first), own)


def weights(g: Given, parts: Parts, want: reference.ProjectionGradients) -> None:
    """dphi and dnorm_weight of parts of dpsi; the one alone has the bytes of both."""
    phi = torch.zeros_like(g.mapping.phi)
    weight = None if g.mapping.norm_weight is None else torch.zeros_like(g.mapping.norm_weight)
    launch.weights(parts, g.mapping, phi, weight)
    near(phi, want.phi)
    if weight is not None:
        near(weight, want.norm_weight)
        alone = torch.zeros_like(phi)
        launch.weights(parts, g.mapping, alone, None)
        assert same_bytes(alone, phi)


#: Every check, by its name.
CHECKS = {
    check.__name__: check
    for check in (
        projection,
        expanded,
        combine,
        recompute,
        coefficients,
        reduce,
        gates_backward,
        projection_backward,
    )
}


def far_logits() -> None:
    """Columns still sum to one, and gradients are finite; of the log form."""
    form = Sinkhorn(20, "log", 1e-6)
    for n in (2, 4):
        z = 200 * torch.randn(9, n * n, generator=torch.Generator().manual_seed(n))
        z[0], z[1, :n], z[2, ::n], z[3, 0] = 0.0, -1e4, -1e4, 1e30
        p = launch.sinkhorn(z, n, form)
        sums = p.double().view(-1, n, n).sum(1)
        # Of a reciprocal, a product for each of n, and the sum here is exact.
        assert ((sums - 1).abs() <= 8 * 2.0**-24 * n).all()
        d_p = torch.randn(9, n * n, generator=torch.Generator().manual_seed(n + 1))
        assert launch.sinkhorn_backward(z, d_p, n, form).isfinite().all()
