"""Fused is composed: byte for byte where api.py says so, and within a bound where it does not."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.mhc import (
    Options,
    aggregate,
    connect,
    expand_combine,
    mix_and_aggregate,
    post_pre,
    projection,
    scale,
    sinkhorn,
    site_op,
)
from tests.contract import same_bytes
from tests.mhc import cases, runs
from tests.mhc.cases import BF16, FP32, Case
from tests.oracles import mhc as reference

VARIANTS = [
    Case(1, 13, 97, 4, "cn", (BF16, FP32), True, True, 3.0),
    Case(2, 13, 97, 2, "nc", (BF16, BF16), False, False, 1.0, Options(layout="nc", form="epsilon")),
    Case(3, 48, 600, 4, "nc", (FP32, FP32), True, False, 1.0, Options("nc", "bf16x3", 1e-6, 1e-6)),
    Case(4, 1, 5, 2, "cn", (FP32, FP32), False, True, 3.0, Options(iterations=1, post_scale=1.0)),
    Case(5, 1025, 8, 4, "cn", (FP32, BF16), True, True, 1.0, Options(iterations=3)),
]
WEIGHTS = ("phi", "norm_weight", "alpha", "beta")


def four_ops(case: Case, a: cases.Inputs, x: torch.Tensor | None = None, collapsed=None):
    """(out, post, res, pre) by `projection`, `scale`, `sinkhorn` and `aggregate`.

    ``collapsed``: what aggregate takes in place of x, to have the two gradients apart.
    """
    o, n = case.options, case.n
    x = a.x if x is None else x
    h, ms = projection(
        x, a.phi, norm_weight=a.norm_weight, layout=case.layout, precision=o.precision
    )
    pre, post, z = scale(
        h, a.alpha, a.beta, ms, n, eps=o.eps, pre_eps=o.pre_eps, post_scale=o.post_scale
    )
    res = sinkhorn(z, n, iterations=o.iterations, form=o.form, eps=o.form_eps)
    collapsed = x if collapsed is None else collapsed
    return aggregate(collapsed, pre, n, layout=case.layout), post, res, pre


def mixed(case: Case, a: cases.Inputs, x: torch.Tensor | None = None):
    x = a.x if x is None else x
    return mix_and_aggregate(
        x, a.phi, a.alpha, a.beta, norm_weight=a.norm_weight, options=case.options
    )


def require_same(got, want) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert same_bytes(a.reshape(b.shape), b), i


@pytest.mark.parametrize("case", VARIANTS, ids=lambda c: f"{c.seed}")
def test_mix_and_aggregate_is_the_four_ops(case):
    """Results, and gradients of weights, byte for byte; dx but for how often it is rounded."""
    x = cases.inputs_of(case)
    up = cases.upstream_of(case, x)
    out, apart = [], []
    for run in (mixed, four_ops):
        a = runs.leaves_of(x)
        if run is four_ops:
            apart = [a.x, a.x.detach().clone().requires_grad_()]
            results = four_ops(case, a, collapsed=apart[1])[:3]
        else:
            results = mixed(case, a)
        torch.autograd.backward(results, [up.out, up.post, up.res])
        out.append((results, runs.gradients(a, *WEIGHTS), a.x.grad))
    require_same(out[0][0], out[1][0])
    for name, gradient in out[0][1].items():
        assert same_bytes(gradient, out[1][1][name]), name
    rounded_once(out[0][2], apart)


def rounded_once(fused: torch.Tensor, apart: list[torch.Tensor]) -> None:
    """dx of one rounding, against terms that were rounded each: half an ulp of every one.

    And four roundings of fp32, of the sums before.
    """
    terms = [t.grad.double() for t in apart]
    assert all(t.any() for t in terms)
    size = sum(t.abs() for t in terms)
    half = torch.finfo(fused.dtype).eps / 2
    bound = half * (size + fused.double().abs()) * (1 + half) + 4 * 2.0**-24 * size
    error = (fused.double() - sum(terms)).abs()
    assert (error <= bound + 1e-37).all(), (error / bound).max()


def ended(case: Case, a: cases.Inputs) -> torch.Tensor:
    return expand_combine(a.f, a.bias, a.post, a.x, a.res, case.n, layout=case.layout)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("case", VARIANTS, ids=lambda c: f"{c.seed}")
def test_post_pre_is_expand_combine_and_mix_and_aggregate(case, shift):
    """All results, and all gradients: y's whole gradient is rounded once in both."""
    x = cases.inputs_of(case)
    up = cases.upstream_of(case, x)
    out = []
    for fused in (True, False):
        a = runs.leaves_of(x)
        if fused:
            results = post_pre(
                a.f, a.bias, a.post, a.x, a.res, a.phi, a.alpha, a.beta,
                H_pre=a.pre if shift else None, norm_weight=a.norm_weight, options=case.options,
            )  # fmt: skip
        else:
            y = ended(case, a)
            if shift:
                _, post, res, pre = four_ops(case, a, y)
                results = (y, aggregate(y, a.pre, case.n, layout=case.layout), post, res, pre)
            else:
                results = (y, *mixed(case, a, y))
        upstream = [up.y, up.out, up.post, up.res] + [up.pre] * shift
        names = ("f", "bias", "post", "x", "res", *WEIGHTS) + ("pre",) * shift
        torch.autograd.backward(results, upstream)
        out.append((results, runs.gradients(a, *names)))
    require_same(out[0][0], out[1][0])
    exactly = WEIGHTS + ("pre",) * shift
    for name, gradient in out[0][1].items():
        if name.removeprefix("d_") in exactly:
            assert same_bytes(gradient, out[1][1][name]), name
    # Autograd adds dy to the site's dx after that has been rounded once already.
    site, y = cases.site_of(case, x), cases.rows(out[0][0][0])
    inputs = reference.Given(up.out, cases.rows(up.pre), cases.rows(up.post), cases.rows(up.res))
    shifted = x.pre.double() if shift else None
    inputs = inputs if shift else inputs._replace(pre=None)
    own = reference.mix_and_aggregate_backward(y, site, inputs, shifted).x
    # A shifted one is three ops here, and has a rounding more.
    own = own.stored(x.x.dtype).stored(x.x.dtype).stored(x.x.dtype)
    d_y = (own + cases.rows(up.y)).stored(x.x.dtype)
    end = reference.expand_combine_backward(cases.rows(x.x), cases.expand_of(x), d_y, case.streams)
    for name in ("f", "bias", "post", "x", "res"):
        gradient = out[1][1].get(f"d_{name}")
        assert gradient is None or cases.share(gradient, getattr(end, name)) <= 1, name


