"""Checks of the results of the Triton mhc, whatever runs it.

A check takes a launcher module.  Where the CPU backend's arithmetic is written the same way, the
expected bytes are its own; elsewhere the expected value is computed in float64, and the tolerance
from the order of the sum: a rounding to nearest loses at most ``U`` of what it rounds, and no
partial sum is larger than the sum of magnitudes.
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
    Sinkhorn,
    Streams,
    Upstream,
)
from cute_kernels.mhc.triton.plan import TRITON

from ..contract import bits, same_bytes

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {BF16: "bf16", FP32: "fp32"}
#: Of a rounding to nearest, in fp32 and in the dtype of x.
U = 2.0**-24
ROUNDING = {BF16: 2.0**-8, FP32: U}
FORMS = (
    Sinkhorn(1, "log", 1e-6),
    Sinkhorn(20, "log", 1e-6),
    Sinkhorn(1, "epsilon", 1e-6),
    Sinkhorn(11, "epsilon", 1e-3),
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


#: Tails of every tile; two and three chunks of channels; one channel; one token; both of each.
SHAPES = (
    Shape(33, 530, 4, "cn", BF16),
    Shape(9, 600, 4, "nc", FP32, "bf16x3", norm_weight=False),
    Shape(66, 70, 2, "cn", FP32, bias=False),
    Shape(3, 1, 2, "nc", BF16),
    Shape(1, 64, 4, "cn", FP32),
    Shape(35, 530, 4, "nc", BF16, bias=False),
    Shape(37, 530, 4, "cn", FP32, "bf16x3", norm_weight=False),
    Shape(70, 1040, 2, "nc", BF16),
    Shape(5, 1100, 2, "cn", BF16, "bf16x3", norm_weight=False),
    Shape(64, 128, 4, "nc", FP32),
)


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


def joined(t: torch.Tensor, streams: Streams) -> torch.Tensor:
    """The inverse."""
    return (t if streams.layout == "nc" else t.mT).reshape(len(t), -1)


def within(got: torch.Tensor, want: torch.Tensor, tolerance: torch.Tensor) -> None:
    """Every element is finite and within its own tolerance."""
    assert got.shape == want.shape and tolerance.shape == want.shape
    error = (got.double() - want).abs()
    # NaN is not within.
    assert (error <= tolerance).all(), (error / tolerance).max()


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


# ---- forward -------------------------------------------------------------------------------------


def projection(launch: ModuleType, g: Given) -> None:
    """Sums and squares of every chunk."""
    out = launch.project(g.x, g.mapping, g.streams)
    assert out.y is None
    n, size = g.shape.n, chunk_channels(g.shape.n, g.shape.precision)
    x, psi = by_stream(g.x, g.streams), by_stream(g.mapping.phi, g.streams)
    if g.mapping.norm_weight is not None:
        psi = psi * by_stream(g.mapping.norm_weight[None], g.streams)
    parts = list(zip(x.split(size, 2), psi.split(size, 2), strict=True))
    assert len(out.sums) == len(out.squares) == len(parts)
    for sums, squares, (a, b) in zip(out.sums, out.squares, parts, strict=True):
        length = n * a.shape[2]
        magnitude = torch.einsum("mic,jic->mj", a.abs(), b.abs())
        # psi is rounded, and each of a chain's products is.
        within(sums, torch.einsum("mic,jic->mj", a, b), (length + 1) * U * magnitude)
        lanes = TRITON.project[1]
        depth = -(-a.shape[2] // lanes) * n + lanes.bit_length()
        total = (a * a).sum((1, 2))
        within(squares, total, depth * U * total)


def project_expanded(launch: ModuleType, g: Given) -> None:
    """The streams that an expand makes are those of combine; they are projected, or collapsed."""
    out = launch.project(g.x, g.mapping, g.streams, g.expand)
    y, nothing = launch.combine(g.x, g.streams, None, g.expand)
    assert nothing is None
    equal(out, (*launch.project(y, g.mapping, g.streams)[:2], y))
    none, collapsed = launch.combine(y, g.streams, g.pre, None)
    assert none is None
    equal(launch.combine(g.x, g.streams, g.pre, g.expand), (y, collapsed))


def coefficients(launch: ModuleType, g: Given) -> None:
    """Check coefficients of chunks: the CPU backend's bytes, in one call and in three."""
    n, k = g.shape.n, g.x.shape[1]
    projected = cpu.project(g.x, g.mapping, g.streams)
    for form in FORMS:
        want = cpu.coefficients(projected, k, g.gates, n, form)
        equal(launch.coefficients(projected, k, g.gates, n, form), want)
    h, ms = launch.add_chunks(projected, k, n)
    equal((h, ms), want[:2])
    assert not bits(h[:, mappings(n) :]).any()
    equal(launch.gate(g.h, g.ms, g.gates, n), cpu.gate(g.h, g.ms, g.gates, n))
    for form in FORMS:
        equal([launch.sinkhorn(g.res, n, form)], [cpu.sinkhorn(g.res, n, form)])


