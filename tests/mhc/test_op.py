"""The torch ops of mhc: torch.compile, layouts, and gradients that do not come.

Which gradients are asked for: tests/test_public_calls.py, tests/test_main_grads.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.testing

import cute_kernels as ck
from cute_kernels.mhc import Options, connect, mix_and_aggregate, post_pre
from tests.contract import same_bytes
from tests.mhc import calls, cases
from tests.mhc.calls import CALLS
from tests.mhc.cases import BF16, FP32, Case

M, C = 5, 6


def case_of(dtype: torch.dtype = BF16, n: int = 4, layout: str = "cn", m: int = M) -> Case:
    options = Options(layout=layout, iterations=3, pre_eps=1e-3)
    return Case(60, m, C, n, layout, (dtype, FP32), True, True, 1.0, options)


def cotangents(made) -> list[torch.Tensor]:
    return [cases.normal(*t.shape, seed=70 + i, dtype=t.dtype) for i, t in enumerate(made)]


def results(name: str, case: Case, a: cases.Inputs) -> tuple[list, dict[str, torch.Tensor]]:
    """(results, gradient of every leaf)."""
    out = CALLS[name](a, case)
    torch.autograd.backward(out, cotangents(out))
    return out, {leaf: getattr(a, leaf).grad for leaf in CALLS[name].leaves}


def plain(name: str, case: Case) -> tuple[list, dict[str, torch.Tensor]]:
    return results(name, case, calls.leaves_of(calls.inputs_of(name, case)))


def require_same(got: tuple, want: tuple) -> None:
    for a, b in zip(got[0], want[0], strict=True):
        assert same_bytes(a.reshape(b.shape), b)
    for leaf, gradient in want[1].items():
        assert same_bytes(got[1][leaf].reshape(gradient.shape), gradient), leaf


# ---- graphs --------------------------------------------------------------------------------------


def each_in_one_form() -> Iterator:
    """Every call with weights in bf16 or in fp32; by night in both."""
    for index, name in enumerate(calls.WEIGHED):
        for form, case in enumerate(((BF16, 4, "cn"), (FP32, 2, "nc"))):
            yield pytest.param(name, case, marks=() if index % 2 == form else pytest.mark.nightly)


@pytest.mark.parametrize(("name", "form"), list(each_in_one_form()))
def test_compiled_bits_of_main_grads_are_eager_bits(name, form):
    """fullgraph, forward and backward; without main_grads: tests/test_public_calls.py."""
    torch.compiler.reset()
    case, call, out = case_of(*form), CALLS[name], []
    x = calls.inputs_of(name, case)
    upstream = cotangents(call(x, case))

    def step(a, given, mains):
        a = a._replace(**{leaf: getattr(a, leaf) * 1.5 for leaf in ("x", "f")})
        made = call(a, case, mains)
        return sum((t * g).float().sum() for t, g in zip(made, given, strict=True))

    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        a = calls.leaves_of(x)
        mains = {w: torch.ones(getattr(a, w).shape) for w in call.weights}
        loss = run(a, upstream, mains)
        loss.backward()
        grads = {leaf: getattr(a, leaf).grad for leaf in call.leaves} | mains
        assert all(getattr(a, w).grad is None for w in call.weights)
        out.append([loss.detach(), *grads.values()])
    for eager, compiled in zip(*out, strict=True):
        assert eager.any() and not (eager == 1).all() and same_bytes(eager, compiled)


# ---- what is around a call -----------------------------------------------------------------------


@pytest.mark.parametrize("leading", [(2, 3), ()], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_leading_dimensions(name, leading):
    """[2, 3, ...] and [6, ...], or one token and [1, ...]: the same bytes, gradients included."""
    case = case_of(BF16, m=math.prod(leading))
    flat, of_flat = plain(name, case)
    a = calls.leaves_of(calls.inputs_of(name, case), leading)
    out = CALLS[name](a, case)
    # What has rows keeps rows.
    assert all(
        t.shape in (w.shape, (*leading, *w.shape[1:])) for t, w in zip(out, flat, strict=True)
    )
    inputs = [g.reshape(t.shape) for g, t in zip(cotangents(flat), out, strict=True)]
    torch.autograd.backward(out, inputs)
    require_same((out, {leaf: getattr(a, leaf).grad for leaf in of_flat}), (flat, of_flat))


@pytest.mark.parametrize("name", CALLS)
def test_strides(name):
    """Every tensor of tokens a view of something wider, and every cotangent too."""
    case = case_of(BF16)
    x = calls.inputs_of(name, case)

    def view(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((len(t), 2, *t.shape[1:], 2), float("nan"), dtype=t.dtype)
        wide[:, 0, ..., 1] = t
        return wide[:, 0, ..., 1]

    a = x._replace(**{f: view(getattr(x, f)) for f in (*calls.TOKENS, "phi")})
    for leaf in a._fields:
        getattr(a, leaf).requires_grad_()
    out = CALLS[name](a, case)
    torch.autograd.backward(out, [view(g) for g in cotangents(out)])
    want = plain(name, case)
    require_same((out, {leaf: getattr(a, leaf).grad for leaf in CALLS[name].leaves}), want)
    # A gradient has no more memory than its numbers, where kernels make further rows too.
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in want[1].values())


@pytest.mark.parametrize("width", [24, 40])
def test_columns_behind_those_of_h_are_not_read(width):
    case = case_of(FP32)
    x = cases.inputs_of(case)
    wide = torch.nn.functional.pad(x.h, (0, width - x.h.shape[1]), value=torch.nan)
    out, grads = results("scale", case, calls.leaves_of(x._replace(h=wide)))
    want, of_want = plain("scale", case)
    assert grads["h"].shape == wide.shape and not grads["h"][:, 24:].any()
    cut = {"h": grads["h"][:, :24], "ms": grads["ms"]}
    require_same((out, cut), (want, {"h": of_want["h"][:, :24], "ms": of_want["ms"]}))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("n", [2, 4])
def test_no_tokens(name, n):
    case, call = case_of(FP32, n, m=0), CALLS[name]
    a = calls.leaves_of(calls.inputs_of(name, case))
    out = call(a, case)
    want = [t.shape[1:] for t in call(calls.inputs_of(name, case_of(FP32, n)), case)]
    assert [t.shape for t in out] == [(0, *shape) for shape in want]
    torch.autograd.backward(out, cotangents(out))
    for leaf in call.leaves:
        t = getattr(a, leaf)
        assert t.grad.shape == t.shape and not t.grad.any()


@pytest.mark.parametrize("layout", ["cn", "nc"])
@pytest.mark.parametrize("n", [2, 4])
def test_one_channel_keeps_its_dimension(n, layout):
    """K = n: the last dimension of x [..., 1, n] is as long as a whole row."""
    case = Case(71, 5, 1, n, layout, (FP32, FP32), options=Options(layout=layout))
    i = cases.inputs_of(case)
    weights = (i.phi, i.alpha, i.beta)
    (out,) = CALLS["head"](calls.weights_of("head", i), case)
    mixed, post, res = mix_and_aggregate(i.x, *weights, options=case.options)
    assert out.shape == (5, 1) and same_bytes(out, mixed)
    y = connect(i.x, torch.tanh, *weights, options=case.options)
    both = post_pre(torch.tanh(mixed), None, post, i.x, res, *weights, options=case.options)
    assert y.shape == i.x.shape and same_bytes(y, both[0]) and both[1].shape == (5, 1)


class Nothing(torch.autograd.Function):
    """Its backward has no gradient to give."""

    @staticmethod
    def forward(ctx, *given):
        return given[0].new_zeros(())

    @staticmethod
    def backward(ctx, d):
        return (None,) * 4


@pytest.mark.parametrize(
    "name", ["aggregate", "sinkhorn", "expand_combine", "projection", "connect"]
)
def test_a_gradient_that_does_not_come(name):
    """No error, and none is made."""
    case = case_of(FP32)
    a = calls.leaves_of(calls.inputs_of(name, case))
    out = (CALLS[name](a, case) + [torch.zeros(1)] * 4)[:4]
    Nothing.apply(*out).requires_grad_().backward()
    for leaf in CALLS[name].leaves:
        got = getattr(a, leaf).grad
        assert got is None or not got.any()


def test_the_ops_are_registered_with_their_contract():
    assert ck.contract_id("mhc").startswith("mhc/cpu/")
    assert ck.guarantees("mhc") == {"run_to_run", "batch_invariant", "split_invariant"}