@pytest.mark.parametrize("case", VARIANTS, ids=lambda c: f"{c.seed}")
def test_connect_has_the_composed_forward(case):
    """And the composed backward, but for dx, which is rounded once in place of each time."""
    x = cases.inputs_of(case)
    up = cases.upstream_of(case, x)
    made, apart = [], []
    for fused in (True, False):
        a = runs.leaves_of(x)
        sublayer = lambda out: (out * 1.25).tanh()  # noqa: E731
        if fused:
            options = {"norm_weight": a.norm_weight, "options": case.options}
            y = connect(a.x, sublayer, a.phi, a.alpha, a.beta, bias=a.bias, **options)
        else:
            apart = [a.x] + [a.x.detach().clone().requires_grad_() for _ in range(2)]
            out, post, res, _ = four_ops(case, a, collapsed=apart[1])
            y = ended(case, a._replace(f=sublayer(out), post=post, x=apart[2], res=res))
        y.backward(up.y)
        made.append((y, runs.gradients(a, "bias", *WEIGHTS), a.x.grad))
    assert same_bytes(made[0][0], made[1][0])
    for name, gradient in made[0][1].items():
        assert same_bytes(gradient, made[1][1][name]), name
    rounded_once(made[0][2], apart)


def test_no_value_of_a_link_is_read(monkeypatch):
    """A link carries a gradient; its memory is never filled."""
    case = VARIANTS[0]
    x = cases.inputs_of(case)
    up = cases.upstream_of(case, x)
    results = []
    for value in (0.0, float("nan")):
        fill = lambda x, linked, value=value: x.new_full((1, 1), value).expand(x.shape)  # noqa: E731
        monkeypatch.setattr(site_op, "_link", fill)
        a = runs.leaves_of(x)
        y = connect(a.x, torch.tanh, a.phi, a.alpha, a.beta, bias=a.bias, options=case.options)
        y.backward(up.y)
        gradients = runs.gradients(a, "x", "bias", "phi", "alpha", "beta")
        results.append([y, *(gradients[name] for name in sorted(gradients))])
    assert all(map(same_bytes, *results))


@pytest.mark.parametrize("layout", ["cn", "nc"])
def test_layouts_differ_in_the_last_bits_only(layout):
    """The same streams in the other layout, with phi's columns moved."""
    case = Case(6, 13, 96, spread=1.0)
    x = cases.inputs_of(case)
    h, ms = projection(x.x, x.phi)
    phi = x.phi.view(24, 96, 4).mT.reshape(24, -1)
    other, other_ms = projection(x.x.mT, phi, layout="nc")
    assert (h - other).abs().max() < 1e-5 and (ms - other_ms).abs().max() < 1e-5
    assert not torch.allclose(h, projection(x.x.mT, x.phi, layout="nc")[0], atol=1e-2)
    # What has no sum over channels has the same bytes.
    out, turned = aggregate(x.x, x.pre, 4), aggregate(x.x.mT, x.pre, 4, layout="nc")
    assert same_bytes(out, turned)
    y = ended(case, x)
    turned = expand_combine(x.f, x.bias, x.post, x.x.mT, x.res, 4, layout="nc")
    assert same_bytes(y.mT, turned)


def test_a_shifted_site_begins_with_one_stream():
    """One-hot rows collapse to the first stream, as the site before the first one has it."""
    case = Case(7, 13, 33, bias=True)
    x = cases.inputs_of(case)
    first = torch.zeros(13, 4)
    first[:, 0] = 1
    y, out, *_ = post_pre(x.f, x.bias, x.post, x.x, x.res, x.phi, x.alpha, x.beta, H_pre=first)
    assert same_bytes(out, y[..., 0].contiguous())


def test_the_flat_form_of_x():
    """[..., K] is [..., C, n]."""
    x = cases.inputs_of(Case(8, 13, 33))
    for flat, own in zip(projection(x.x.flatten(1), x.phi), projection(x.x, x.phi), strict=True):
        assert same_bytes(flat, own)
