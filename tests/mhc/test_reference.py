"""The oracle itself: explicit backwards against central differences, and literal Sinkhorns."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.mhc import Options
from cute_kernels.mhc.tensors import Expand, Gates, Mapping, Sinkhorn
from tests.mhc import cases
from tests.mhc.cases import FP64, Case
from tests.oracles import mhc as reference
from tests.oracles.error_bounds import Near, exact

STEP = 1e-5
DIRECTIONS = 2
VARIANTS = [
    (layout, n, form) for layout in ("cn", "nc") for n in (2, 4) for form in ("log", "epsilon")
]


def derivative(loss, tensors: list, i: int, direction: torch.Tensor) -> float:
    """Derivative of ``loss`` by one of its tensors, along a direction, by central differences."""

    def at(step: float) -> float:
        moved = list(tensors)
        moved[i] = tensors[i] + step * direction
        return float(loss(*moved))

    return (at(STEP) - at(-STEP)) / (2 * STEP)


def compare(loss, tensors: list, gradients: list) -> None:
    """Gradients along random directions, of every tensor that is not None."""
    g = cases.generator(99)
    for i, (t, gradient) in enumerate(zip(tensors, gradients, strict=True)):
        if t is None:
            assert gradient is None
            continue
        value = gradient.value
        assert value.numel() == t.numel() and value.any()
        for _ in range(DIRECTIONS):
            direction = torch.randn(t.shape, generator=g, dtype=FP64)
            want = derivative(loss, tensors, i, direction)
            got = float((value.reshape(t.shape) * direction).sum())
            scale = float(value.norm() * direction.norm())
            assert abs(got - want) <= 2e-8 * scale, f"tensor {i}: {got} for {want}"


def problem(layout: str, n: int, form: str, seed: int = 0):
    """(case, inputs in float64 as rows, upstream as rows)."""
    options = Options(layout, "bf16x2", 1e-2, 1e-3, 1.7, iterations=4, form=form)
    case = Case(seed, 3, 5, n, layout, norm_weight=True, bias=True, spread=3.0, options=options)
    x = cases.inputs_of(case)
    upstream = cases.Upstream(*(cases.rows(t) for t in cases.upstream_of(case, x)))
    return case, x, upstream._replace(ms=upstream.ms[:, 0])


def dot(*pairs) -> torch.Tensor:
    return sum((near.value.reshape(g.shape) * g).sum() for near, g in pairs)


@pytest.mark.parametrize(("layout", "n", "form"), VARIANTS)
@pytest.mark.parametrize("with_weight", [False, True])
def test_projection(layout, n, form, with_weight):
    case, x, up = problem(layout, n, form)
    weight = x.norm_weight.double() if with_weight else None
    tensors = [cases.rows(x.x), x.phi.double(), weight]

    def loss(x, phi, weight):
        h, ms = reference.projection(x, Mapping(phi, weight, "bf16x2"), case.streams)
        return dot((h, up.h), (ms, up.ms))

    mapping = Mapping(*tensors[1:], "bf16x2")
    compare(loss, tensors, reference.projection_backward(tensors[0], up.h, up.ms, mapping))


@pytest.mark.parametrize("n", [2, 4])
def test_scale(n):
    case, x, up = problem("cn", n, "log")
    h, ms = reference.projection(cases.rows(x.x), cases.mapping_of(case, x), case.streams)
    gates = cases.gates_of(case, x)
    tensors = [h.value, ms.value, gates.alpha, gates.beta]
    upstream = (up.pre, up.post, up.res)

    def loss(h, ms, alpha, beta):
        out = reference.scale(h, ms, gates._replace(alpha=alpha, beta=beta), n)
        return dot(*zip(out, upstream, strict=True))

    compare(loss, tensors, reference.scale_backward(h.value, ms.value, gates, n, upstream))


def logits(n: int, spread: float = 3.0, m: int = 6, seed: int = 5) -> torch.Tensor:
    return spread * torch.randn(m, n * n, generator=cases.generator(seed), dtype=FP64)


@pytest.mark.parametrize("iterations", [1, 2, 20, 64])
@pytest.mark.parametrize("form", ["log", "epsilon"])
@pytest.mark.parametrize("n", [2, 4])
def test_sinkhorn(n, form, iterations):
    z, sinkhorn = logits(n), Sinkhorn(iterations, form, 1e-3)
    d_p = torch.randn(z.shape, generator=cases.generator(6), dtype=FP64)
    compare(
        lambda z: dot((reference.sinkhorn(z, n, sinkhorn), d_p)),
        [z],
        [reference.sinkhorn_backward(z, d_p, n, sinkhorn)],
    )


@pytest.mark.parametrize("form", ["log", "epsilon"])
def test_a_loss_of_the_sum_proves_nothing(form):
    """Columns sum to 1 whatever the logits are, so P.sum() has no gradient.

    A backward that is 100 times too large passes a test with that loss; with random cotangents it
    does not.
    """
    z, sinkhorn = logits(4), Sinkhorn(20, form, 0.0)
    ones = torch.ones_like(z)
    right = reference.sinkhorn_backward(z, ones, 4, sinkhorn).value
    assert right.abs().max() < 1e-14 and (100 * right - right).abs().max() < 1e-12
    d_p = torch.randn(z.shape, generator=cases.generator(6), dtype=FP64)
    assert reference.sinkhorn_backward(z, d_p, 4, sinkhorn).value.abs().max() > 1e-2


def test_the_forms_agree_without_an_epsilon():
    z = logits(4)
    log, epsilon, paper = (
        reference.sinkhorn(z, 4, Sinkhorn(20, form, eps)).value
        for form, eps in (("log", 1e-6), ("epsilon", 0.0), ("epsilon", 1e-6))
    )
    assert (log - epsilon).abs().max() < 1e-14
    assert 1e-7 < (log - paper).abs().max() < 5e-5


@pytest.mark.parametrize(("layout", "n", "form"), VARIANTS[::2])
def test_aggregate(layout, n, form):
    case, x, up = problem(layout, n, form)
    tensors = [cases.rows(x.x), x.pre.double()]
    compare(
        lambda x, pre: dot((reference.aggregate(x, pre, case.streams), up.out)),
        tensors,
        reference.aggregate_backward(*tensors, up.out, case.streams),
    )


@pytest.mark.parametrize(("layout", "n", "form"), VARIANTS[::2])
@pytest.mark.parametrize("with_bias", [False, True])
def test_expand_combine(layout, n, form, with_bias):
    case, x, up = problem(layout, n, form)
    by = cases.expand_of(x if with_bias else x._replace(bias=None))
    tensors = [by.f, by.bias, by.post, cases.rows(x.x), by.res]

    def loss(f, bias, post, x, res):
        return dot((reference.expand_combine(x, Expand(f, bias, post, res), case.streams), up.y))

    out = reference.expand_combine_backward(tensors[3], by, up.y, case.streams)
    compare(loss, tensors, out)


@pytest.mark.parametrize("layout", ["cn", "nc"])
def test_repeat(layout):
    case, x, up = problem(layout, 4, "log")
    compare(
        lambda e: dot((reference.repeat(e, case.streams), up.y)),
        [x.f.double()],
        [reference.repeat_backward(up.y, case.streams)],
    )


def site_tensors(site: reference.Site) -> list:
    return [site.mapping.phi, site.mapping.norm_weight, site.gates.alpha, site.gates.beta]


def site_with(site: reference.Site, phi, weight, alpha, beta) -> reference.Site:
    return site._replace(
        mapping=site.mapping._replace(phi=phi, norm_weight=weight),
        gates=site.gates._replace(alpha=alpha, beta=beta),
    )


@pytest.mark.parametrize(("layout", "n", "form"), VARIANTS)
@pytest.mark.parametrize("shift", [False, True])
def test_mix_and_aggregate(layout, n, form, shift):
    case, x, up = problem(layout, n, form)
    site = cases.site_of(case, x)
    tensors = [cases.rows(x.x), *site_tensors(site), x.pre.double() if shift else None]

    def loss(x, phi, weight, alpha, beta, shifted):
        out = reference.mix_and_aggregate(x, site_with(site, phi, weight, alpha, beta), shifted)
        own = dot((out.out, up.out), (out.pre, up.pre), (out.post, up.post), (out.res, up.res))
        return own + (x * up.y).sum()

    inputs = reference.Given(up.out, up.pre, up.post, up.res, up.y)
    out = reference.mix_and_aggregate_backward(tensors[0], site, inputs, tensors[-1])
    compare(loss, tensors, out)


@pytest.mark.parametrize(("layout", "n", "form"), VARIANTS)
@pytest.mark.parametrize("shift", [False, True])
def test_post_pre(layout, n, form, shift):
    case, x, up = problem(layout, n, form)
    site, by = cases.site_of(case, x), cases.expand_of(x)
    tensors = [by.f, by.bias, by.post, cases.rows(x.x), by.res, *site_tensors(site)]
    tensors.append(x.pre.double() if shift else None)

    def loss(f, bias, post, x, res, phi, weight, alpha, beta, shifted):
        y, out = reference.post_pre(
            x, Expand(f, bias, post, res), site_with(site, phi, weight, alpha, beta), FP64, shifted
        )
        coefficients = (out.pre, up.pre), (out.post, up.post), (out.res, up.res)
        return dot((y, up.y), (out.out, up.out), *coefficients)

    inputs = reference.Given(up.out, up.pre, up.post, up.res, up.y)
    of_end, of_site = reference.post_pre_backward(tensors[3], by, site, inputs, FP64, tensors[-1])
    compare(loss, tensors, [*of_end, *of_site[1:]])


def test_numbers_that_are_near():
    """A bound covers what fp32 does to the same formula, and not much more."""
    a, b = (torch.randn(4000, generator=cases.generator(s), dtype=FP64).float() for s in (1, 2))
    near, other = exact(a), exact(b)
    out = {
        "+": (near + other, a + b),
        "-": (near - other, a - b),
        "*": (near * other, a * b),
        "/": (near / other, a / b),
        # In fp64: sqrt of fp32 is an ulp off in some vector libraries, MKL's on AMD's processors.
        "sqrt": ((near * near + 1.0).sqrt(), (a * a + 1.0).double().sqrt().float()),
        "sigmoid": ((near * 30.0).sigmoid(), (a * 30.0).sigmoid()),
        "sum": (near.reshape(40, 100).sum(1), a.view(40, 100).sum(1)),
        "cancelling": ((near + 1e4) - 1e4, (a + 1e4) - 1e4),
    }
    for name, (bound, got) in out.items():
        share = ((got.double() - bound.value).abs() / bound.error).max()
        assert 0.02 < share <= 1, f"{name}: {share}"
    stored = near.stored(torch.bfloat16)
    assert 0.9 < ((a.bfloat16().double() - a.double()).abs() / stored.error).max() <= 1


@pytest.mark.parametrize("form", ["log", "epsilon"])
def test_an_error_of_the_logits_is_carried(form):
    """P of logits that were moved lies within the bound of logits that near; and nears it."""
    z, sinkhorn = logits(4, m=40), Sinkhorn(20, form, 1e-6)
    g = cases.generator(8)
    worst = 0.0
    base = reference.sinkhorn(z, 4, sinkhorn)
    bound = reference.sinkhorn(Near(z, torch.full_like(z, 1e-5)), 4, sinkhorn)
    for _ in range(20):
        moved = z + 1e-5 * torch.randn(z.shape, generator=g, dtype=FP64).sign()
        p = reference.sinkhorn(moved, 4, sinkhorn).value
        worst = max(worst, ((p - base.value).abs() / bound.error).max().item())
    assert 0.25 < worst <= 1
    d_p = torch.randn(z.shape, generator=g, dtype=FP64)
    base = reference.sinkhorn_backward(z, d_p, 4, sinkhorn)
    bound = reference.sinkhorn_backward(Near(z, torch.full_like(z, 1e-5)), d_p, 4, sinkhorn)
    moved = z + 1e-5 * torch.randn(z.shape, generator=g, dtype=FP64).sign()
    got = reference.sinkhorn_backward(moved, d_p, 4, sinkhorn).value
    assert 0.01 < ((got - base.value).abs() / bound.error).max() <= 1


def test_the_gates_are_as_the_paper_has_them():
    """The bias behind the division, ε under the root: written out for one token."""
    h, ms = torch.tensor([[0.5] * 8], dtype=FP64) * torch.arange(1, 9), torch.tensor([4.0]).double()
    gates = Gates(
        torch.tensor([1.0, 2.0, 3.0]).double(), torch.arange(8.0).double(), 5.0, 0.25, 2.0
    )
    pre, post, res = (t.value[0].tolist() for t in reference.scale(h, ms, gates, 2))
    z = [
        a * v / 3.0 + i for i, (a, v) in enumerate(zip([1, 1, 2, 2, 3, 3, 3, 3], h[0], strict=True))
    ]
    sigma = torch.tensor(z).sigmoid().tolist()
    assert pre == pytest.approx([s + 0.25 for s in sigma[:2]], abs=1e-6)
    assert post == pytest.approx([2 * s for s in sigma[2:4]], abs=1e-6)
    assert res == pytest.approx([float(v) for v in z[4:]], abs=1e-6)
