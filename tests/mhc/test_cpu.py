"""The CPU backend's values: within the bounds of float64, and no worse than TransformerEngine's."""

from __future__ import annotations

import collections
import math

import pytest
import torch

from cute_kernels.mhc import (
    Options,
    checks,
    expand_combine,
    expand_from_embedding,
    multilayer_recompute,
    projection,
    sinkhorn,
)
from cute_kernels.mhc.config import chunk_channels
from cute_kernels.mhc.tensors import Sinkhorn
from tests.contract import bits, same_bytes
from tests.mhc import cases, formulas, runs
from tests.mhc.cases import BF16, FP32, Case
from tests.mhc.sm90_orders import squares_of_rows
from tests.oracles import mhc as reference
from tests.oracles.error_bounds import Near

DRAWN = 12
PER_TEST = 4
FIRSTS = [
    pytest.param(first, marks=[pytest.mark.nightly] if first >= DRAWN else [])
    for first in range(0, 160, PER_TEST)
]


def worst_of(case: Case) -> dict[str, float]:
    """The largest share of its bound that each result of a case takes: ops and fusions."""
    x = cases.inputs_of(case)
    out = {}
    for name, function in runs.FUNCTIONS.items():
        got, want = function(case, x)
        for key, share in cases.shares(got, want).items():
            out[f"{name}: {key}"] = share
    return out


def require_within(case: Case) -> None:
    over = {name: share for name, share in worst_of(case).items() if share > 1}
    assert not over, f"{case}: {over}"


@pytest.mark.parametrize("first", FIRSTS)
def test_drawn_cases_against_float64(first):
    """Every result of every op and fusion, forward and backward."""
    for seed in range(first, first + PER_TEST):
        require_within(cases.draw(seed))


def test_the_bounds_are_near():
    """A bound that nothing comes near lets mistakes pass: what fp32 results take of theirs.

    Bounds of a whole site add up what never meets; its bytes are those of the ops
    (test_fused.py), whose bounds are near.
    """
    worst = collections.Counter()
    for layout, form in (("cn", "log"), ("nc", "epsilon")):
        options = Options(layout=layout, form=form, precision="bf16x3")
        case = Case(1, 13, 32, 4, layout, norm_weight=True, bias=True, spread=3.0, options=options)
        worst |= collections.Counter(worst_of(case))
    ops = ("projection", "scale", "sinkhorn", "aggregate", "expand_combine")
    low = {
        name: share
        for name, share in worst.items()
        if share < (0.002 if name.startswith(ops) else 1e-5) and "embedding" not in name
    }
    assert not low, low


def of_te(shape: tuple[int, int, int]) -> Case:
    b, s, c = shape
    return Case(3, b * s, c, dtypes=(BF16, FP32), norm_weight=True, bias=True, spread=3.0)


def of_tokens(m: int, layout: str) -> Case:
    return Case(8, m, 24, 4, layout, (BF16, FP32), True, True, 3.0, Options(layout=layout))


FEW = [shape for shape in cases.TE_SHAPES if 4 * math.prod(shape) <= cases.CPU_ELEMENTS]
SITE, NC = ("mix_and_aggregate", "expand_combine"), Options(layout="nc")
#: Shapes of TransformerEngine and between, widths of models, numbers of tokens around a chunk.
GROUPS = [
    [(SITE, of_te(shape), shape[:2]) for shape in [*FEW, *cases.SMALL_SHAPES]],
    [
        (("projection", "aggregate"), Case(4, 13, c, n, "nc", (BF16, BF16), options=NC), None)
        for c, n in zip(cases.CHANNELS, (2, 4) * 3, strict=True)
    ],
    [(SITE, of_tokens(m, "cn"), None) for m in cases.TOKENS[:-1]],
    [(SITE, of_tokens(m, "nc"), None) for m in (1, 137, 1100)],
]
#: By day the first of each group, every third one and the last.
SHAPES = [
    pytest.param(*case, marks=() if i % 3 == 0 or case is group[-1] else pytest.mark.nightly)
    for group in GROUPS
    for i, case in enumerate(group)
]


@pytest.mark.parametrize(("names", "case", "leading"), SHAPES, ids=str)
def test_shapes(names, case, leading):
    x = cases.inputs_of(case)
    for name in names:
        got, want = runs.compared(name, case, x, leading=leading)
        assert max(cases.shares(got, want).values()) <= 1


# ---- against TransformerEngine's formulas --------------------------------------------------------


