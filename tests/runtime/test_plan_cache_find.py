"""`PlanCache.find` by calls.c and by Python: one answer, whatever can intercept a call."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import tracemalloc
import types
import weakref
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

import cute_kernels as ck
from cute_kernels import settings
from cute_kernels.compile import extension
from cute_kernels.runtime import data_parallel, plan_cache, torch_ops
from tests.compile import reporting
from tests.compile.toy import needs_linker
from tests.watchers import Asked, Seen

pytestmark = needs_linker

X, W = torch.randn(4, 16), torch.randn(8, 16)


@pytest.fixture
def in_c():
    return reporting.calls_in_c()


def work(*args):
    return args


class Both:
    """One `Calls` that knows one call, found by C and by Python."""

    def __init__(self, module, monkeypatch):
        monkeypatch.setattr(plan_cache, "on_gpu", lambda t: True)
        monkeypatch.setattr(extension, "calls", lambda: module)
        self.calls = plan_cache.PlanCache()
        self.calls.add("chain", (X, W, None), work)
        assert type(self.calls.find) is types.BuiltinFunctionType

    def find(self, *call):
        """The answer of both, an error's type and words among them."""
        answers = []
        for find in (self.calls.find, lambda *call: plan_cache.PlanCache.find(self.calls, *call)):
            try:
                answers.append(find(*call))
            except Exception as error:
                answers.append((type(error), str(error)))
        assert answers[0] == answers[1]
        return answers[0]


@pytest.fixture
def both(in_c, monkeypatch):
    return Both(in_c, monkeypatch)


# ---- who has a say -------------------------------------------------------------------------------


@contextlib.contextmanager
def compiling():
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True):
        assert torch.compiler.is_compiling()
        yield


@contextlib.contextmanager
def legacy_vmap():
    torch._C._vmapmode_increment_nesting()
    try:
        yield
    finally:
        torch._C._vmapmode_decrement_nesting()


def profiled():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


@contextlib.contextmanager
def below_batch_invariant():
    with ck.batch_invariant(), torch._C._ExcludeDispatchKeyGuard(torch_ops._MODE_ALONE):
        yield


def within(context):
    def run(ask):
        with context():
            ask()

    return run


def transformed(ask):
    torch.func.vmap(lambda row: (row, ask())[0])(X)


def traced(ask):
    torch.jit.trace(lambda x: (x + 1, ask())[0], X, check_trace=False)


#: Name -> (what calls ``ask`` where such a thing can intercept calls, its index in INTERCEPTORS).
SITUATIONS = {
    "a compiler": (within(compiling), 0),
    "a mode above autograd": (within(Asked), 1),
    "a mode below it": (within(Seen), 2),
    "autocast": (within(lambda: torch.autocast("cpu", torch.bfloat16)), 3),
    "a transform": (transformed, 4),
    "a batched backward": (within(legacy_vmap), 5),
    "a profiler": (within(profiled), 6),
    "batch_invariant": (within(ck.batch_invariant), 7),
    "forward-mode differentiation": (within(forward_ad.dual_level), 8),
    "a trace": (traced, 9),
}


def answers(both, situation) -> list:
    out = []
    situation(lambda: out.append(both.find("chain", X, W, None)))
    assert out
    return out


@pytest.mark.parametrize("name", SITUATIONS)
def test_nobody_is_passed_by(both, name):
    assert both.find("chain", X, W, None) is work
    assert set(answers(both, SITUATIONS[name][0])) == {False}
    assert both.find("chain", X, W, None) is work


@pytest.mark.parametrize("name", SITUATIONS)
def test_no_interceptor_can_be_left_out(in_c, monkeypatch, name):
    """The mutants: C and Python ask one tuple."""
    assert [at for _, at in SITUATIONS.values()] == list(range(len(plan_cache.INTERCEPTORS)))
    situation, index = SITUATIONS[name]
    remaining = plan_cache.INTERCEPTORS[:index] + plan_cache.INTERCEPTORS[index + 1 :]
    monkeypatch.setattr(plan_cache, "INTERCEPTORS", remaining)
    with pytest.raises(AssertionError):
        assert set(answers(Both(in_c, monkeypatch), situation)) == {False}


@pytest.mark.parametrize(
    "unasked",
    [
        lambda: torch.device("cpu"),
        torch.no_grad,
        torch.inference_mode,
        lambda: torch._C._ExcludeDispatchKeyGuard(torch_ops.MODE_KEYS),
        below_batch_invariant,
    ],
)
def test_who_has_no_say(both, unasked):
    with unasked():
        assert both.find("chain", X, W, None) is work


# ---- other calls ---------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


