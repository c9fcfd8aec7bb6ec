"""The oracle itself: its explicit backwards are torch's gradients of its forwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cute_kernels.mhc import Options
from cute_kernels.mhc.tensors import Expand, Gates, Mapping, Sinkhorn
from tests.mhc import cases
from tests.mhc.cases import FP64, Case
from tests.oracles import mhc as reference
from tests.oracles.error_bounds import Near, exact

VARIANTS = [
    (layout, n, form, optional)
    for layout in ("cn", "nc")
    for n, optional in ((2, True), (4, False), (4, True))
    for form in ("log", "epsilon")
]


class Problem:
    """A case in float64, as rows: its tensors, its upstream gradients, its site."""

    def __init__(self, layout: str, n: int, form: str, optional: bool) -> None:
        options = Options(layout, "bf16x2", 1e-2, 1e-3, 1.7, iterations=4, form=form)
        case = Case(0, 3, 5, n, layout, norm_weight=optional, bias=optional, options=options)
        self.case, x = case._replace(spread=3.0), cases.inputs_of(case._replace(spread=3.0))
        up = cases.Upstream(*(cases.rows(t) for t in cases.upstream_of(case, x)))
        self.up, self.site, self.by = (
            up._replace(ms=up.ms[:, 0]),
            cases.site_of(case, x),
            cases.expand_of(x),
        )
        self.x, self.pre, self.z = cases.rows(x.x), x.pre.double(), cases.rows(x.z)
        self.h, self.ms = x.h[:, : self.up.h.shape[1]].double(), x.ms.double()
        self.weights = [*self.site.mapping[:2], *self.site.gates[:2]]

    def with_weights(self, phi, weight, alpha, beta) -> reference.Site:
        mapping = self.site.mapping._replace(phi=phi, norm_weight=weight)
        return self.site._replace(
            mapping=mapping, gates=self.site.gates._replace(alpha=alpha, beta=beta)
        )


def projection(p: Problem):
    mapping = p.site.mapping

    def run(x, phi, weight):
        return reference.projection(x, Mapping(phi, weight, "bf16x2"), p.case.streams)

    back = reference.projection_backward(p.x, p.up.h, p.up.ms, mapping)
    return run, [p.x, *mapping[:2]], [p.up.h, p.up.ms], back


def scale(p: Problem):
    gates, n, upstream = p.site.gates, p.case.n, (p.up.pre, p.up.post, p.up.res)

    def run(h, ms, alpha, beta):
        return reference.scale(h, ms, gates._replace(alpha=alpha, beta=beta), n)

    back = reference.scale_backward(p.h, p.ms, gates, n, upstream)
    return run, [p.h, p.ms, gates.alpha, gates.beta], upstream, back


def aggregate(p: Problem):
    run = lambda x, pre: [reference.aggregate(x, pre, p.case.streams)]  # noqa: E731
    back = reference.aggregate_backward(p.x, p.pre, p.up.out, p.case.streams)
    return run, [p.x, p.pre], [p.up.out], back


def expand_combine(p: Problem):
    def run(f, bias, post, x, res):
        return [reference.expand_combine(x, Expand(f, bias, post, res), p.case.streams)]

    back = reference.expand_combine_backward(p.x, p.by, p.up.y, p.case.streams)
    return run, [*p.by[:3], p.x, p.by.res], [p.up.y], back


def repeat(p: Problem):
    run = lambda e: [reference.repeat(e, p.case.streams)]  # noqa: E731
    return run, [p.by.f], [p.up.y], [reference.repeat_backward(p.up.y, p.case.streams)]


def mix_and_aggregate(p: Problem, shifted: bool = False):
    given = reference.Given(p.up.out, p.up.pre, p.up.post, p.up.res, p.up.y)
    pre = p.pre if shifted else None

    def run(x, phi, weight, alpha, beta, pre):
        out = reference.mix_and_aggregate(x, p.with_weights(phi, weight, alpha, beta), pre)
        return [*out[:4], exact(x)]

    back = reference.mix_and_aggregate_backward(p.x, p.site, given, pre)
    return run, [p.x, *p.weights, pre], given, back


def mix_shifted(p: Problem):
    return mix_and_aggregate(p, shifted=True)


def post_pre(p: Problem, shifted: bool = False):
    given = reference.Given(p.up.out, p.up.pre, p.up.post, p.up.res, p.up.y)
    pre = p.pre if shifted else None

    def run(f, bias, post, x, res, phi, weight, alpha, beta, pre):
        by, site = Expand(f, bias, post, res), p.with_weights(phi, weight, alpha, beta)
        y, out = reference.post_pre(x, by, site, FP64, pre)
        return [*out[:4], y]

    end, site = reference.post_pre_backward(p.x, p.by, p.site, given, FP64, pre)
    return run, [*p.by[:3], p.x, p.by.res, *p.weights, pre], given, [*end, *site[1:]]


def post_pre_shifted(p: Problem):
    return post_pre(p, shifted=True)


FUNCTIONS: tuple[Callable, ...] = (
    projection, scale, aggregate, expand_combine, repeat, mix_and_aggregate, mix_shifted, post_pre,
    post_pre_shifted,
)  # fmt: skip


def compare(run: Callable, tensors: list, upstream: list, back: list) -> None:
    """Gradients of every tensor that is not None."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    out = [near.value for near in run(*leaves)]
    given = [leaf for leaf in leaves if leaf is not None]
    grads = iter(
        torch.autograd.grad(
            out, given, [g.reshape(t.shape) for g, t in zip(upstream, out, strict=True)]
        )
    )
    for leaf, gradient in zip(leaves, back, strict=True):
        if leaf is None:
            assert gradient is None
            continue
        want = next(grads).flatten()
        assert want.any() and (gradient.value.flatten() - want).norm() <= 1e-12 * want.norm()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_backwards_are_torchs_gradients(function, variant):
    compare(*function(Problem(*variant)))


def logits(n: int, spread: float = 3.0, m: int = 6, seed: int = 5) -> torch.Tensor:
    return spread * torch.randn(m, n * n, generator=cases.generator(seed), dtype=FP64)


@pytest.mark.parametrize("iterations", [1, 2, 20, 64])
@pytest.mark.parametrize("form", ["log", "epsilon"])
@pytest.mark.parametrize("n", [2, 4])
def test_sinkhorn(n, form, iterations):
    z, sinkhorn = logits(n), Sinkhorn(iterations, form, 1e-3)
    d_p = torch.randn(z.shape, generator=cases.generator(6), dtype=FP64)
    back = reference.sinkhorn_backward(z, d_p, n, sinkhorn)
    compare(lambda z: [reference.sinkhorn(z, n, sinkhorn)], [z], [d_p], [back])
    # Columns sum to 1 whatever the logits are: a loss of the sum would prove nothing.
    of_sum = reference.sinkhorn_backward(z, torch.ones_like(z), n, sinkhorn._replace(eps=0.0))
    assert form == "epsilon" or of_sum.value.abs().max() < 1e-14
    assert back.value.abs().max() > 1e-2


def test_the_forms_agree_without_an_epsilon():
    z = logits(4)
    log, epsilon, paper = (
        reference.sinkhorn(z, 4, Sinkhorn(20, form, eps)).value
        for form, eps in (("log", 1e-6), ("epsilon", 0.0), ("epsilon", 1e-6))
    )
    assert (log - epsilon).abs().max() < 1e-14
    assert 1e-7 < (log - paper).abs().max() < 5e-5


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
