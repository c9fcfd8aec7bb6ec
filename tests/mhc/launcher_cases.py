"""Checks of mhc's launchers, of SM90 kernels and of Triton's, by the oracle's bounds.

A check takes a launcher module and the tensors of a case.  Where two ways lead to a result, both
must have its bytes; where Triton's arithmetic is the CPU backend's, `bytes_of_cpu` has its bytes.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch

from cute_kernels.mhc import cpu
from cute_kernels.mhc.config import TOKENS, WIDTH, chunk_channels, mappings
from cute_kernels.mhc.tensors import (
    Expand,
    Gates,
    Mapping,
    Parts,
    Projected,
    Sinkhorn,
    Streams,
    Upstream,
)
from tests.contract import bits, same_bytes
from tests.mhc.cases import share
from tests.oracles import mhc as reference
from tests.oracles.error_bounds import Near

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {BF16: "bf16", FP32: "fp32"}
#: The most that H may be wrong by, root mean square, of its own.
RMS = 1e-5
FORMS = (
    Sinkhorn(1, "log", 1e-6),
    Sinkhorn(20, "log", 1e-6),
    Sinkhorn(1, "epsilon", 1e-6),
    Sinkhorn(11, "epsilon", 1e-3),
    # Of three iterations every one shows: of twenty most divide by nearly 1.
    Sinkhorn(3, "log", 1e-6),
)


class Shape(NamedTuple):
    """Shape of a case."""

    m: int
    c: int
    n: int
    layout: str
    dtype: torch.dtype
    precision: str = "bf16x2"
    norm_weight: bool = True
    bias: bool = True


class Given(NamedTuple):
    """Tensors of a case; those of coefficients have room between their rows."""

    shape: Shape
    streams: Streams
    x: torch.Tensor
    dy: torch.Tensor
    f: torch.Tensor
    d_out: torch.Tensor
    bias: torch.Tensor | None
    mapping: Mapping
    gates: Gates
    h: torch.Tensor
    ms: torch.Tensor
    pre: torch.Tensor
    post: torch.Tensor
    res: torch.Tensor

    @property
    def expand(self) -> Expand:
        return Expand(self.f, self.bias, self.post, self.res)


def given(shape: Shape, seed: int = 0) -> Given:
    """Random tensors; rows of x of many magnitudes."""
    random = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(*sizes, generator=random)

    def spread(columns, m=shape.m):
        return normal(m, columns + 3)[:, 1 : columns + 1]

    m, c, n, layout, dtype, *_ = shape
    k, count = n * c, mappings(n)
    scale = torch.rand(m, 1, generator=random) * 4 + 0.1
    return Given(
        shape,
        Streams(n, layout),
        (normal(m, k) * scale).to(dtype),
        normal(m, k).to(dtype),
        normal(m, c).to(dtype),
        normal(m, c).to(dtype),
        normal(c).to(dtype) if shape.bias else None,
        Mapping(
            normal(count, k),
            torch.rand(k, generator=random) + 0.5 if shape.norm_weight else None,
            shape.precision,
        ),
        Gates(normal(3), normal(count), 1e-6, 1e-3, 2.0),
        spread(WIDTH[n]) * 3,
        torch.rand(m, generator=random) + 0.2,
        spread(n),
        spread(n),
        spread(n * n) * 2,
    )


def shifted(t: torch.Tensor | None) -> torch.Tensor | None:
    """Copy of the numbers, one element behind an aligned address."""
    if t is None:
        return None
    room = t.new_empty(t.numel() + 1)
    return room[1:].view(t.shape).copy_(t)


def by_stream(t: torch.Tensor, streams: Streams) -> torch.Tensor:
    """[M, K] as [M, n, C], in float64."""
    if streams.layout == "nc":
        return t.double().view(len(t), streams.n, -1)
    return t.double().view(len(t), -1, streams.n).mT


def equal(got, want) -> None:
    """Check that two tuples of tensors or None have the same bytes."""
    for one, two in zip(got, want, strict=True):
        assert (one is None) == (two is None)
        assert one is None or same_bytes(one, two)


def added(launch: ModuleType, parts: Parts, columns: int) -> torch.Tensor:
    """The sum of parts, from zero."""
    total = torch.zeros(columns)
    launch.add_parts(parts, total)
    return total


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


def sites_of(g: Given) -> tuple[Expand, ...]:
    """Four sites with operands of their own."""
    return tuple(given(g.shape, seed=seed).expand for seed in range(3, 7))


def site_by_site(launch: ModuleType, g: Given, sites: tuple[Expand, ...]) -> list[torch.Tensor]:
    """Streams after each site, by one combine each."""
    x, ys = g.x, []
    for site in sites:
        x, _ = launch.combine(x, g.streams, None, site)
        ys.append(x)
    return ys


# ---- forward -------------------------------------------------------------------------------------


def projection(launch: ModuleType, g: Given) -> None:
    """H and ms, and zeros behind H's columns."""
    out = launch.project(g.x, g.mapping, g.streams)
    assert out.y is None
    h, ms = launch.add_chunks(out, g.x.shape[1], g.shape.n)
    columns = mappings(g.shape.n)
    assert h.shape[1] == WIDTH[g.shape.n] and not bits(h[:, columns:]).any()
    want_h, want_ms = reference.projection(g.x.double(), mapping_of(g), g.streams)
    near(h[:, :columns], want_h)
    near(ms, want_ms)
    chunks = by_stream(g.x, g.streams).split(chunk_channels(g.shape.n, g.shape.precision), 2)
    for got, chunk in zip(out.squares, chunks, strict=True):
        total = chunk.square().sum((1, 2))
        assert ((got - total).abs() <= RMS * total).all()
    error = (h[:, :columns].double() - want_h.value).square().mean().sqrt()
    assert error <= RMS * want_h.value.square().mean().sqrt()


