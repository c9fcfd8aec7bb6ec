"""The CPU backend's values: within the bounds of float64, and no worse than TransformerEngine's."""

from __future__ import annotations

import collections
import math

import pytest
import torch

from cute_kernels.mhc import (
    Options,
    aggregate,
    checks,
    expand_combine,
    expand_from_embedding,
    head,
    multilayer_recompute,
    projection,
    scale,
    sinkhorn,
)
from cute_kernels.mhc.config import mappings
from cute_kernels.mhc.tensors import Sinkhorn
from tests.contract import bits, same_bytes
from tests.mhc import cases, formulas, runs
from tests.mhc.cases import BF16, FP32, Case
from tests.mhc.exact import ADDED
from tests.oracles import mhc as reference
from tests.oracles.error_bounds import Near

DRAWN = 24
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


@pytest.mark.parametrize("first", FIRSTS)
def test_drawn_cases_against_float64(first):
    """Every result of every op and fusion, forward and backward."""
    worst = collections.Counter()
    for seed in range(first, first + PER_TEST):
        out = worst_of(cases.draw(seed))
        over = {name: share for name, share in out.items() if share > 1}
        assert not over, f"{cases.draw(seed)}: {over}"
        worst |= collections.Counter(out)
    print({name: round(share, 3) for name, share in worst.items()})


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
    print({name: round(share, 4) for name, share in worst.items()})
    ops = ("project", "gate", "sinkhorn", "collapse", "expand")
    low = {
        name: share
        for name, share in worst.items()
        if share < (0.002 if name.startswith(ops) else 1e-5)
    }
    assert not low, low


def test_the_draw_covers_what_it_claims():
    drawn = [cases.draw(seed) for seed in range(DRAWN)]
    assert {case.n for case in drawn} == {2, 4} and {case.layout for case in drawn} == {"cn", "nc"}
    assert {case.dtypes for case in drawn} == set(cases.DTYPES)
    assert {case.options.form for case in drawn} == {"log", "epsilon"}
    assert {(case.norm_weight, case.bias) for case in drawn} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    assert {case.spread for case in drawn} == {1.0, 3.0}
    assert any(case.n * case.c > 2048 for case in drawn) and any(case.c % 8 for case in drawn)


FEW = [shape for shape in cases.TE_SHAPES if 4 * math.prod(shape) <= cases.CPU_ELEMENTS]


@pytest.mark.parametrize("shape", [*FEW, *cases.SMALL_SHAPES], ids=str)
def test_shapes_of_transformer_engine(shape):
    """Forward and backward of a site, of [b, s, C, n] in bf16; and of shapes between theirs."""
    b, s, c = shape
    case = Case(3, b * s, c, dtypes=(BF16, FP32), norm_weight=True, bias=True, spread=3.0)
    x = cases.inputs_of(case)
    got, want = runs.mix(case, x, leading=(b, s))
    assert max(cases.shares(got, want).values()) <= 1
    got, want = runs.expand(case, x, leading=(b, s))
    assert max(cases.shares(got, want).values()) <= 1


@pytest.mark.parametrize("c", cases.CHANNELS)
@pytest.mark.parametrize("n", [2, 4])
def test_widths_of_models(c, n):
    """H and out of a few tokens of every width."""
    case = Case(4, 13, c, n, "nc", (BF16, BF16), options=Options(layout="nc"))
    x = cases.inputs_of(case)
    for function in (runs.project, runs.collapse):
        got, want = function(case, x)
        assert max(cases.shares(got, want).values()) <= 1


