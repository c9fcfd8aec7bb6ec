"""A call goes straight to its function where nobody wants to see it, and has the op's bytes."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels as ck
from cute_kernels.errors import UnsupportedTransformError
from cute_kernels.gemm import op
from cute_kernels.runtime import plan_cache, torch_ops
from tests.contract import same_bytes
from tests.public_calls import CASES, leaves_of, results_of
from tests.runtime.cached_calls import drawn
from tests.watchers import Asked, Seen

BF16 = torch.bfloat16


def linear(x):
    return ck.linear(x, drawn(24, 32, seed=1), drawn(24, seed=2))


def norm(x):
    return ck.rms_norm(x, drawn(32, seed=1), residual=x * 0.5)[0]


def attention(x):
    rows = x.view(1, -1, 1, 32).repeat(1, 1, 2, 2)
    return ck.block_sparse_attention(rows, rows * 0.5, rows + 1, causal=True)


def logp(x):
    return ck.linear_logp(x, drawn(40, 32, seed=1), torch.arange(len(x)))


def aggregate(x):
    return ck.mhc.aggregate(x.view(-1, 8, 4), drawn(len(x), 4, seed=1, dtype=torch.float32), 4)


OPS = {
    "linear": linear,
    "norm": norm,
    "block_sparse_attention": attention,
    "linear_logp": logp,
    "mhc_aggregate": aggregate,
}


@pytest.mark.parametrize("name", CASES)
def test_a_double_backward_works_or_is_refused_by_name(name):
    leaves = leaves_of(name)
    out = [t.float().square().sum() for t in results_of(name, leaves) if t.requires_grad]
    try:
        torch.autograd.grad(sum(out), leaves, create_graph=True)
    except UnsupportedTransformError as error:
        assert re.match(r"cute_kernels\.[\w.]+: .*(double backward|create_graph)", str(error))


def results(run, x) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = run(x)
    return [y.detach(), torch.autograd.grad(y, x, drawn(*y.shape, seed=9).to(y.dtype))[0]]


@pytest.mark.parametrize("name", OPS)
def test_both_ways_have_the_same_bytes(name, monkeypatch):
    x, run = drawn(6, 32), OPS[name]
    direct = [*results(run, x), run(x)]
    monkeypatch.setattr(torch_ops, "_plain", lambda args, tensor: False)
    assert all(map(same_bytes, [*results(run, x), run(x)], direct))


@pytest.mark.parametrize("name", OPS)
def test_nothing_goes_past_a_mode(name):
    x, run = drawn(6, 32), OPS[name]
    for mode in (Seen(), Asked()):
        with mode:
            results(run, x)
        assert any(f"cute_kernels{sep}{name}" in n for n in mode.names for sep in ("::", "."))


def test_a_plain_call_meets_no_dispatcher(monkeypatch):
    """Else the entrance would be for nothing."""
    x, weight = drawn(6, 32), drawn(24, 32, seed=1)

    def refused(*args):
        raise AssertionError("the dispatcher was asked")

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", refused)
    assert ck.linear(x, weight).shape == (6, 24)
    assert ck.linear(x, weight.requires_grad_()).requires_grad


def test_a_view_that_negates_is_read_as_what_it_stands_for(monkeypatch):
    """Its memory holds other values; a launcher that reads memory must be given a true copy."""
    recorded = []
    true = op._plan_product

    def plan(a, *rest):
        recorded.append(a.is_neg())
        return true(a, *rest)

    monkeypatch.setattr(op, "_plan_product", plan)
    x, weight = drawn(6, 32, dtype=torch.float32), drawn(24, 32, dtype=torch.float32)
    assert same_bytes(ck.linear(torch._neg_view(x), weight), ck.linear(-x, weight))
    assert same_bytes(ck.linear(x, torch._neg_view(weight)), ck.linear(x, -weight))
    assert recorded == [False] * 4


def test_autocast_casts():
    with torch.autocast("cpu", BF16):
        assert ck.linear(drawn(6, 32, dtype=torch.float32), drawn(24, 32)).dtype == BF16


@pytest.mark.parametrize(
    "mutant",
    [
        torch._C._len_torch_dispatch_stack,
        plan_cache._function_mode,
        torch._C._is_any_autocast_enabled,
    ],
)
def test_an_entrance_that_does_not_ask_is_killed(mutant, monkeypatch):
    remaining = tuple(ask for ask in plan_cache.INTERCEPTORS if ask is not mutant)
    assert len(remaining) == len(plan_cache.INTERCEPTORS) - 1
    monkeypatch.setattr(plan_cache, "INTERCEPTORS", remaining)
    with pytest.raises((AssertionError, ck.errors.DtypeError, RuntimeError)):
        test_nothing_goes_past_a_mode("linear")
        test_autocast_casts()


def test_batch_invariant_takes_the_op():
    """In the mode torch's ops are ours; those inside an op of ours must stay torch's."""
    x = drawn(6, 32)
    want = {name: run(x) for name, run in OPS.items()}
    with ck.batch_invariant():
        assert not torch_ops._plain((x,), x)
        assert all(same_bytes(run(x), want[name]) for name, run in OPS.items())
    assert torch_ops._plain((x,), x)


@pytest.fixture(scope="module")
def noting():
    """An op without a gradient that notes in whose way it was called, and one that writes."""
    notes = []

    def run(x):
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
        notes.append(
            "redispatched" if excluded(torch._C.DispatchKey.AutogradFunctionality) else "at once"
        )
        return x.clone()

    def run_(x):
        run(x.add_(1))

    out = torch_ops.define_op("noting_(Tensor(a!) x) -> ()", run_, fake=lambda x: None)
    torch_ops.define_op("noting(Tensor x) -> Tensor", run, fake=torch.empty_like)
    return torch.ops.cute_kernels.noting.default, out, notes


def test_a_call_through_the_dispatcher_meets_one_python_kernel(noting):
    """As a compiled graph calls it.  What sees calls below autograd still does."""
    op, _, notes = noting
    x = drawn(3)
    notes.clear()
    assert same_bytes(op(x), x) and notes == ["at once"]
    with torch.no_grad():
        op(x.clone().requires_grad_())
    assert notes == ["at once"] * 2
    with Seen() as seen:
        op(x)
    assert seen.names == ["cute_kernels::noting"]
    with FakeTensorMode() as mode:
        assert op(mode.from_tensor(x)).shape == x.shape
    assert len(notes) == 3  # the mode's call, and none with shapes alone


def test_an_op_that_writes_goes_on_to_the_kernel_that_marks(noting):
    _, op, notes = noting
    x, notes[:] = drawn(3), []
    before = x._version
    op(x)
    assert x._version > before and notes == ["redispatched"]
