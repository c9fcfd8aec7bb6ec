"""Fused is composed: byte for byte where api.py says so.

dx is rounded once in place of each time: runs.py has its bound.
"""

from __future__ import annotations

import pytest
import torch

from cute_kernels.mhc import (
    Options,
    aggregate,
    expand_combine,
    post_pre,
    projection,
    scale,
    sinkhorn,
    site_op,
)
from tests.contract import same_bytes
from tests.mhc import calls, cases
from tests.mhc.calls import CALLS
from tests.mhc.cases import BF16, FP32, Case

VARIANTS = [
    Case(1, 13, 97, 4, "cn", (BF16, FP32), True, True, 3.0),
    Case(2, 13, 97, 2, "nc", (BF16, BF16), False, False, 1.0, Options(layout="nc", form="epsilon")),
    Case(3, 48, 600, 4, "nc", (FP32, FP32), True, False, 1.0, Options("nc", "bf16x3", 1e-6, 1e-6)),
    Case(4, 1, 5, 2, "cn", (FP32, FP32), False, True, 3.0, Options(iterations=1, post_scale=1.0)),
    Case(5, 1025, 8, 4, "cn", (FP32, BF16), True, True, 1.0, Options(iterations=3)),
]
WEIGHTS = ("phi", "norm_weight", "alpha", "beta")


def four_ops(case: Case, a: cases.Inputs):
    """(out, post, res, pre) by `projection`, `scale`, `sinkhorn` and `aggregate`."""
    o, n = case.options, case.n
    form = {"layout": case.layout, "precision": o.precision}
    h, ms = projection(a.x, a.phi, norm_weight=a.norm_weight, **form)
    numbers = {"eps": o.eps, "pre_eps": o.pre_eps, "post_scale": o.post_scale}
    pre, post, z = scale(h, a.alpha, a.beta, ms, n, **numbers)
    res = sinkhorn(z, n, iterations=o.iterations, form=o.form, eps=o.form_eps)
    return [aggregate(a.x, pre, n, layout=case.layout), post, res, pre]


def end_and_site(a: cases.Inputs, case: Case) -> list[torch.Tensor]:
    (y,) = CALLS["expand_combine"](a, case)
    return [y, *CALLS["mix_and_aggregate"](a._replace(x=y), case)]


def end_and_shifted(a: cases.Inputs, case: Case) -> list[torch.Tensor]:
    (y,) = CALLS["expand_combine"](a, case)
    _, post, res, pre = four_ops(case, a._replace(x=y))
    return [y, aggregate(y, a.pre, case.n, layout=case.layout), post, res, pre]


def connected(a: cases.Inputs, case: Case) -> list[torch.Tensor]:
    out, post, res, _ = four_ops(case, a)
    return CALLS["expand_combine"](a._replace(f=calls.sublayer(out), post=post, res=res), case)


#: Fusion -> (what it is composed of, the leaves whose gradients have its bytes).
COMPOSED = {
    "mix_and_aggregate": (lambda a, case: four_ops(case, a)[:3], WEIGHTS),
    "post_pre": (end_and_site, WEIGHTS),
    "shifted": (end_and_shifted, (*WEIGHTS, "pre")),
    "connect": (connected, ("bias", *WEIGHTS)),
}


@pytest.mark.parametrize("case", VARIANTS, ids=lambda c: f"{c.seed}")
@pytest.mark.parametrize("name", COMPOSED)
def test_fused_is_composed(name, case):
    composed, exactly = COMPOSED[name]
    x = cases.inputs_of(case)
    up, out = cases.upstream_of(case, x), []
    for run in (CALLS[name], composed):
        a = calls.leaves_of(x)
        results = run(a, case)
        torch.autograd.backward(results, [getattr(up, r) for r in CALLS[name].results])
        grads = [t.grad for leaf in exactly if (t := getattr(a, leaf)) is not None]
        out.append([*results, *grads])
    for i, (a, b) in enumerate(zip(*out, strict=True)):
        assert same_bytes(a.reshape(b.shape), b), i


def test_no_value_of_a_link_is_read(monkeypatch):
    """A link carries a gradient; its memory is never filled."""
    case, results = VARIANTS[0], []
    x = cases.inputs_of(case)
    for value in (0.0, float("nan")):
        fill = lambda x, linked, value=value: x.new_full((1, 1), value).expand(x.shape)  # noqa: E731
        monkeypatch.setattr(site_op, "_link", fill)
        a = calls.leaves_of(x)
        (y,) = CALLS["connect"](a, case)
        y.backward(cases.upstream_of(case, x).y)
        results.append([y, *(getattr(a, leaf).grad for leaf in CALLS["connect"].leaves)])
    assert all(map(same_bytes, *results))


def test_layouts_differ_in_the_last_bits_only():
    """The same streams in the other layout, with phi's columns moved; x may be flat."""
    x = cases.inputs_of(Case(6, 13, 96, bias=True))
    h, ms = projection(x.x, x.phi)
    phi = x.phi.view(24, 96, 4).mT.reshape(24, -1)
    other, other_ms = projection(x.x.mT, phi, layout="nc")
    assert (h - other).abs().max() < 1e-5 and (ms - other_ms).abs().max() < 1e-5
    assert not torch.allclose(h, projection(x.x.mT, x.phi, layout="nc")[0], atol=1e-2)
    # What has no sum over channels has the same bytes.
    assert same_bytes(aggregate(x.x, x.pre, 4), aggregate(x.x.mT, x.pre, 4, layout="nc"))
    y = expand_combine(x.f, x.bias, x.post, x.x, x.res, 4)
    turned = expand_combine(x.f, x.bias, x.post, x.x.mT, x.res, 4, layout="nc")
    assert same_bytes(y.mT, turned)
    assert all(map(same_bytes, projection(x.x.flatten(1), x.phi), (h, ms)))
    assert same_bytes(sinkhorn(x.z).flatten(1), sinkhorn(x.z.flatten(1), 4))


def test_a_shifted_site_begins_with_one_stream():
    """One-hot rows collapse to the first stream, as the site before the first one has it."""
    x = cases.inputs_of(Case(7, 13, 33, bias=True))
    first = torch.zeros(13, 4)
    first[:, 0] = 1
    y, out, *_ = post_pre(x.f, x.bias, x.post, x.x, x.res, x.phi, x.alpha, x.beta, H_pre=first)
    assert same_bytes(out, y[..., 0].contiguous())