@pytest.mark.parametrize("m", [*cases.TOKENS[:-1], pytest.param(4096, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("layout", ["cn", "nc"])
def test_numbers_of_tokens(m, layout):
    """Around and beyond a chunk of the sums over tokens."""
    case = Case(8, m, 24, 4, layout, (BF16, FP32), True, True, 3.0, Options(layout=layout))
    x = cases.inputs_of(case)
    for function in (runs.expand, runs.mix, runs.gate):
        got, want = function(case, x)
        assert max(cases.shares(got, want).values()) <= 1


@pytest.mark.nightly
@pytest.mark.parametrize("dtypes", cases.DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["cn", "nc"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("c", cases.CHANNELS)
def test_sites_of_models(c, n, layout, dtypes):
    """Every function at every width, with and without the optional weights."""
    for optional in (False, True):
        options = Options(layout=layout)
        case = Case(9, 13, c, n, layout, dtypes, optional, optional, 3.0, options)
        over = {name: share for name, share in worst_of(case).items() if share > 1}
        assert not over, over


# ---- against TransformerEngine's formulas --------------------------------------------------------


@pytest.mark.parametrize("dtypes", cases.DTYPES, ids=str)
@pytest.mark.parametrize("precision", ["bf16x2", "bf16x3"])
def test_h_is_within_1e_5(dtypes, precision):
    """RMS of the error over RMS of H; a TF32 product's is hundreds of times ours."""
    options = Options(precision=precision)
    case = Case(5, 137, 1280, dtypes=dtypes, norm_weight=True, options=options)
    x = cases.inputs_of(case)
    h, ms = projection(x.x, x.phi, norm_weight=x.norm_weight, precision=precision)
    want, of_ms = reference.projection(cases.rows(x.x), cases.mapping_of(case, x), case.streams)
    ours = formulas.rms(h[:, :24].double() - want.value) / formulas.rms(want.value)
    theirs = formulas.te_projection(x.x.flatten(1), x.phi, x.norm_weight)[0].double() - want.value
    theirs = formulas.rms(theirs) / formulas.rms(want.value)
    assert ours <= 1e-6 and ours <= theirs
    assert not bits(h[:, 24:]).any() and cases.share(ms, of_ms) <= 1


@pytest.mark.parametrize("dtypes", cases.DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_errors_are_not_above_transformer_engines(dtypes, n):
    """Of every result of the five ops and of a site, forward and backward: RMS against float64.

    Where both are nothing but the last rounding, chance decides: `formulas.errors`.
    """
    case = Case(6, 64, 320, n, dtypes=dtypes, norm_weight=True, bias=True, spread=3.0)
    x = cases.inputs_of(case)
    over = {}
    for name, theirs in formulas.TE.items():
        added = ADDED[name](case, x) if name in ADDED else {}
        got, want = runs.FUNCTIONS[name](case, x)
        other = theirs(case, x)
        assert other.keys() <= got.keys()
        for key, t in other.items():
            out = got[key].detach(), t, want[key].value
            our_error, other, room = formulas.errors(*out, added.get(key))
            if our_error > other + room:
                over[f"{name}: {key}"] = (our_error, other)
    assert not over, over


# ---- orientation ---------------------------------------------------------------------------------


def test_output_streams_are_convex_mixes():
    """H_res contracts its first index: its columns sum to 1, its rows nearly."""
    case = Case(7, 48, 16, spread=3.0)
    x = cases.inputs_of(case)
    p = sinkhorn(3 * cases.normal(48, 4, 4, seed=1))
    assert (p >= 0).all()
    assert (p.sum(1) - 1).abs().max() < 1e-6
    # 20 iterations, and no last one of the rows: off by a few percent.
    rows = (p.sum(2) - 1).abs().max()
    assert 1e-4 < rows < 0.2
    assert (
        sinkhorn(3 * cases.normal(48, 4, 4, seed=1), iterations=26).sum(2) - 1
    ).abs().max() < rows
    y = expand_combine(torch.zeros_like(x.f), None, x.post, x.x, p, 4)
    low, high = x.x.amin(2, keepdim=True), x.x.amax(2, keepdim=True)
    room = 1e-5 * x.x.abs().amax()
    assert (y >= low - room).all() and (y <= high + room).all()
    # Of equal streams every mix is the stream; of a matrix used the other way it is not.
    same = x.x[:, :, :1].expand(-1, -1, 4)
    kept = expand_combine(torch.zeros_like(x.f), None, x.post, same, p, 4)
    turned = expand_combine(torch.zeros_like(x.f), None, x.post, same, p.mT.contiguous(), 4)
    assert (kept - same).abs().max() < 2e-6 * same.abs().max()
    assert (turned - same).abs().max() > 1e-3


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


def extremes(n: int) -> dict[str, torch.Tensor]:
    """Logits [M, n²] at which a formula of exponentials breaks."""
    g = cases.generator(11)
    signs = 1e4 * torch.randn(64, n, n, generator=g).sign()
    column = torch.randn(8, n, n, generator=g)
    column[:, :, 1] = -1e4
    row = torch.randn(8, n, n, generator=g)
    row[:, 0] = -1e4
    apart = torch.eye(n).expand(8, n, n) * 200 + torch.randn(8, n, n, generator=g)
    far = 60 * torch.randn(64, n, n, generator=g)
    out = {"±1e4": signs, "a column of -1e4": column, "a row": row, "identity": apart, "60": far}
    out["equal"] = torch.full((2, n, n), 1e4)
    return {name: z.reshape(-1, n * n) for name, z in out.items()}


#: The most iterations of each form that are taken.
MOST = {"log": checks.MAX_LOG_ITERATIONS, "epsilon": checks.MAX_ITERATIONS}


@pytest.mark.parametrize("form, eps", [("log", 0.0), ("epsilon", 1e-6), ("epsilon", 1e-30)])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.nightly)])
def test_the_most_iterations_are_exact_for_wide_logits(count, n, form, eps):
    """Elements that fp32 loses at first never matter within the count that is taken."""
    spreads = torch.tensor([30.0, 60.0, 100.0, 200.0]).repeat(count)[:, None, None]
    z = spreads * cases.normal(4 * count, n, n, seed=15)
    if n == 4:
        lost = [169, 1, -71, 15, 22, -41, 24, -41, 161, -207, -76, 6, 96, -75, -23, -61]
        z = torch.cat([z, torch.tensor(lost, dtype=torch.float32).view(1, 4, 4)])
    z = z.flatten(1)
    p = sinkhorn(z, n, iterations=MOST[form], form=form, eps=eps)
    want = reference.sinkhorn(z.double(), n, Sinkhorn(MOST[form], form, eps))
    assert cases.share(p, want) <= 1


@pytest.mark.parametrize("form", ["log", "epsilon"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", list(extremes(2)))
def test_extreme_logits(name, n, form):
    z = extremes(n)[name]
    for iterations in (1, 2, 20, MOST[form]):
        leaf = z.clone().requires_grad_()
        p = sinkhorn(leaf, n, iterations=iterations, form=form)
        d_p = cases.normal(*z.shape, seed=12)
        p.backward(d_p)
        assert p.isfinite().all() and leaf.grad.isfinite().all()
        off = 1e-6 if form == "log" else 1e-4
        columns = p.view(-1, n, n).sum(1)
        assert form == "epsilon" or (columns - 1).abs().max() < off
        options = Sinkhorn(iterations, form, 1e-6)
        assert cases.share(p, reference.sinkhorn(z.double(), n, options)) <= 1
        want = reference.sinkhorn_backward(z.double(), d_p.double(), n, options)
        assert cases.share(leaf.grad, want) <= 1


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize("form", ["log", "epsilon"])
@pytest.mark.parametrize("n", [2, 4])
def test_iterations(n, form, spread):
    """Each count has its own P: one more, or one fewer, is outside the bound of few of them."""
    z = spread * cases.normal(40, n * n, seed=13)
    shares = {}
    for iterations in (1, 2, 20, MOST[form]):
        options = Sinkhorn(iterations, form, 1e-6)
        leaf = z.clone().requires_grad_()
        p = sinkhorn(leaf, n, iterations=iterations, form=form)
        d_p = cases.normal(*z.shape, seed=14)
        p.backward(d_p)
        shares[iterations] = cases.share(p, reference.sinkhorn(z.double(), n, options))
        want = reference.sinkhorn_backward(z.double(), d_p.double(), n, options)
        assert cases.share(leaf.grad, want) <= 1
    assert max(shares.values()) <= 1 and min(shares.values()) > 0.001
    for count in (1, 2, *((20,) if spread == 3.0 else ())):
        more = sinkhorn(z, n, iterations=count + 1, form=form)
        want = reference.sinkhorn(z.double(), n, Sinkhorn(count, form, 1e-6))
        assert cases.share(more, want) > 10


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", ["log", "epsilon"])
def test_a_row_of_nan_stays_a_row(form, value):
    z, d_p = cases.normal(20, 16, seed=15), cases.normal(20, 16, seed=16)
    clean = z.clone().requires_grad_()
    want = sinkhorn(clean, 4, form=form)
    want.backward(d_p)
    dirty = z.clone()
    dirty[7] = value
    dirty.requires_grad_()
    got = sinkhorn(dirty, 4, form=form)
    got.backward(d_p)
    keep = [i for i in range(20) if i != 7]
    assert same_bytes(got[keep], want[keep]) and same_bytes(dirty.grad[keep], clean.grad[keep])
    assert got[7].isnan().all()


def test_shapes_of_sinkhorn():
    z = cases.normal(2, 3, 4, 4, seed=17)
    assert same_bytes(sinkhorn(z).view(6, 16), sinkhorn(z.view(6, 16), 4))
    assert same_bytes(sinkhorn(z.mT.contiguous().mT), sinkhorn(z))


# ---- the small ones ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["cn", "nc"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_expand_from_embedding(layout, dtype):
    e = cases.normal(3, 5, 32, seed=18, dtype=dtype).requires_grad_()
    x = expand_from_embedding(e, 4, layout=layout)
    assert x.shape == ((3, 5, 32, 4) if layout == "cn" else (3, 5, 4, 32))
    for i in range(4):
        assert same_bytes(x.select(-1 if layout == "cn" else -2, i), e)
    g = cases.normal(*x.shape, seed=19, dtype=dtype)
    x.backward(g)
    want = reference.repeat_backward(g.double().reshape(15, -1), cases.Streams(4, layout))
    assert cases.share(e.grad.view(15, 32), want) <= 1


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("layout", ["cn", "nc"])
@pytest.mark.parametrize("n", [2, 4])
def test_streams_have_memory_of_their_own(n, layout, channels):
    """A write into one stream reaches no other one and not the embedding."""
    e = cases.normal(3, channels, seed=20, dtype=FP32)
    x, copy = expand_from_embedding(e, n, layout=layout), e.clone()
    assert x.is_contiguous()
    dim = -1 if layout == "cn" else -2
    x.select(dim, 0).add_(1.0)
    assert same_bytes(e, copy)
    assert same_bytes(x.select(dim, 0), copy + 1.0) and same_bytes(x.select(dim, 1), copy)


@pytest.mark.parametrize("layout", ["cn", "nc"])
@pytest.mark.parametrize("n", [2, 4])
def test_head_is_the_pre_of_a_site(n, layout):
    """Its phi is the first n rows, and the others do not matter: the bytes of the three ops."""
    options = Options(layout=layout, pre_eps=1e-6)
    case = Case(20, 13, 97, n, layout, (BF16, FP32), norm_weight=True, options=options)
    x = cases.inputs_of(case)
    h, ms = projection(x.x, x.phi, norm_weight=x.norm_weight, layout=layout)
    pre, _, _ = scale(h, x.alpha, x.beta, ms, n, pre_eps=1e-6)
    want = aggregate(x.x, pre, n, layout=layout)
    weights = (x.phi[:n], x.alpha[:1], x.beta[0, :n])
    got = head(x.x, *weights, norm_weight=x.norm_weight, options=options)
    assert same_bytes(got, want)


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


def test_columns_of_h():
    assert [mappings(n) for n in (2, 4)] == [8, 24]
    for n, width in ((2, 8), (4, 32)):
        x = cases.inputs_of(Case(22, 5, 16, n))
        h, _ = projection(x.x, x.phi)
        assert h.shape == (5, width) and not bits(h[:, mappings(n) :]).any()


def test_a_wrong_value_is_seen():
    """Shares above 1 are found: an answer that is off by a little more than its bound."""
    want = Near(torch.ones(3).double(), torch.full((3,), 1e-6).double())
    assert cases.share(torch.tensor([1.0, 1.0 + 2e-6, 1.0]), want) > 1.5
    assert cases.share(torch.tensor([1.0, math.nan, 1.0]), want) > 1.5