class Unequal:
    """Has the hash of the known options, and no answer to whether it is those."""

    def __init__(self, error: type[Exception]):
        self.error = error

    def __hash__(self):
        return hash("chain")

    def __eq__(self, other):
        raise self.error("no")


OTHERS = {
    "other options": (("tree", X, W, None), None),
    "other rows": (("chain", X[:2], W, None), None),
    "a bias": (("chain", X, W, X[0]), None),
    "one tensor less": (("chain", X, W), None),
    "a parameter": (("chain", torch.nn.Parameter(X), W, None), work),
    "options without a hash": ((["chain"], X, W, None), False),
    "options that cannot be told": ((Unequal(TypeError), X, W, None), False),
    "options that fail": ((Unequal(OSError), X, W, None), (OSError, "no")),
    "no first tensor": (("chain", None, W, None), False),
    "a list": (("chain", [1.0], W, None), False),
    "a list for a weight": (("chain", X, [1.0], None), False),
    "a subclass": (("chain", X.as_subclass(Subclass), W, None), False),
    "nothing": (("chain", X[:0], W, None), False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls(both, name):
    call, answer = OTHERS[name]
    assert both.find(*call) == answer


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1.0, 1), (1, True), (1.0, True), (0, False), (("a", (0.0,)), ("a", (-0.0,)))],
)
def test_numbers_are_known_by_their_bits(both, one, other):
    """Each pair compares equal, so a dict alone takes one for the other."""
    assert one == other and plan_cache.number_bits(one) != plan_cache.number_bits(other)
    both.calls.add(("rms", one), (X, W, None), work)
    assert both.find(("rms", one), X, W, None) is work
    assert both.find(("rms", other), X, W, None) is None
    both.calls.add(("rms", other), (X, W, None), work)
    assert both.find(("rms", other), X, W, None) is work