def far_logits(launch: ModuleType, n: int = 4) -> None:
    """No row or column is lost where logits differ by more than fp32 has exponents."""
    z = given(Shape(9, 1, n, "cn", FP32)).res * 200
    z[0], z[1, :n], z[2, ::n], z[3, 0] = 0.0, -1e4, -1e4, 1e30
    upstream = given(Shape(9, 1, n, "cn", FP32), seed=1).res
    for form in FORMS:
        p = launch.sinkhorn(z, n, form)
        equal([p], [cpu.sinkhorn(z, n, form)])
        assert p.isfinite().all()
        d_z = launch.sinkhorn_backward(z, upstream, n, form)
        equal([d_z], [cpu.sinkhorn_backward(z, upstream, n, form)])


def combine(launch: ModuleType, g: Given) -> None:
    """Check combine with and without an expand and a pre: the CPU backend's bytes."""
    one_row = g.pre[:1].expand(len(g.x), -1)
    for pre, expand in ((g.pre, g.expand), (None, g.expand), (g.pre, None), (one_row, None)):
        got = launch.combine(g.x, g.streams, pre, expand)
        equal(got, cpu.combine(g.x, g.streams, pre, expand))


def combine_within(launch: ModuleType, g: Given) -> None:
    """Check combine within bounds, where an fma rounds once."""
    n, rounding = g.shape.n, ROUNDING[g.shape.dtype]
    y, out = launch.combine(g.x, g.streams, g.pre, g.expand)
    f = g.f.double()[:, None] + (0 if g.bias is None else g.bias.double())
    terms = by_stream(g.x, g.streams)[:, :, None] * g.res.double().view(-1, n, n, 1)
    terms = torch.cat([(f * g.post.double()[:, :, None])[:, None], terms], 1)
    want = joined(terms.sum(1), g.streams)
    magnitude = joined(terms.abs().sum(1), g.streams)
    within(y, want, (n + 3) * U * magnitude * (1 + 2.0**-7) + rounding * want.abs())
    terms = by_stream(y, g.streams) * g.pre.double()[:, :, None]
    want, magnitude = terms.sum(1), terms.abs().sum(1)
    within(out, want, n * U * magnitude * (1 + 2.0**-7) + rounding * want.abs())


# ---- backward ------------------------------------------------------------------------------------


def reduce(launch: ModuleType, g: Given) -> None:
    """Every kind of pass: df and dx are the CPU backend's bytes, sums are within their bounds."""
    both, expand_operands = Upstream(g.dy, g.d_out, g.res, g.pre), Expand(g.f, g.bias, g.post)
    passes = (
        (g.x, Upstream(g.dy, res=g.res), expand_operands, True),
        (None, Upstream(g.dy), expand_operands, False),
        (g.x, both, None, False),
        (g.x, both, None, True),
        (g.x, Upstream(d_out=g.d_out, pre=g.pre), None, True),
        (None, Upstream(g.dy, g.d_out, None, g.pre), None, True),
    )
    for x, upstream, expand, want_dx in passes:
        got = launch.reduce_channels(x, g.streams, upstream, expand, want_dx)
        want = cpu.reduce_channels(x, g.streams, upstream, expand, want_dx)
        assert [t is None for t in got] == [t is None for t in want]
        equal((got.df, got.dx), (want.df, want.dx))
        sums_over_channels(g, got)
        if got.d_bias is not None:
            bias_sums(launch, g, got.d_bias)


