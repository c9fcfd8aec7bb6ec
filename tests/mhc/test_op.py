"""The torch ops of mhc: opcheck, torch.compile, AMP, fakes, and which gradients are asked for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import cute_kernels as ck
from cute_kernels import mhc
from cute_kernels.errors import UnsupportedTransformError
from cute_kernels.mhc import Options
from tests.contract import same_bytes
from tests.mhc import cases, runs
from tests.mhc.cases import BF16, FP32, Case

OPS = (
    "projection", "scale", "sinkhorn", "aggregate", "expand", "mix", "post_pre", "repeat",
)  # fmt: skip
M, C = 5, 6


def case_of(dtype: torch.dtype = BF16, n: int = 4, layout: str = "cn", m: int = M) -> Case:
    options = Options(layout=layout, iterations=3, pre_eps=1e-3)
    return Case(60, m, C, n, layout, (dtype, FP32), True, True, 1.0, options)


def every_leaf(x: cases.Inputs) -> cases.Inputs:
    return runs.leaves_of(x)


# ---- the functions, by name ----------------------------------------------------------------------


def _weights(a, case, mains=None) -> dict:
    return {"norm_weight": a.norm_weight, "options": case.options, "main_grads": mains}


def _coefficients(a, case, mains=None):
    h, ms = mhc.projection(a.x.detach(), a.phi.detach(), layout=case.layout)
    return mhc.scale(h, a.alpha, a.beta, ms, case.n, main_grads=mains)


def _end(a):
    return a.f, a.bias, a.post, a.x, a.res


#: name -> (a call on leaves, the leaves that it has)
CALLS = {
    "projection": (
        lambda a, c, mains=None: mhc.projection(
            a.x, a.phi, norm_weight=a.norm_weight, layout=c.layout, main_grads=mains
        ),
        ("x", "phi", "norm_weight"),
    ),
    "scale": (_coefficients, ("alpha", "beta")),
    "sinkhorn": (lambda a, c: (mhc.sinkhorn(a.res, c.n),), ("res",)),
    "aggregate": (
        lambda a, c: (mhc.aggregate(a.x, a.pre, c.n, layout=c.layout),),
        ("x", "pre"),
    ),
    "expand_combine": (
        lambda a, c, mains=None: (
            mhc.expand_combine(*_end(a), c.n, layout=c.layout, main_grads=mains),
        ),
        ("f", "bias", "post", "x", "res"),
    ),
    "mix_and_aggregate": (
        lambda a, c, mains=None: mhc.mix_and_aggregate(
            a.x, a.phi, a.alpha, a.beta, **_weights(a, c, mains)
        ),
        ("x", "phi", "norm_weight", "alpha", "beta"),
    ),
    "post_pre": (
        lambda a, c, mains=None: mhc.post_pre(
            *_end(a), a.phi, a.alpha, a.beta, **_weights(a, c, mains)
        ),
        ("f", "bias", "post", "x", "res", "phi", "norm_weight", "alpha", "beta"),
    ),
    "shifted": (
        lambda a, c, mains=None: mhc.post_pre(
            *_end(a), a.phi, a.alpha, a.beta, H_pre=a.pre, **_weights(a, c, mains)
        ),
        ("f", "bias", "post", "x", "res", "pre", "phi", "norm_weight", "alpha", "beta"),
    ),
    "connect": (
        lambda a, c, mains=None: (
            mhc.connect(
                a.x, torch.tanh, a.phi, a.alpha, a.beta, bias=a.bias, **_weights(a, c, mains)
            ),
        ),
        ("x", "bias", "phi", "norm_weight", "alpha", "beta"),
    ),
    "head": (
        lambda a, c, mains=None: (
            mhc.head(a.x, a.phi[: c.n], a.alpha[:1], a.beta[0, : c.n], **_weights(a, c, mains)),
        ),
        ("x", "phi", "norm_weight", "alpha", "beta"),
    ),
    "expand_from_embedding": (
        lambda a, c: (mhc.expand_from_embedding(a.f, c.n, layout=c.layout),),
        ("f",),
    ),
}  # fmt: skip


def cotangents(made) -> list[torch.Tensor]:
    return [cases.normal(*t.shape, seed=70 + i, dtype=t.dtype) for i, t in enumerate(made)]


def gradients(name: str, case: Case, x: cases.Inputs) -> tuple[list, dict[str, torch.Tensor]]:
    """(results, gradient of every leaf)."""
    call, leaves = CALLS[name]
    a = every_leaf(x)
    out = list(call(a, case))
    torch.autograd.backward(out, cotangents(out))
    return out, {leaf: getattr(a, leaf).grad for leaf in leaves}


# ---- opcheck -------------------------------------------------------------------------------------


def opcheck_cases() -> dict[str, tuple]:
    case = case_of()
    i = cases.inputs_of(case)
    a = every_leaf(i)
    x, f, res = a.x.flatten(1), a.f, a.res.flatten(1)
    n, ops = case.n, torch.ops.cute_kernels
    h = cases.normal(M, 32, seed=1).requires_grad_()
    ms = cases.normal(M, seed=2).abs().requires_grad_()
    d_h, d_ms = cases.normal(M, 32, seed=3), cases.normal(M, seed=4)
    up = cases.upstream_of(case, i)
    plain = {name: None if t is None else t.detach() for name, t in a._asdict().items()}
    flat, d_y, z = plain["x"].flatten(1), up.y.flatten(1), plain["res"].flatten(1)
    mains = torch.ones(24, 4 * C), torch.ones(4 * C), torch.ones(3), torch.ones(1, 24)
    none = (None,) * 4
    numbers = case.options.numbers(n)
    gates = (1e-6, 1e-3, 2.0)
    weights = (a.phi, a.norm_weight, a.alpha, a.beta)
    frozen = tuple(t.detach() for t in weights)
    end = (f, a.bias, a.post, x, res)
    ended = (plain["f"], plain["bias"], plain["post"], flat, z)
    out = (plain["pre"], plain["post"], z, h.detach(), ms.detach())
    d_made = (up.pre, up.post, up.res.flatten(1))
    proj, sinkhorn = (n, "cn", "bf16x2"), (n, 3, "log", 1e-6)
    mapped = (flat, *frozen[:2])
    return {
        "projection": (ops.mhc_projection, (x, *weights[:2], None, None, *proj)),
        "projection, no weight": (
            ops.mhc_projection, (x, weights[0], None, None, None, *proj)
        ),
        # Of frozen weights: autograd.grad, which opcheck uses, leaves main_grads alone.
        "projection, mains": (ops.mhc_projection, (x, *frozen[:2], *mains[:2], *proj)),
        "projection, empty": (
            ops.mhc_projection, (flat[:0], *frozen[:2], None, None, *proj)
        ),
        "projection_backward": (
            ops.mhc_projection_backward,
            (d_h, d_ms, *mapped, None, None, *proj, [True] * 3),
        ),
        "projection_backward, some": (
            ops.mhc_projection_backward,
            (None, d_ms, *mapped, None, mains[1], *proj, [False, True, True]),
        ),
        "projection_backward, empty": (
            ops.mhc_projection_backward,
            (d_h[:0], None, flat[:0], *frozen[:2], None, None, *proj, [True] * 3),
        ),
        "scale": (ops.mhc_scale, (h, *weights[2:], ms, None, None, n, *gates)),
        "scale, empty": (
            ops.mhc_scale, (h.detach()[:0], *frozen[2:], ms.detach()[:0], None, None, n, *gates)
        ),
        "scale_backward": (
            ops.mhc_scale_backward,
            (*d_made, h.detach(), *frozen[2:], ms.detach(), None, None, n, *gates, [True] * 4),
        ),
        "scale_backward, some": (
            ops.mhc_scale_backward,
            (None, None, d_made[2], h.detach(), *frozen[2:], ms.detach(), mains[2], None, n,
             *gates, [True, True, False, False]),
        ),
        "sinkhorn": (ops.mhc_sinkhorn, (res, *sinkhorn)),
        "sinkhorn, empty": (ops.mhc_sinkhorn, (z[:0], n, 3, "epsilon", 1e-6)),
        "sinkhorn_backward": (ops.mhc_sinkhorn_backward, (d_made[2], z, *sinkhorn, [True])),
        "aggregate": (ops.mhc_aggregate, (x, a.pre, n, "cn")),
        "aggregate, empty": (ops.mhc_aggregate, (flat[:0], plain["pre"][:0], n, "cn")),
        "aggregate_backward": (
            ops.mhc_aggregate_backward, (up.out, flat, plain["pre"], n, "nc", [True, True])
        ),
        "aggregate_backward, some": (
            ops.mhc_aggregate_backward, (up.out, flat, plain["pre"], n, "nc", [False, True])
        ),
        "expand": (ops.mhc_expand_combine, (*end, None, n, "cn", None)),
        "expand, no bias": (ops.mhc_expand_combine, (f, None, *end[2:], None, n, "cn", None)),
        "expand_backward": (
            ops.mhc_expand_combine_backward, (d_y, *ended, None, n, "cn", False, [True] * 5)
        ),
        "expand_backward, linked": (
            ops.mhc_expand_combine_backward, (d_y, *ended, None, n, "cn", True, [True] * 5)
        ),
        "expand_backward, main": (
            ops.mhc_expand_combine_backward, (d_y, *ended, mains[1][:C], n, "cn", False, [True] * 5)
        ),
        "expand_backward, empty": (
            ops.mhc_expand_combine_backward,
            (d_y[:0], plain["f"][:0], plain["bias"], plain["post"][:0], flat[:0], z[:0], None, n,
             "cn", False, [True] * 5),
        ),
        "mix": (ops.mhc_mix, (x, *weights, *none, *numbers, False)),
        "mix, empty": (ops.mhc_mix, (flat[:0], *frozen, *none, *numbers, False)),
        "mix_backward": (
            ops.mhc_mix_backward,
            (up.out, *d_made, None, flat, *frozen, *out, *none, *numbers, [True] * 5),
        ),
        "mix_backward, linked": (
            ops.mhc_mix_backward,
            (up.out, None, None, None, d_y, flat, *frozen, *out, *mains, *numbers, [True] * 5),
        ),
        "mix_backward, some": (
            ops.mhc_mix_backward,
            (None, None, d_made[1], None, None, flat, *frozen, *out, *none, *numbers,
             [False, False, False, True, False]),
        ),
        "post_pre": (ops.mhc_post_pre, (*end, None, *weights, None, *none, *numbers)),
        "post_pre, shifted": (
            ops.mhc_post_pre, (*end, a.pre, *weights, None, *none, *numbers)
        ),
        "post_pre_backward": (
            ops.mhc_post_pre_backward,
            (d_y, up.out, *d_made, *ended, None, *frozen, flat, *out, None, *none, *numbers,
             [True] * 5 + [False] + [True] * 4),
        ),
        "post_pre_backward, shifted": (
            ops.mhc_post_pre_backward,
            (None, up.out, *d_made, *ended, plain["pre"], *frozen, flat, *out, torch.ones(C),
             *mains, *numbers, [True] * 10),
        ),
        "recompute": (ops.mhc_recompute, (flat, *([t] * 2 for t in (*ended[:3], z)), n, "cn")),
        "repeat": (ops.mhc_repeat, (f, n, "nc")),
        "repeat_backward": (ops.mhc_repeat_backward, (d_y, f.detach(), n, "nc", [True])),
    }  # fmt: skip


@pytest.mark.parametrize("case", list(opcheck_cases()))
def test_opcheck(case):
    target, args = opcheck_cases()[case]
    assert set(opcheck(target.default, args).values()) == {"SUCCESS"}


def test_every_op_is_checked_and_pt2_compliant():
    checked = {str(target) for target, _ in opcheck_cases().values()}
    names = {name for name in dir(torch.ops.cute_kernels) if name.startswith("mhc_")}
    assert checked == {f"cute_kernels.{name}" for name in names}
    # mhc_recompute has no backward.
    assert len(names) == 2 * len(OPS) + 1
    for name in names:
        overload = getattr(torch.ops.cute_kernels, name).default
        assert torch.Tag.pt2_compliant_tag in overload.tags


# ---- graphs --------------------------------------------------------------------------------------


def stepped(name: str, case: Case, weighed: bool = False):
    """A loss of a call, with other work around it; the leaves are arguments."""
    call, leaves = CALLS[name]

    def step(a, given, mains):
        a = a._replace(**{leaf: getattr(a, leaf) * 1.5 for leaf in ("x", "f")})
        out = call(a, case, mains) if weighed else call(a, case)
        return sum((t * g).float().sum() for t, g in zip(out, given, strict=True))

    return step, leaves


def each_in_one_form() -> Iterator:
    """Every call in bf16 or in fp32, and by night in the other."""
    for index, name in enumerate(CALLS):
        for form, case in enumerate(((BF16, 4, "cn"), (FP32, 2, "nc"))):
            marks = () if index % 2 == form else pytest.mark.nightly
            yield pytest.param(name, case, marks=marks, id=f"{name}-{case[2]}")


@pytest.mark.parametrize(("name", "form"), list(each_in_one_form()))
def test_compiled_bits_are_eager_bits(name, form):
    """fullgraph, forward and backward."""
    torch.compiler.reset()
    case = case_of(*form)
    x = cases.inputs_of(case)
    step, leaves = stepped(name, case)
    out = CALLS[name][0](x, case)
    upstream, results = cotangents(out), []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        a = every_leaf(x)
        loss = run(a, upstream, None)
        loss.backward()
        results.append([loss.detach(), *(getattr(a, leaf).grad for leaf in leaves)])
    for eager, compiled in zip(*results, strict=True):
        assert eager.any() and same_bytes(eager, compiled)


@pytest.mark.parametrize("name", ["mix_and_aggregate", "post_pre", "connect", "head"])
def test_compiled_main_grads(name):
    torch.compiler.reset()
    case, results = case_of(), []
    x = cases.inputs_of(case)
    step, leaves = stepped(name, case, weighed=True)
    weights = [leaf for leaf in leaves if leaf in ("bias", "phi", "norm_weight", "alpha", "beta")]
    upstream = cotangents(CALLS[name][0](x, case))
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        a = every_leaf(x)
        mains = {w: torch.ones(getattr(a, w).shape) for w in weights}
        if name == "head":
            mains |= {"phi": torch.ones(4, 4 * C), "alpha": torch.ones(1), "beta": torch.ones(4)}
        run(a, upstream, mains).backward()
        assert all(getattr(a, w).grad is None for w in weights)
        results.append([a.x.grad, *mains.values()])
    for eager, compiled in zip(*results, strict=True):
        assert not (eager == 1).all() and same_bytes(eager, compiled)


@pytest.mark.parametrize("name", ["projection", "expand_combine", "mix_and_aggregate", "post_pre"])
def test_dynamic_numbers_of_tokens_compile_once(name):
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    case, call = case_of(), CALLS[name][0]
    run = torch.compile(lambda a: call(a, case), fullgraph=True, dynamic=True, backend=counter)
    for m in (5, 17, 64):
        a = cases.inputs_of(case_of(m=m))
        for got, want in zip(run(a), call(a, case), strict=True):
            assert same_bytes(got, want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", list(CALLS))
def test_fake_and_meta(name):
    """Shapes and dtypes of real tensors, and of their gradients."""
    case = case_of()
    call, leaves = CALLS[name]
    x = cases.inputs_of(case)
    want = [(t.shape, t.dtype) for t in call(x, case)]
    with FakeTensorMode():
        fake = cases.Inputs(*(torch.empty(t.shape, dtype=t.dtype) for t in x))
        assert [(t.shape, t.dtype) for t in call(fake, case)] == want
    meta = cases.Inputs(*(t.to("meta").requires_grad_() for t in x))
    out = call(meta, case)
    assert [(t.shape, t.dtype) for t in out] == want
    assert all(t.device.type == "meta" for t in out)
    torch.autograd.backward(list(out), [torch.empty_like(t) for t in out])
    for leaf in leaves:
        t = getattr(meta, leaf)
        assert t.grad.shape == t.shape and t.grad.dtype == t.dtype


# ---- AMP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_autocast_casts_nothing(name, dtype):
    case = case_of(dtype)
    x = cases.inputs_of(case)
    want, of_want = gradients(name, case, x)
    with torch.autocast("cpu", BF16):
        call, leaves = CALLS[name]
        a = every_leaf(x)
        out = list(call(a, case))
        torch.autograd.backward(out, cotangents(out))
    for got, other in zip(out, want, strict=True):
        assert same_bytes(got, other)
    for leaf in leaves:
        assert same_bytes(getattr(a, leaf).grad, of_want[leaf]), leaf


# ---- which gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CALLS))
def test_only_the_gradients_asked_for(name):
    """Each alone, and each left out, has the bytes that it has among all."""
    case = case_of(FP32)
    x = cases.inputs_of(case)
    _, want = gradients(name, case, x)
    call, leaves = CALLS[name]
    subsets = [{leaf} for leaf in leaves] + [set(leaves) - {leaf} for leaf in leaves]
    for subset in subsets:
        # A gated H is of leaves that need gradients or of none.
        a = every_leaf(x)
        for leaf in a._fields:
            getattr(a, leaf).requires_grad_(leaf in subset)
        out = [t for t in call(a, case) if t.requires_grad]
        assert bool(out) == bool(subset)
        if not out:
            continue
        every = cotangents(call(a, case))
        kept = [g for g, t in zip(every, call(a, case), strict=True) if t.requires_grad]
        torch.autograd.backward(out, kept)
        for leaf in leaves:
            got = getattr(a, leaf).grad
            assert (got is not None) == (leaf in subset), (leaf, subset)
            assert got is None or same_bytes(got, want[leaf]), (leaf, subset)


@pytest.mark.parametrize(
    "name", ["projection", "scale", "mix_and_aggregate", "post_pre", "shifted"]
)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_unused_results(name, dtype):
    """Gradients of some results: those of all, with zeros for the others."""
    case = case_of(dtype)
    x = cases.inputs_of(case)
    call, leaves = CALLS[name]
    count = len(call(x, case))
    for used in itertools.product([False, True], repeat=count):
        if not any(used):
            continue
        grads = []
        for explicit in (False, True):
            a = every_leaf(x)
            out = call(a, case)
            upstream = cotangents(out)
            upstream = [
                g if use else torch.zeros_like(g) for g, use in zip(upstream, used, strict=True)
            ]
            pairs = [
                pair for pair, use in zip(zip(out, upstream, strict=True), used, strict=True)
                if use or explicit
            ]  # fmt: skip
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
            grads.append([getattr(a, leaf).grad for leaf in leaves])
        for leaf, got, want in zip(leaves, *grads, strict=True):
            got = torch.zeros_like(want) if got is None else got
            # Zeros that were added may turn a -0.
            assert torch.equal(got, want), (leaf, used)


def test_a_gradient_that_does_not_come():
    """A node below that has none to give: no error, and none is made."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            return given[0].new_zeros(())

        @staticmethod
        def backward(ctx, d):
            return (None,) * 4

    case = case_of(FP32)
    x = cases.inputs_of(case)
    for name in ("aggregate", "sinkhorn", "expand_combine", "projection", "mix_and_aggregate"):
        call, leaves = CALLS[name]
        a = every_leaf(x)
        out = list(call(a, case))
        out = (out + [torch.zeros(1)] * 4)[:4]
        Nothing.apply(*out).requires_grad_().backward()
        for leaf in leaves:
            got = getattr(a, leaf).grad
            assert got is None or not got.any()