def expanded(launch: ModuleType, g: Given) -> None:
    """Streams that are projected, or collapsed, in the pass that makes them: the bytes of two."""
    y, nothing = launch.combine(g.x, g.streams, None, g.expand)
    none, out = launch.combine(y, g.streams, g.pre, None)
    assert nothing is None and none is None
    fused = launch.project(g.x, g.mapping, g.streams, g.expand)
    equal(fused, (*launch.project(y, g.mapping, g.streams)[:2], y))
    equal(launch.combine(g.x, g.streams, g.pre, g.expand), (y, out))


def combine(launch: ModuleType, g: Given) -> None:
    """y and out, each alone."""
    y, _ = launch.combine(g.x, g.streams, None, g.expand)
    near(y, reference.expand_combine(g.x.double(), expand_of(g), g.streams))
    _, out = launch.combine(g.x, g.streams, g.pre, None)
    near(out, reference.aggregate(g.x.double(), g.pre.double(), g.streams))


def recompute(launch: ModuleType, g: Given) -> None:
    """Streams after 2, 3 and 4 sites in one pass: the bytes of combine, site by site."""
    sites = sites_of(g)
    for count in (2, 3, 4):
        found = launch.recompute(g.x, g.streams, sites[:count])
        equal(found, site_by_site(launch, g, sites[:count]))


def coefficients(launch: ModuleType, g: Given) -> None:
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


def reduce(launch: ModuleType, g: Given) -> None:
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
            got["d_bias"] = added(launch, got["d_bias"], g.shape.c)
        for name in present:
            near(got[name], (want | {"dx": dx if expand is None else end.x})[name])


def gates_backward(launch: ModuleType, g: Given) -> None:
    """Check the gates' backward: one kernel has the bytes of two, each within its bounds."""
    n, other = g.shape.n, given(g.shape, seed=1)
    coming = (other.pre, other.post, other.res)
    d_h, d_ms, parts = launch.gate_backward(g.h, g.ms, g.gates, n, *coming)
    assert not bits(d_h[:, mappings(n) :]).any()
    used, upstream = g.h[:, : mappings(n)].double(), tuple(t.double() for t in coming)
    want = reference.scale_backward(used, g.ms.double(), gates_of(g), n, upstream)
    near(d_h[:, : mappings(n)], want.h)
    near(d_ms, want.ms)
    sums = added(launch, parts, 3 + mappings(n))
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


def projection_backward(launch: ModuleType, g: Given, kinds: tuple[str, ...] = KINDS[:2]) -> None:
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
    weights(launch, g, Parts(first), own)


def weights(
    launch: ModuleType, g: Given, parts: Parts, want: reference.ProjectionGradients
) -> None:
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


def parts_are_added(launch: ModuleType) -> None:
    """Ascending, in chunks: the CPU backend's bytes."""
    random = torch.Generator().manual_seed(6)
    for group, chunks, shape in ((1, 3, (130,)), (4, 2, (7,)), (128, 1, (1, 24)), (1, 1, (1,))):
        columns = torch.Size(shape).numel()
        values = torch.randn(group * chunks, columns, generator=random)
        values *= torch.randn(group * chunks, 1, generator=random).exp2()
        got, want = (torch.full(shape, 0.3) for _ in range(2))
        launch.add_parts(Parts(values, group), got)
        cpu.add_parts(Parts(values, group), want)
        assert same_bytes(got, want)


# ---- all launchers at once -----------------------------------------------------------------------