def sums_over_channels(g: Given, got) -> None:
    """d_pre, d_post and d_res, where there are any."""
    lanes = TRITON.reduce[1]
    # A product's rounding, or that of f + bias, is one more.
    depth = -(-g.shape.c // lanes) + lanes.bit_length() + 1
    x, dy = by_stream(g.x, g.streams), by_stream(g.dy, g.streams)
    f = g.f.double() + (0 if g.bias is None else g.bias.double())
    operands = {
        "d_pre": ("mic,mc->mi", x, g.d_out.double()),
        "d_post": ("mjc,mc->mj", dy, f),
        "d_res": ("mic,mjc->mij", x, dy),
    }
    for name, (formula, a, b) in operands.items():
        if (out := getattr(got, name)) is not None:
            assert out.is_contiguous()
            magnitude = torch.einsum(formula, a.abs(), b.abs())
            want = torch.einsum(formula, a, b)
            within(out, want.flatten(1), depth * U * magnitude.flatten(1))


def bias_sums(launch: ModuleType, g: Given, parts: Parts) -> None:
    """The sum of df before its rounding."""
    chunks = -(-g.shape.m // TOKENS)
    tokens = TRITON.reduce[0]
    assert len(parts.values) == chunks * parts.group and parts.group == TOKENS // tokens
    terms = by_stream(g.dy, g.streams) * g.post.double()[:, :, None]
    depth = 2 * g.shape.n + tokens.bit_length() + parts.group + chunks
    magnitude = terms.abs().sum((0, 1))
    within(added(launch, parts, g.shape.c), terms.sum((0, 1)), depth * U * magnitude)


def gates_backward(launch: ModuleType, g: Given) -> None:
    """dH and dms are the CPU backend's bytes; dalpha and dbeta are within their bounds."""
    n = g.shape.n
    other = given(g.shape, seed=1)
    zero = torch.zeros(1, n).expand(len(g.h), n)
    for d_pre, d_post in ((other.pre, other.post), (zero, other.post), (other.pre, zero)):
        coming = (d_pre, d_post, other.res)
        *got, parts = launch.gate_backward(g.h, g.ms, g.gates, n, *coming)
        *want, _ = cpu.gate_backward(g.h, g.ms, g.gates, n, *coming)
        equal(got, want)
        gate_sums(launch, g, torch.cat(coming, 1).double(), parts)
    for form in FORMS:
        *got, parts = launch.coefficients_backward(g.h, g.ms, g.gates, n, form, *coming)
        *want, _ = cpu.coefficients_backward(g.h, g.ms, g.gates, n, form, *coming)
        equal(got, want)
        *_, z = cpu.gate(g.h, g.ms, g.gates, n)
        d_z = cpu.sinkhorn_backward(z, other.res, n, form)
        equal([launch.sinkhorn_backward(z, other.res, n, form)], [d_z])
        gate_sums(launch, g, torch.cat([d_pre, d_post, d_z], 1).double(), parts)


def gate_sums(launch: ModuleType, g: Given, coming: torch.Tensor, parts: Parts) -> None:
    """dalpha and dbeta, of gradients [M, N] that come."""
    n = g.shape.n
    sizes = [n, n, n * n]
    alpha = g.gates.alpha.double().repeat_interleave(torch.tensor(sizes))
    normed = g.h[:, : mappings(n)].double() / (g.ms.double() + g.gates.eps).sqrt()[:, None]
    z = alpha * normed + g.gates.beta.double()
    p = torch.sigmoid(z)
    slope = p * (1 - p)
    # Of z: the root's three roundings, product, division, sum.  Of p: e^-z, a sum, a division.
    of_z = 5 * U * (alpha * normed).abs() + U * z.abs()
    of_p = slope * of_z + p * ((1 - p) * (2 * z.abs() + 4) + 2) * U
    scale = torch.ones(mappings(n), dtype=torch.float64)
    scale[n : 2 * n] = g.gates.post_scale
    is_res = torch.arange(mappings(n)) >= 2 * n
    terms = torch.where(is_res, coming, coming * scale * slope)
    error = torch.where(is_res, 0.0, coming.abs() * scale * (of_p + 4 * U * slope))
    chunks, tokens = -(-g.shape.m // TOKENS), TRITON.gate_tokens
    assert len(parts.values) == chunks * parts.group and parts.group == TOKENS // tokens
    depth = tokens.bit_length() + parts.group + chunks
    of_beta = (error + depth * U * terms.abs()).sum(0)
    more = WIDTH[n].bit_length() + 6
    of_alpha = ((error + (depth + more) * U * terms.abs()) * normed.abs()).sum(0)
    got = added(launch, parts, 3 + mappings(n))
    within(got[3:], terms.sum(0), of_beta)
    blocks = zip((terms * normed).sum(0).split(sizes), of_alpha.split(sizes), strict=True)
    want, tolerance = (
        torch.stack(t) for t in zip(*((a.sum(), b.sum()) for a, b in blocks), strict=True)
    )
    within(got[:3], want, tolerance)


def projection_backward(launch: ModuleType, g: Given) -> None:
    """dx and dpsi, together and alone, of every kind of upstream."""
    d_h, d_ms = g.h, given(g.shape, seed=2).ms - 0.7
    kinds = (
        Upstream(g.dy, g.d_out, g.res, g.pre),
        Upstream(),
        Upstream(g.dy),
        Upstream(d_out=g.d_out, pre=g.pre),
        Upstream(g.dy, g.d_out, None, g.pre),
    )
    for upstream in kinds:
        dx, parts = launch.project_backward(
            g.x, d_h, d_ms, g.mapping, g.streams, upstream, (True, True)
        )
        assert dx.dtype == g.x.dtype and parts.group == 1
        within(dx, *dx_of(g, d_h, d_ms, upstream))
    x = g.x.double()
    for part, tokens in zip(parts.values, torch.arange(g.shape.m).split(TOKENS), strict=True):
        used = d_h[tokens, : mappings(g.shape.n)].double()
        tolerance = (len(tokens) + 1) * U * (used.abs().mT @ x[tokens].abs())
        within(part, used.mT @ x[tokens], tolerance)
    of_x = (g.x, d_h, d_ms, g.mapping, g.streams, upstream)
    alone, nothing = launch.project_backward(*of_x, (True, False))
    assert same_bytes(alone, dx) and nothing is None
    nothing, alone = launch.project_backward(*of_x, (False, True))
    assert same_bytes(alone.values, parts.values) and nothing is None


def dx_of(g: Given, d_h: torch.Tensor, d_ms: torch.Tensor, upstream: Upstream):
    """(dx, its tolerance)."""
    n, psi = g.shape.n, g.mapping.phi.double()
    if g.mapping.norm_weight is not None:
        psi = psi * g.mapping.norm_weight.double()
    used = d_h[:, : mappings(n)].double()
    scaled = g.x.double() * d_ms.double()[:, None] * (2 / g.x.shape[1])
    want, magnitude = used @ psi + scaled, used.abs() @ psi.abs() + scaled.abs()
    dy, d_out, res, pre = upstream
    if dy is not None:
        terms = by_stream(dy, g.streams)[:, None]
        if res is not None:
            terms = terms * res.double().view(-1, n, n, 1)
        else:
            terms = terms * torch.eye(n, dtype=torch.float64)[None, :, :, None]
        want = want + joined(terms.sum(2), g.streams)
        magnitude = magnitude + joined(terms.abs().sum(2), g.streams)
    if d_out is not None:
        term = joined(pre.double()[:, :, None] * d_out.double()[:, None], g.streams)
        want, magnitude = want + term, magnitude + term.abs()
    # A chain over N with a rounded psi; dms's two products; the streams' chain and its sum.
    depth = mappings(n) + 2 * n + 6
    return want, depth * U * magnitude * (1 + 2.0**-7) + ROUNDING[g.shape.dtype] * want.abs()


def weights(launch: ModuleType, g: Given) -> None:
    """into_phi is the CPU backend's bytes; into_weight is within its bound."""
    random = torch.Generator().manual_seed(5)
    parts = Parts(torch.randn(3, *g.mapping.phi.shape, generator=random))
    start = [torch.randn(t.shape, generator=random) for t in (g.mapping.phi, g.mapping.phi[0])]
    got, want = ([t.clone() for t in start] for _ in range(2))
    if g.mapping.norm_weight is None:
        got[1] = want[1] = None
    launch.weights(parts, g.mapping, *got)
    cpu.weights(parts, g.mapping, *want)
    assert same_bytes(got[0], want[0])
    alone = start[0].clone()
    launch.weights(parts, g.mapping, alone, None)
    assert same_bytes(alone, want[0])
    if got[1] is not None:
        terms = parts.values.double() * g.mapping.phi.double()
        magnitude = terms.abs().sum((0, 1)) + start[1].double().abs()
        within(got[1], terms.sum((0, 1)) + start[1].double(), (6 + 3) * U * magnitude)


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


#: Every check of one case.
CHECKS = {
    check.__name__: check
    for check in (
        projection,
        project_expanded,
        coefficients,
        combine,
        reduce,
        gates_backward,
        projection_backward,
        weights,
    )
}