def test_plans_are_refused_forgotten_and_of_so_many_numbers(both):
    most = (1.0,) * (plan_cache._NUMBER_BYTES // 9)
    assert both.find(most, X, W, None) is None
    assert both.find((*most, 1.0), X, W, None) is False
    both.calls._plans[plan_cache._key("tree", (X, W, None))] = False
    assert both.find("tree", X, W, None) is False
    both.calls._plans.clear()
    assert both.find("chain", X, W, None) is None
    both.calls.clear()
    assert "find" not in vars(both.calls)


def test_fully_shard_is_asked_for_a_main_grad_in_each_call(in_c, monkeypatch):
    """calls.c sees that there is a module of it, and leaves the answer to Python."""
    x = mock.Mock(is_cuda=True)
    states = importlib.import_module(data_parallel.FSDP2_STATES)
    monkeypatch.setattr(states, "_module_state_mapping", weakref.WeakKeyDictionary())
    parts = plan_cache._parts()
    find = in_c.finder({}, *parts[:2], (failing, *parts[2][1:]))
    assert not data_parallel.sharding() and plan_cache.is_cacheable(x, W, None)
    assert find("chain", X, W) is False
    module = torch.nn.Linear(2, 2)
    states._insert_module_state(module, states._State())
    assert data_parallel.sharding()
    with pytest.raises(OSError, match="it fails"):
        find("chain", X, W)
    monkeypatch.setattr(data_parallel, "has_sharded_main_grad", lambda t: t is W)
    assert plan_cache.is_cacheable(x, X, None) and not plan_cache.is_cacheable(x, W)


@pytest.mark.parametrize("setting", ["BACKEND", "MAX_CTAS"])
def test_other_settings(both, monkeypatch, setting):
    monkeypatch.setenv(settings.PREFIX + setting, {"BACKEND": "triton", "MAX_CTAS": "3"}[setting])
    assert both.find("chain", X, W, None) is None
    monkeypatch.setenv(settings.PREFIX + setting, "-1")
    assert both.find("chain", X, W, None)[0] is ck.errors.SettingError
    monkeypatch.delenv(settings.PREFIX + setting)
    assert both.find("chain", X, W, None) is work


def test_no_calls_outlive_their_owner(in_c, monkeypatch):
    """Those with a mask hold its lists until it goes."""
    monkeypatch.setattr(extension, "calls", lambda: in_c)
    calls, held = plan_cache.PlanCache(), torch.ones(3)
    calls.add("chain", (X, W), lambda: held)
    before = sys.getrefcount(held)
    number = len(plan_cache._caches)
    gc.disable()
    try:
        del calls
    finally:
        gc.enable()
    assert len(plan_cache._caches) == number - 1 and sys.getrefcount(held) == before


# ---- what fails, and references ------------------------------------------------------------------


def counts(things) -> list[int]:
    return [sys.getrefcount(thing) for thing in things]


def lost(before: list[int], things, calls: int) -> list[str]:
    """References that so many calls kept or lost; others in the process take some."""
    changes = [b - a for a, b in zip(before, counts(things), strict=True)]
    return [
        f"{change} of {type(thing).__name__}"
        for change, thing in zip(changes, things, strict=True)
        if 2 * abs(change) >= calls
    ]


def failing(*args):
    raise OSError("it fails")


class NoTruth:
    def __bool__(self):
        raise OSError("it fails")


FAILING = [
    (data_parallel, "sharding", failing),
    (settings, "get", failing),
    (plan_cache, "on_gpu", failing),
    (torch.compiler, "_is_compiling_flag", NoTruth()),
]


@pytest.mark.parametrize(("module", "name", "value"), FAILING)
def test_what_a_guard_raises_is_raised(both, monkeypatch, module, name, value):
    watched = (value, X, W, None)
    monkeypatch.setattr(module, name, value)
    before = counts(watched)
    for _ in range(100):
        assert both.find("tree", X, W, None) == (OSError, "it fails")
    assert not lost(before, watched, 100)


def test_bad_arguments_of_the_module(in_c):
    parts = {}, *plan_cache._parts()
    for bad in ((), ({},), ([], *parts[1:]), ({}, [], *parts[2:]), (*parts, len), ({}, (), (), ())):
        with pytest.raises(TypeError):
            in_c.finder(*bad)
    find = in_c.finder(*parts)
    for bad in ((), ("chain",)):
        with pytest.raises(TypeError, match="options and tensors"):
            find(*bad)


# ---- quick forms ---------------------------------------------------------------------------------


def test_quick_forms_spare_the_functions(in_c, monkeypatch):
    """Where nothing intercepts, no function of Python is called for an answer."""
    monkeypatch.setattr(settings, "get", settings.CACHED_GET)
    settings.plan_settings()
    parts = plan_cache._parts()
    asked = tuple([(ask[0], failing) if type(ask) is tuple else ask for ask in parts[0]])
    spared = asked, *[(failing, *part[1:]) for part in parts[1:]]
    assert in_c.finder({}, *spared)("chain", X, W) is False  # not on a GPU
    with monkeypatch.context() as m, pytest.raises(OSError, match="it fails"):
        m.setattr(plan_cache, "on_gpu", lambda t: True)
        in_c.finder({}, *spared)("chain", X, W)


@pytest.mark.parametrize("name", ["a compiler", "a mode above autograd", "batch_invariant",
                                  "forward-mode differentiation"])  # fmt: skip
def test_a_quick_form_that_is_always_idle_is_killed(in_c, monkeypatch, name):
    situation, index = SITUATIONS[name]
    ask = plan_cache.INTERCEPTORS[index]
    monkeypatch.setitem(plan_cache._QUICK, ask, lambda: False)
    with pytest.raises(AssertionError):
        assert set(answers(Both(in_c, monkeypatch), situation)) == {False}


def test_settings_are_read_again_after_reload(in_c, monkeypatch):
    monkeypatch.setattr(settings, "get", settings.CACHED_GET)
    both = Both(in_c, monkeypatch)
    try:
        assert both.find("chain", X, W, None) is work
        assert settings.KNOWN_PLAN_SETTINGS is not None
        monkeypatch.setenv(settings.PREFIX + "MAX_CTAS", "3")
        settings.reload()
        assert both.find("chain", X, W, None) is None
    finally:
        monkeypatch.delenv(settings.PREFIX + "MAX_CTAS", raising=False)
        settings.reload()


def test_no_reference_is_lost_or_kept_and_no_memory(both):
    options = "chain" * 3, 1.5
    both.calls.add(options, (X, W, None), work)
    find, plans = both.calls.find, both.calls._plans
    functions = *plan_cache.INTERCEPTORS, settings.plan_settings, plan_cache.is_cacheable
    watched = X, W, options, work, plans, *functions, None, True, False

    def hammer():
        for _ in range(100):
            for call, _ in (*OTHERS.values(), ((options, X, W, None), work)):
                with contextlib.suppress(OSError):
                    find(*call)

    hammer()
    gc.freeze()  # what there is now: a collection then looks at this test's objects alone
    tracemalloc.start()
    try:
        hammer()
        gc.collect()
        first = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            hammer()
        gc.collect()
        assert abs(tracemalloc.get_traced_memory()[0] - first) < 2000
    finally:
        tracemalloc.stop()
    # What is lost in every call is lost each time; what a collector frees in between is not.
    times = []
    for _ in range(3):
        before = counts(watched)
        hammer()
        times.append(lost(before, watched, 100))
    assert not all(times), times
