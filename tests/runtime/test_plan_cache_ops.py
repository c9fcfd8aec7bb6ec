"""Plans of calls that the dispatcher makes, as from a compiled graph; their kernels do nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from cute_kernels import errors
from cute_kernels.gemm import op as gemm_op
from cute_kernels.norm import op as norm_op
from cute_kernels.runtime import dispatch, torch_ops
from cute_kernels.sparse_attn import api
from tests import plans
from tests.contract import same_bytes
from tests.public_calls import CASES as PUBLIC_CALLS
from tests.public_calls import leaves_of, results_of
from tests.runtime.cached_calls import drawn, rewritten
from tests.runtime.pretended_sm90 import idle

X, W = drawn(8, 48), drawn(64, 48, seed=1)


@pytest.fixture
def launched(on_sm90, monkeypatch):
    """The ops of forward passes that were planned."""
    names, true = [], dispatch.plan

    def plan(name, *operands):
        names.append(name)
        return true(name, *operands)

    monkeypatch.setattr(dispatch, "plan", plan)
    return names


def planned(op, plan):
    """The implementation of an op with another ``plan``."""
    arguments = op.default._schema.arguments
    names, types = [a.name for a in arguments], [str(a.type) for a in arguments]
    return torch_ops.Planned(plan, names, types).run_function()


Q, KV = drawn(1, 1, 2, 64), drawn(1, 150, 1, 64, seed=1)
SPANS = torch.tensor([[[[0, 0, 0, 150]]]], dtype=torch.int32)
PUBLIC = {
    "linear": lambda: ck.linear(X, W),
    "rms_norm": lambda: ck.rms_norm(X, W[0]),
    "attention": lambda: ck.block_sparse_attention(Q, KV, KV),
    "spans": lambda: api.sequence_attention(Q, KV, KV, SPANS),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_call_that_is_cached_in_eager_mode_is_traced(launched, name):
    """What finds it may be C, which Dynamo does not trace: it never comes to that."""
    run = PUBLIC[name]
    with idle():
        run(), run()
        before = len(launched)
        torch.compile(lambda: run(), fullgraph=True, backend="eager")()
        assert len(launched) == before


@pytest.mark.parametrize("norm", [norm_op.norm, torch.ops.cute_kernels.norm])
def test_a_cached_plan_has_passed_its_check(launched, norm):
    """Whoever calls: an eager call runs what a compiled graph has planned."""
    with idle():
        for _ in range(2):
            with pytest.raises(errors.ArgumentValueError, match="eps"):
                norm(X, None, W[0], None, None, None, "rms", -1.0, 0.0)
    assert not launched


@pytest.mark.parametrize("name", ["linear", "rms_norm", "rms_norm, residual", "layer_norm"])
def test_other_gradients_are_another_backward(monkeypatch, name):
    """The leaves that need one differ from call to call; plans of the CPU are cached here."""
    count = len(leaves_of(name))
    asked = [(i,) for i in range(count)] + [tuple(range(count)), (0, count - 1)]

    def gradients(asked):
        leaves = [t.requires_grad_(i in asked) for i, t in enumerate(leaves_of(name))]
        out = results_of(name, leaves)
        torch.autograd.backward(out, [t.detach() * 0.5 for t in out])
        return [t.grad for t in leaves]

    want = [gradients(some) for some in asked]
    plan = dispatch.plan
    with plans.cached(monkeypatch, lambda *args: replace(plan(*args), cacheable=True, fresh=True)):
        got = [gradients(some) for some in asked * 2]
    for one, other in zip(got, want * 2, strict=True):
        assert [t is None for t in one] == [t is None for t in other]
        assert all(t is None or same_bytes(t, u) for t, u in zip(one, other, strict=True))


@pytest.mark.parametrize("name", sorted(set(PUBLIC_CALLS) - {"block_sparse_attention_varlen"}))
def test_backends_without_planners_repeat_their_bytes(monkeypatch, name):
    """As on a Triton GPU; without varlen, which takes a pretended GPU for an SM90 one."""
    first = results_of(name, leaves_of(name))
    with plans.cached(monkeypatch):
        later = [results_of(name, leaves_of(name)) for _ in range(3)]
    for results in later:
        assert [type(t) for t in results] == [type(t) for t in first]
        assert all(map(same_bytes, results, first))


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_cached_plan_looks_at_main_grad_in_each_call(launched, forgotten):
    """Which memory it shares is no part of the signature; the mutant looks once."""
    memory = torch.zeros(64 * 48 + 8 * 24)
    target, x = memory[: 64 * 48].view(64, 48), memory[-8 * 24 :].view(torch.bfloat16).view(8, 48)
    linear = torch.ops.cute_kernels.linear
    if forgotten:
        part = "        destination.check_no_alias(main_grad, x=x, weight=weight, bias=bias)\n"
        linear = planned(linear, rewritten(gemm_op._plan_linear, part))
    with idle():
        for _ in range(2):
            linear(x, W, None, target, "chain")
        assert launched == ["gemm"]
        shared = memory[-64 * 48 :].view(64, 48)
        if forgotten:
            linear(x, W, None, shared, "chain")
        else:
            with pytest.raises(errors.AliasError):
                linear(x, W, None, shared, "chain")