def results(launch: ModuleType, g: Given, form: Sinkhorn = FORMS[1]) -> list[torch.Tensor]:
    """Results of every launcher."""
    n, streams = g.shape.n, g.streams
    both, by = Upstream(g.dy, g.d_out, g.res, g.pre), Expand(g.f, g.bias, g.post)
    out = launch.project(g.x, g.mapping, streams, g.expand)
    found = [*out, *launch.project(g.x, g.mapping, streams)[:2]]
    for pre, expand in ((g.pre, g.expand), (g.pre, None), (None, g.expand)):
        found += launch.combine(g.x, streams, pre, expand)
    found += launch.coefficients(Projected(*out[:2]), g.x.shape[1], g.gates, n, form)
    found += launch.gate(g.h, g.ms, g.gates, n)
    found += launch.reduce_channels(g.x, streams, Upstream(g.dy, res=g.res), by, True)
    found += launch.reduce_channels(g.x, streams, both)
    gates = (g.h, g.ms, g.gates, n, form, g.pre, g.post, g.res)
    found += launch.coefficients_backward(*gates)
    of = (g.x, g.h, g.ms, g.mapping, streams, both)
    found += launch.project_backward(*of, (True, True))
    into = [torch.full(t.shape, 0.1) for t in (g.mapping.phi, g.mapping.phi[0])]
    launch.weights(found[-1], g.mapping, *into)
    parts = [t for t in found if isinstance(t, Parts) and t.values.dim() == 2]
    sums = [added(launch, part, part.values.shape[1]) for part in parts]
    tensors = [t.values if isinstance(t, Parts) else t for t in found if t is not None]
    return [*tensors, *into, *sums]


def moved(g: Given) -> Given:
    """The case at other addresses: vectors that are not aligned, coefficients without room."""
    return g._replace(
        **{name: shifted(getattr(g, name)) for name in ("x", "dy", "f", "d_out", "bias", "ms")},
        **{name: getattr(g, name).contiguous() for name in ("h", "pre", "post", "res")},
        mapping=g.mapping._replace(
            phi=shifted(g.mapping.phi), norm_weight=shifted(g.mapping.norm_weight)
        ),
    )


# ---- bytes of the CPU backend --------------------------------------------------------------------


def _exact(launch: ModuleType, name: str, args: tuple, some: slice = slice(None)) -> None:
    """Results of a launcher, or some of them, are the CPU backend's bytes."""
    got, want = (getattr(module, name)(*args) for module in (launch, cpu))
    if isinstance(got, torch.Tensor):
        got, want = (got,), (want,)
    equal(got[some], want[some])


def exact_coefficients(launch: ModuleType, g: Given) -> None:
    n, k = g.shape.n, g.x.shape[1]
    projected = cpu.project(g.x, g.mapping, g.streams)
    _exact(launch, "add_chunks", (projected, k, n))
    _exact(launch, "gate", (g.h, g.ms, g.gates, n))
    for form in FORMS:
        _exact(launch, "coefficients", (projected, k, g.gates, n, form))
        _exact(launch, "sinkhorn", (g.res, n, form))


def exact_streams(launch: ModuleType, g: Given) -> None:
    one_row = g.pre[:1].expand(len(g.x), -1)
    for pre, expand in ((g.pre, g.expand), (None, g.expand), (g.pre, None), (one_row, None)):
        _exact(launch, "combine", (g.x, g.streams, pre, expand))


def exact_gradients(launch: ModuleType, g: Given) -> None:
    """df and dx; dH, dms and dz; dphi.  Sums over channels have another order."""
    n, other, by = g.shape.n, given(g.shape, seed=1), Expand(g.f, g.bias, g.post)
    both = Upstream(g.dy, g.d_out, g.res, g.pre)
    for args in (
        (g.x, g.streams, Upstream(g.dy, res=g.res), by, True),
        (g.x, g.streams, both, None, True),
        (None, g.streams, Upstream(g.dy, g.d_out, None, g.pre), None, True),
    ):
        got, want = (module.reduce_channels(*args) for module in (launch, cpu))
        equal((got.df, got.dx), (want.df, want.dx))
    zero = torch.zeros(1, n).expand(len(g.h), n)
    gates = (g.h, g.ms, g.gates, n)
    for d_pre, d_post in ((other.pre, other.post), (zero, other.post), (other.pre, zero)):
        _exact(launch, "gate_backward", (*gates, d_pre, d_post, other.res), slice(2))
    for form in FORMS:
        coming = (form, d_pre, d_post, other.res)
        _exact(launch, "coefficients_backward", (*gates, *coming), slice(2))
        _exact(launch, "sinkhorn_backward", (g.res, other.res, n, form))
    parts = Parts(torch.randn(3, *g.mapping.phi.shape, generator=torch.Generator().manual_seed(5)))
    sums = [torch.full(g.mapping.phi.shape, 0.3) for _ in range(2)]
    for module, into in zip((launch, cpu), sums, strict=True):
        module.weights(parts, g.mapping, into, None)
    assert same_bytes(*sums)


def far_logits(launch: ModuleType) -> None:
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


#: Checks of both, those of SM90's launchers alone among them, and those of Triton's.
CHECKS = {
    check.__name__: check
    for check in (
        projection, expanded, combine, coefficients, reduce, gates_backward, projection_backward,
        recompute,
    )
}  # fmt: skip
EXACT = {f.__name__: f for f in (exact_coefficients, exact_streams, exact_gradients)}
TRITON = {name: check for name, check in CHECKS.items() if name != "recompute"}
