"""Calls of ops by calls.c: from eager mode and by ``torch.ops``, and which go to the dispatcher."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import cute_kernels as ck
from cute_kernels import settings
from cute_kernels.compile import extension
from cute_kernels.gemm import op as gemm_op
from cute_kernels.runtime import plan_cache
from tests.compile import reporting
from tests.compile.toy import needs_linker
from tests.runtime.pretended_sm90 import idle, pretended
from tests.watchers import Seen

pytestmark = needs_linker

BF16 = torch.bfloat16
X, W = torch.randn(32, 128).to(BF16), torch.randn(64, 128).to(BF16)
ARGS = X, W, None, None, "chain"
OP = torch.ops.cute_kernels.linear.default


@pytest.fixture
def in_c():
    return reporting.calls_in_c()


class Calls:
    """What a caller called: plans, nodes, and what takes other calls."""

    def __init__(self, in_c, monkeypatch, apply=True):
        monkeypatch.setattr(plan_cache, "on_gpu", lambda t: True)
        monkeypatch.setattr(extension, "calls", lambda: in_c)
        self.calls, self.cache = [], plan_cache.PlanCache()
        autograd = torch._C.is_grad_enabled, torch._C._any_requires_grad, lambda: False
        node = self.node if apply else None
        # Of op(Tensor x, float eps, Tensor? bias, Tensor[] lists, int[] sizes).
        arguments = 5, (1, 3, 4), (0, 2), autograd, node, self.miss
        self.cache.on_caller(arguments, self.install)
        self.call = None
        self.cache.add((0.5, (), (1, 2)), (X, None), self.plan)

    def install(self, call):
        self.call = call

    def plan(self, *args):
        self.calls.append("plan")
        return args

    def node(self, *args):
        assert args[-1] == self.plan
        self.calls.append("node")

    def miss(self, *args, **options):
        self.calls.append("miss")

    def by(self, *args, **options) -> str:
        """What takes this call."""
        self.call(*args, **options)
        return self.calls.pop()


@pytest.fixture
def calls(in_c, monkeypatch):
    return Calls(in_c, monkeypatch)


GRADIENT = torch.randn(32, 128).to(BF16).requires_grad_()


def test_which_calls_run_a_plan(calls):
    assert type(calls.call) is types.BuiltinFunctionType
    assert calls.by(X, 0.5, None, [], [1, 2]) == "plan"
    assert calls.call(X, 0.5, None, [], [1, 2]) == (X, 0.5, None, [], [1, 2])
    for other in (
        (X, -0.5, None, [], [1, 2]),
        (X, 0.5, X, [], [1, 2]),
        (X, 0.5, None, [X], [1, 2]),
        (X, 0.5, None, [], [1, 3]),
        (X[1:], 0.5, None, [], [1, 2]),
        (X, 0.5, None, []),
        (X, 0.5, None, [], [1, 2], None),
        ([], 0.5, None, [], [1, 2]),
        (X, [[]], None, [], [1, 2]),
        (),
    ):
        assert calls.by(*other) == "miss"
    assert calls.by(X, 0.5, None, [], sizes=[1, 2]) == "miss"


def test_gradients_errors_and_what_intercepts(in_c, calls, monkeypatch):
    args = X, 0.5, None, [], [1, 2]
    for context in (torch.autocast("cpu", BF16), Seen(), ck.batch_invariant()):
        with context:
            assert calls.by(*args) == "miss"
    assert calls.by(*args) == "plan" and calls.by(GRADIENT, *args[1:]) == "node"
    with torch.no_grad():
        assert calls.by(GRADIENT, *args[1:]) == "plan"
    assert Calls(in_c, monkeypatch, apply=False).by(GRADIENT, *args[1:]) == "miss"

    def fail(*args):
        raise OSError("it fails")

    calls.cache.add((0.5, (), (1, 2)), (X, None), fail)
    with pytest.raises(OSError, match="it fails"):
        calls.call(*args)
    calls.cache.clear()
    assert calls.call is None


def test_bad_parts_of_a_caller(in_c):
    parts = {}, *plan_cache._parts()
    good = 2, (1,), (0,), (len, len, len), None, len
    in_c.caller(*parts, *good)
    for i, bad in (
        (0, -1),
        (0, 25),
        (1, (2,)),
        (1, [1]),
        (2, ()),
        (2, ("x",)),
        (2, (-1,)),
        (3, (len,)),
    ):
        with pytest.raises(TypeError):
            in_c.caller(*parts, *good[:i], bad, *good[i + 1 :])
    for count in (0, 9, 11):
        with pytest.raises(TypeError):
            in_c.caller(*(*parts, *good, None)[:count])


def test_no_reference_is_lost_or_kept(calls):
    args = X, 0.5, None, [], [1, 2]
    watched = *args, GRADIENT, calls.call, None, True
    calls.call(*args)
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(500):
        calls.by(*args)
        calls.by(GRADIENT, *args[1:])
        calls.by(X[1:], *args[1:])
        calls.by(X, [[]], *args[2:])
    after = [sys.getrefcount(thing) for thing in watched]
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) < 100


# ---- ops -----------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch):
    """The op `linear` with a cached plan, on a pretended GPU without kernels."""
    with pretended(monkeypatch), idle():
        assert OP(*ARGS).shape == (32, 64)
        yield
    assert "__call__" not in vars(type(OP))


def missed(monkeypatch, *entrances) -> list:
    """Names of these ops at each call by ``torch.ops`` that calls.c hands to the dispatcher."""
    names = []
    for entrance in entrances:
        cache = entrance.planned.cache
        (arguments, install), (*parts, miss) = cache._callers[-1], cache._callers[-1][0]

        def counted(*args, miss=miss):
            names.append(str(miss))
            return miss(*args)

        callers = [*cache._callers[:-1], ((*parts, counted), install)]
        assert arguments[-1] is miss
        monkeypatch.setattr(cache, "_callers", callers)
        cache.clear()
    return names


def test_torch_ops_run_a_cached_plan_without_the_dispatcher(planned):
    assert type(vars(type(OP))["__call__"]) is types.BuiltinFunctionType
    assert isinstance(OP, torch._ops.OpOverload) and repr(OP).startswith("<OpOverload(op=")
    assert OP(*ARGS).shape == OP(X, weight=W, bias=None, main_grad=None, order="chain").shape
    plan_cache.clear()
    assert "__call__" not in vars(type(OP))


def test_modes_see_calls_with_a_cached_plan(planned):
    with Seen() as seen:
        OP(*ARGS)
        ck.linear(X, W)
    assert seen.names.count("cute_kernels::linear") == 2


CALLS = [lambda w: OP(X, w, None, None, "chain"), lambda w: ck.linear(X, w)]


@pytest.mark.parametrize("call", CALLS)
def test_gradients_of_calls_with_a_cached_plan(planned, call):
    """The body of a custom op runs below autograd, whatever its tensors ask for."""
    w = W.clone().requires_grad_()
    y = call(w)
    assert type(y.grad_fn).__name__ == "DifferentiableBackward"
    y.sum().backward()
    assert w.grad.shape == w.shape
    with torch.no_grad():
        assert call(w).grad_fn is None
    with torch._C._AutoDispatchBelowAutograd():
        assert not call(w).requires_grad
    assert call(w).requires_grad
    with torch.autocast("cpu", BF16):
        assert OP(X.float(), W.float(), None, None, "chain").dtype == BF16


def test_a_profiler_of_all_threads_sees_calls_with_a_cached_plan(planned):
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as run:
        OP(*ARGS)
    assert any(event.name == "cute_kernels::linear" for event in run.events())


def test_settings_are_read_and_forgotten_under_one_lock(monkeypatch):
    """A thread that read settings before `reload` may not publish them after it."""
    events = []

    class Lock:
        def __enter__(self):
            events.append("enter")

        def __exit__(self, *_):
            events.append("exit" if settings.KNOWN_PLAN_SETTINGS is None else "exit, published")

    def get(name):
        events.append(name)
        return ""

    get.cache_clear = lambda: events.append("clear")
    monkeypatch.setattr(settings, "_publishing", Lock())
    for name in ("get", "CACHED_GET"):
        monkeypatch.setattr(settings, name, get)
    settings.reload()
    assert events == ["enter", "clear", "exit"]
    events.clear()
    settings.plan_settings()
    assert events == ["enter", "BACKEND", "MAX_CTAS", "exit, published"]
    settings.reload()


def test_compiled_graphs_call_by_c(planned, monkeypatch):
    """A second step of a graph: nothing goes to the dispatcher; with a mode everything does."""
    torch._dynamo.reset()
    run = torch.compile(lambda x, w: ck.linear(x, w) * 2, backend="aot_eager", fullgraph=True)
    w = W.clone().requires_grad_()
    names = missed(monkeypatch, gemm_op.linear, gemm_op.linear_dw)

    def step():
        names.clear()
        run(X, w).sum().backward()
        return len(names)

    step()
    assert step() == 0
    plan_cache.clear()
    step()
    assert step() == 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert step() == 2
    torch._dynamo.reset()
