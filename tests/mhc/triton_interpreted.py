"""The Triton mhc in Triton's interpreter: values, and ops that launch several kernels.

Collected by test_triton_interpreter.py only, in a process that has TRITON_INTERPRET=1 before triton
is imported.  2^y is the CPU backend's, casts to bf16 round, and an fma is a product and a sum, as
the CPU backend's are: then most results are its bytes.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from cute_kernels.mhc import api, op
from cute_kernels.mhc.triton import launch
from cute_kernels.runtime import dispatch
from cute_kernels.runtime.plan_cache import Plan

from ..triton_in_numpy import same_on_every_machine  # noqa: F401
from . import triton_cases as cases
from .triton_cases import BF16, FP32, SHAPES, Shape
from .triton_harness import cpu_arithmetic, device_guard, made_small  # noqa: F401

assert os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


#: The first shapes have whole chunks of channels: by day for what reads chunks.
WIDE, EVERY_COMMIT = 2, 5
OF_CHUNKS = ("projection", "project_expanded", "coefficients")


def values():
    for (i, shape), check in itertools.product(enumerate(SHAPES), cases.CHECKS):
        by_day = i < EVERY_COMMIT and (i >= WIDE or check in OF_CHUNKS)
        marks = () if by_day else pytest.mark.nightly
        yield pytest.param(check, shape, id=f"{check}-{i}", marks=marks)


@pytest.mark.parametrize(("check", "shape"), list(values()))
def test_values(check, shape):
    cases.CHECKS[check](launch, cases.given(shape))


def test_parts_are_added():
    cases.parts_are_added(launch)


@pytest.mark.parametrize("n", [2, 4])
def test_far_logits(n):
    cases.far_logits(launch, n)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 32 channels and of 64 tokens."""
    made_small(launch, monkeypatch)


@pytest.mark.parametrize("check", ["gates_backward", "reduce", "projection_backward"])
def test_values_of_many_chunks(small_chunks, monkeypatch, check):
    monkeypatch.setattr(cases, "TOKENS", 64)
    cases.CHECKS[check](launch, cases.given(Shape(150, 9, 2, "nc", FP32)))


@pytest.fixture
def through_the_ops(monkeypatch):
    """The ops run on these launchers."""

    def plan(entry, device, dtype, *operands):
        return Plan(getattr(launch, op._LAUNCHERS[entry]), fresh=False)

    monkeypatch.setattr(dispatch, "plan", plan)


@pytest.mark.parametrize("shape", [Shape(9, 40, 4, "cn", BF16), Shape(5, 33, 2, "nc", FP32)])
def test_fused_is_composed(through_the_ops, shape):
    """A site, and two, in one call and in their parts: the same bytes."""
    g, n = cases.given(shape), shape.n
    options = api.Options(layout=shape.layout, iterations=4)
    weights = (g.mapping.phi, g.gates.alpha, g.gates.beta)
    normed = {"norm_weight": g.mapping.norm_weight}
    x = g.x.view(-1, *((shape.c, n) if shape.layout == "cn" else (n, shape.c)))
    h, ms = api.projection(x, weights[0], layout=shape.layout, **normed)
    pre, post, z = api.scale(h, *weights[1:], ms, n)
    res = api.sinkhorn(z, n, iterations=4)
    out = api.aggregate(x, pre, n, layout=shape.layout)
    fused = api.mix_and_aggregate(x, *weights, options=options, **normed)
    cases.equal(fused, (out, post, res))
    y = api.expand_combine(g.f, g.bias, post, x, res, n, layout=shape.layout)
    behind = api.mix_and_aggregate(y, *weights, options=options, **normed)
    both = api.post_pre(g.f, g.bias, post, x, res, *weights, options=options, **normed)
    cases.equal(both, (y, *behind))
    shifted = api.post_pre(
        g.f, g.bias, post, x, res, *weights, H_pre=pre, options=options, **normed
    )
    collapsed = api.aggregate(y, pre, n, layout=shape.layout)
    cases.equal(shifted[:2], (y, collapsed))


def gradients(g, tokens: slice, main_grads: dict) -> list[torch.Tensor]:
    """Of a site with a sublayer, of some tokens: y and dx; weights go into ``main_grads``."""
    n, options = g.shape.n, api.Options(layout=g.shape.layout, iterations=3)
    own = {"phi": g.mapping.phi, "alpha": g.gates.alpha, "beta": g.gates.beta}
    own |= {"norm_weight": g.mapping.norm_weight, "bias": g.bias}
    leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
    place = (g.shape.c, n) if g.shape.layout == "cn" else (n, g.shape.c)
    x = g.x[tokens].view(-1, *place).clone().requires_grad_()
    y = api.connect(
        x,
        lambda out: out * out.abs(),
        *(leaves[name] for name in ("phi", "alpha", "beta")),
        norm_weight=leaves["norm_weight"],
        bias=leaves["bias"],
        options=options,
        main_grads=main_grads,
    )
    y.backward(g.dy[tokens].view(y.shape))
    return [y.detach(), x.grad]


def test_micro_batches_of_a_site(through_the_ops, small_chunks):
    """Two of them have the gradients of one call, bit for bit."""
    g = cases.given(Shape(64 + 30, 9, 2, "cn", BF16))
    sizes = {"phi": g.mapping.phi, "alpha": g.gates.alpha, "beta": g.gates.beta}
    sizes |= {"norm_weight": g.mapping.norm_weight, "bias": g.bias}
    whole, cut = ({name: torch.full(t.shape, 0.1) for name, t in sizes.items()} for _ in range(2))
    want = gradients(g, slice(None), whole)
    pieces = [gradients(g, tokens, cut) for tokens in (slice(64), slice(64, None))]
    cases.equal([torch.cat(pair) for pair in zip(*pieces, strict=True)], want)
    cases.equal(cut.values(), whole.values())
    assert all((t != 0.1).all() for t in whole.values())