@pytest.mark.parametrize("name", list(CALLS))
def test_a_double_backward_is_refused(name):
    case = case_of(FP32)
    call, leaves = CALLS[name]
    a = every_leaf(cases.inputs_of(case))
    loss = sum(t.float().square().sum() for t in call(a, case))
    with pytest.raises(UnsupportedTransformError, match=r"mhc[^:]*: double backward"):
        torch.autograd.grad(loss, getattr(a, leaves[0]), create_graph=True)


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).float().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["projection", "aggregate", "mix_and_aggregate", "connect"])
def test_transforms_are_refused_by_name(name, transform):
    case = case_of(FP32)
    a = cases.inputs_of(case)
    x = cases.normal(3, *a.x.shape, seed=80)

    def run(x):
        rows = x.reshape(-1, *a.x.shape[1:])
        return CALLS[name][0](a._replace(x=rows, pre=a.pre.repeat(len(rows) // M, 1)), case)[0]

    with pytest.raises(UnsupportedTransformError, match="mhc"):
        TRANSFORMS[transform](run, x)


# ---- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("n", [2, 4])
def test_no_tokens(name, n):
    case = case_of(FP32, n, m=0)
    call, leaves = CALLS[name]
    a = every_leaf(cases.inputs_of(case))
    out = list(call(a, case))
    want = [t.shape[1:] for t in call(cases.inputs_of(case_of(FP32, n)), case)]
    assert [t.shape for t in out] == [(0, *shape) for shape in want]
    torch.autograd.backward(out, cotangents(out))
    for leaf in leaves:
        t = getattr(a, leaf)
        assert t.grad.shape == t.shape and not t.grad.any()


@pytest.mark.parametrize("leading", [(2, 3), ()], ids=str)
@pytest.mark.parametrize("name", list(CALLS))
def test_leading_dimensions(name, leading):
    """[2, 3, ...] and [6, ...], or one token and [1, ...]: the same bytes, gradients included."""
    case = case_of(BF16, m=math.prod(leading))
    x = cases.inputs_of(case)
    call, leaves = CALLS[name]
    flat, of_flat = gradients(name, case, x)
    a = runs.leaves_of(x, leading)
    out = list(call(a, case))
    for got, want in zip(out, flat, strict=True):
        # What has rows keeps rows.
        assert got.shape in (want.shape, (*leading, *want.shape[1:]))
        assert same_bytes(got.reshape(want.shape), want)
    inputs = [g.reshape(t.shape) for g, t in zip(cotangents(flat), out, strict=True)]
    torch.autograd.backward(out, inputs)
    for leaf in leaves:
        got = getattr(a, leaf).grad
        assert same_bytes(got.reshape(of_flat[leaf].shape), of_flat[leaf]), leaf


@pytest.mark.parametrize("name", list(CALLS))
def test_strides(name):
    """Every tensor of tokens a view of something wider, and every cotangent too."""
    case = case_of(BF16)
    x = cases.inputs_of(case)
    call, leaves = CALLS[name]
    want, of_want = gradients(name, case, x)

    def view(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((len(t), 2, *t.shape[1:], 2), float("nan"), dtype=t.dtype)
        wide[:, 0, ..., 1] = t
        return wide[:, 0, ..., 1]

    moved = {f: view(getattr(x, f)) for f in ("x", "f", "pre", "post", "res", "phi")}
    a = x._replace(**moved)
    for leaf in a._fields:
        getattr(a, leaf).requires_grad_()
    out = list(call(a, case))
    torch.autograd.backward(out, [view(g) for g in cotangents(out)])
    for got, other in zip(out, want, strict=True):
        assert same_bytes(got, other)
    for leaf in leaves:
        assert same_bytes(getattr(a, leaf).grad, of_want[leaf]), leaf
        getattr(x, leaf).requires_grad_(False)


def test_deterministic_flag_is_honoured():
    case = case_of()
    x = cases.inputs_of(case)
    want = {name: gradients(name, case, x) for name in CALLS}
    torch.use_deterministic_algorithms(True)
    try:
        for name, (out, of_made) in want.items():
            got, of_got = gradients(name, case, x)
            assert all(same_bytes(a, b) for a, b in zip(got, out, strict=True))
            assert all(same_bytes(of_got[leaf], of_made[leaf]) for leaf in of_made)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_ops_are_registered_with_their_contract():
    assert ck.contract_id("mhc").startswith("mhc/cpu/")
    assert ck.guarantees("mhc") == {"run_to_run", "batch_invariant", "split_invariant"}