@pytest.mark.parametrize("dtypes", cases.DTYPES, ids=str)
@pytest.mark.parametrize("precision", ["bf16x2", "bf16x3"])
def test_h_is_within_1e_5(dtypes, precision):
    """RMS of the error over RMS of H; a TF32 product's is hundreds of times ours."""
    options = Options(precision=precision)
    case = Case(5, 137, 1280, dtypes=dtypes, norm_weight=True, options=options)
    x = cases.inputs_of(case)
    h, _ = projection(x.x, x.phi, norm_weight=x.norm_weight, precision=precision)
    want, _ = reference.projection(cases.rows(x.x), cases.mapping_of(case, x), case.streams)
    ours = formulas.rms(h[:, :24].double() - want.value) / formulas.rms(want.value)
    theirs = formulas.te_projection(x.x.flatten(1), x.phi, x.norm_weight)[0].double() - want.value
    assert ours <= 1e-6 and ours <= formulas.rms(theirs) / formulas.rms(want.value)
    assert h.shape == (137, 32) and not bits(h[:, 24:]).any()


@pytest.mark.parametrize("dtypes", cases.DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_errors_are_not_above_transformer_engines(dtypes, n):
    """Of every result of the five ops and of a site, forward and backward: RMS against float64."""
    case = Case(6, 64, 320, n, dtypes=dtypes, norm_weight=True, bias=True, spread=3.0)
    x = cases.inputs_of(case)
    assert not {name: over for name in formulas.TE if (over := formulas.above(name, case, x))}


@pytest.mark.parametrize(("m", "c"), [(13, 2048), (48, 5129)])
def test_squares_on_sm90_are_as_near_as_theirs(m, c):
    """In the order that sm90_orders.py shows the kernel to have; one chain is far off."""
    rows = cases.inputs_of(Case(71, m, c, 4, "cn", (BF16, FP32))).x.reshape(m, -1)
    value = rows.double().square().mean(1)
    _, theirs = formulas.te_projection(rows, torch.zeros(1, rows.shape[1]))

    def above(chained: bool) -> bool:
        parts = squares_of_rows(rows, 4 * chunk_channels(4, "bf16x2"), chained)
        our_error, other, room = formulas.errors(formulas.chain(parts) / (4 * c), theirs, value)
        return our_error > other + room

    assert above(chained=True) and not above(chained=False)


# ---- orientation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 20])
def test_it_is_the_transpose_of_equation_9(iterations):
    """The paper divides columns, then rows, and contracts the second index."""
    z = 3 * cases.normal(20, 4, 4, seed=2)
    m = torch.exp(z.double().mT)
    for _ in range(iterations):
        m = m / m.sum(1, keepdim=True)
        m = m / m.sum(2, keepdim=True)
    assert (sinkhorn(z, iterations=iterations).double() - m.mT).abs().max() < 1e-6


def test_one_stream_to_another():
    """R with a single 1 at (i, j) moves stream i to stream j, and nothing else."""
    x = cases.normal(1, 8, 4, seed=3)
    for i in range(4):
        for j in range(4):
            res = torch.zeros(1, 4, 4)
            res[0, i, j] = 1
            y = expand_combine(torch.zeros(1, 8), None, torch.zeros(1, 4), x, res, 4)
            assert torch.equal(y[..., j], x[..., i])
            assert not y[..., [k for k in range(4) if k != j]].any()


# ---- sinkhorn ------------------------------------------------------------------------------------

#: The most iterations of each form that are taken.
MOST = {"log": checks.MAX_LOG_ITERATIONS, "epsilon": checks.MAX_ITERATIONS}
#: 64 iterations of "log" made a row of sums 1/3 and 3 of it.
LOST = [[169.0, 1, -71, 15], [22, -41, 24, -41], [161, -207, -76, 6], [96, -75, -23, -61]]


def logits(n: int) -> dict[str, torch.Tensor]:
    """Logits [M, n, n], ordinary ones and those at which a formula of exponentials breaks."""
    g = cases.generator(11)
    column, row = torch.randn(2, 8, n, n, generator=g)
    column[:, :, 1], row[:, 0] = -1e4, -1e4
    wide = torch.tensor([30.0, 60.0, 100.0, 200.0]).repeat(25)[:, None, None]
    return {
        "1": torch.randn(40, n, n, generator=g),
        "3": 3 * torch.randn(40, n, n, generator=g),
        "±1e4": 1e4 * torch.randn(64, n, n, generator=g).sign(),
        "a column of -1e4": column,
        "a row": row,
        "identity": torch.eye(n).expand(8, n, n) * 200 + torch.randn(8, n, n, generator=g),
        "equal": torch.full((2, n, n), 1e4),
        "wide": torch.cat(
            [wide * torch.randn(100, n, n, generator=g), torch.tensor([LOST])[:, :n, :n]]
        ),
    }


@pytest.mark.parametrize("form", MOST)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", logits(2))
def test_sinkhorn_of_any_logits(name, n, form):
    """Elements that fp32 loses at first never matter within the iterations that are taken."""
    z = logits(n)[name].flatten(1)
    d_p = cases.normal(*z.shape, seed=12)
    for iterations in (1, 2, 20, MOST[form]):
        leaf = z.clone().requires_grad_()
        p = sinkhorn(leaf, n, iterations=iterations, form=form)
        p.backward(d_p)
        assert p.isfinite().all() and leaf.grad.isfinite().all()
        columns = p.view(-1, n, n).sum(1)
        assert form == "epsilon" or (columns - 1).abs().max() < 1e-6
        options = Sinkhorn(iterations, form, 1e-6)
        assert cases.share(p, reference.sinkhorn(z.double(), n, options)) <= 1
        want = reference.sinkhorn_backward(z.double(), d_p.double(), n, options)
        assert cases.share(leaf.grad, want) <= 1
        if name == "3" and iterations <= 20:
            # One more is outside the bound.
            more = sinkhorn(z, n, iterations=iterations + 1, form=form)
            assert cases.share(more, reference.sinkhorn(z.double(), n, options)) > 10


@pytest.mark.parametrize("eps", [1e-6, 1e-30])
def test_the_most_iterations_with_an_epsilon(eps):
    z = torch.cat([60 * cases.normal(400, 4, 4, seed=15), torch.tensor([LOST])]).flatten(1)
    p = sinkhorn(z, 4, iterations=checks.MAX_ITERATIONS, form="epsilon", eps=eps)
    options = Sinkhorn(checks.MAX_ITERATIONS, "epsilon", eps)
    assert cases.share(p, reference.sinkhorn(z.double(), 4, options)) <= 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", MOST)
def test_a_row_of_nan_stays_a_row(form, value):
    z, d_p, results = cases.normal(20, 16, seed=15), cases.normal(20, 16, seed=16), []
    for seventh in (z[7], value):
        leaf = z.clone()
        leaf[7] = seventh
        p = sinkhorn(leaf.requires_grad_(), 4, form=form)
        p.backward(d_p)
        results.append((p.detach(), leaf.grad))
    keep = [i for i in range(20) if i != 7]
    assert all(same_bytes(a[keep], b[keep]) for a, b in zip(*results, strict=True))
    assert results[1][0][7].isnan().all()


# ---- the small ones ------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 32])
@pytest.mark.parametrize("layout", ["cn", "nc"])
@pytest.mark.parametrize("n", [2, 4])
def test_streams_of_an_embedding(n, layout, channels):
    """Copies, and a write into one of them reaches no other one and not the embedding."""
    e = cases.normal(3, 5, channels, seed=20, dtype=BF16)
    x, copy = expand_from_embedding(e, n, layout=layout), e.clone()
    assert x.is_contiguous()
    streams = x.unbind(-1 if layout == "cn" else -2)
    assert len(streams) == n and all(same_bytes(stream, e) for stream in streams)
    streams[0].add_(1.0)
    assert same_bytes(e, copy) and same_bytes(streams[1], copy)
    assert not same_bytes(streams[0], copy)


def test_multilayer_recompute():
    x, sites, want = cases.normal(7, 33, 4, seed=21, dtype=BF16), [], []
    last = x
    # One site without a bias between two and five with one.
    for seed in range(8):
        case = Case(30 + seed, 7, 33, dtypes=(BF16, FP32), bias=seed != 2)
        i = cases.inputs_of(case)
        sites.append((i.f.requires_grad_(), i.bias, i.post, i.res))
        last = expand_combine(i.f, i.bias, i.post, last, i.res, 4)
        want.append(last)
    got = multilayer_recompute(x, sites, 4)
    assert multilayer_recompute(x, [], 4) == []
    assert len(got) == 8 and all(same_bytes(a, b) for a, b in zip(got, want, strict=True))
    assert not any(t.requires_grad for t in got)


def test_a_wrong_value_is_seen():
    """Shares above 1 are found: an answer that is off by a little more than its bound."""
    want = Near(torch.ones(3).double(), torch.full((3,), 1e-6).double())
    assert cases.share(torch.tensor([1.0, 1.0 + 2e-6, 1.0]), want) > 1.5
    assert cases.share(torch.tensor([1.0, math.nan, 1.0]), want) > 1.5
