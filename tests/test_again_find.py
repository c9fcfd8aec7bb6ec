"""`Calls.find` by calls.c and by Python: one answer, whoever has a say; and `computer` of both."""

from __future__ import annotations

import contextlib
import gc
import sys
import tracemalloc
import types
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cute_kernels as ck
from cute_kernels import again, data_parallel, settings, torch_ops
from cute_kernels.compile import extension
from tests.anchors import replaced
from tests.compile.toy import needs_linker

pytestmark = needs_linker

X, W = torch.randn(4, 16), torch.randn(8, 16)


@pytest.fixture(scope="module")
def in_c(tmp_path_factory):
    return extension.imported(extension.build(extension.SOURCE, tmp_path_factory.mktemp("calls")))


def work(*args):
    return args


class Both:
    """One `Calls` that knows one call, found by C and by Python."""

    def __init__(self, module, monkeypatch):
        monkeypatch.setattr(again, "remembers", lambda t: True)
        monkeypatch.setattr(extension, "calls", lambda: module)
        self.calls = again.Calls(lambda *tensors: work)
        self.calls.keep("chain", (X, W, None))
        assert type(self.calls.find) is types.BuiltinFunctionType

    def find(self, *call):
        """The answer of both, an error's type and words among them."""
        answers = []
        for find in (self.calls.find, lambda *call: again.Calls.find(self.calls, *call)):
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


class Asked(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


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


def sharded():
    return mock.patch.object(data_parallel, "sharding", lambda: True)


def within(context):
    def run(ask):
        with context():
            ask()

    return run


def transformed(ask):
    torch.func.vmap(lambda row: (row, ask())[0])(X)


def traced(ask):
    torch.jit.trace(lambda x: (x + 1, ask())[0], X, check_trace=False)


#: What calls ``ask`` where somebody has a say; a piece of calls.c that sees to it; what is left.
SITUATIONS = {
    "a compiler": (within(compiling), "(said = is_compiling()) || "),
    "a mode above autograd": (within(Asked), " || (said = asked_by_mode(again))"),
    "a mode below it": (within(Dispatched), "{dispatch_modes, ", "{"),
    "autocast": (
        within(lambda: torch.autocast("cpu", torch.bfloat16)),
        "{dispatch_modes, autocast, ",
        "{dispatch_modes, ",
    ),
    "a transform": (transformed, "transforms, profiler, ", "profiler, "),
    "a batched backward": (within(legacy_vmap), "(said = includes(again, name.legacy_vmap)) || "),
    "a profiler": (within(profiled), ", profiler, tracing}", ", tracing}"),
    "a trace": (traced, ", tracing}", "}"),
    "batch_invariant": (within(ck.batch_invariant), "  said = includes(again, name.mode);\n"),
    "forward-mode differentiation": (within(forward_ad.dual_level), " || (said = has_tangents())"),
    "fully_shard": (within(sharded), "  if (sharding) Py_RETURN_NONE;\n"),
}


def answers(both, situation) -> list:
    found = []
    situation(lambda: found.append(both.find("chain", X, W, None)))
    assert found
    return found


@pytest.mark.parametrize("name", SITUATIONS)
def test_nobody_is_passed_by(both, name):
    assert both.find("chain", X, W, None) is work
    assert set(answers(both, SITUATIONS[name][0])) == {False}
    assert both.find("chain", X, W, None) is work


@pytest.mark.parametrize("name", SITUATIONS)
def test_nobody_that_c_does_not_ask(monkeypatch, tmp_path, name):
    """The mutants."""
    situation, part, *less = SITUATIONS[name]
    text = extension.SOURCE.read_text()
    source = tmp_path / "calls.c"
    source.write_text(replaced({"calls.c": text}, part, *less or [""])["calls.c"])
    both = Both(extension.imported(extension.build(source, tmp_path)), monkeypatch)
    with pytest.raises(AssertionError):
        answers(both, situation)


@pytest.mark.parametrize(
    "unasked",
    [
        lambda: torch.device("cpu"),
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.random.fork_rng([]),
        lambda: torch._C._ExcludeDispatchKeyGuard(torch_ops.MODE_KEYS),
    ],
)
def test_who_has_no_say(both, unasked):
    with unasked():
        assert both.find("chain", X, W, None) is work


def test_ops_below_batch_invariant_are_found(both):
    with ck.batch_invariant(), torch._C._ExcludeDispatchKeyGuard(torch_ops._MODE_ALONE):
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
    "a subclass for a weight": (("chain", X, W.as_subclass(Subclass), None), False),
    "a negated weight": (("chain", X, torch._neg_view(W), None), False),
    "an imaginary part": (("chain", torch.complex(X, X).conj().imag, W, None), False),
    "an address": (("chain", X, W.view(-1)[1:], None), False),
    "sparse": (("chain", X.to_sparse(), W, None), False),
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
    assert one == other and again.number_bits(one) != again.number_bits(other)
    both.calls.keep(("rms", one), (X, W, None))
    assert both.find(("rms", one), X, W, None) is work
    assert both.find(("rms", other), X, W, None) is None
    both.calls.keep(("rms", other), (X, W, None))
    assert both.find(("rms", other), X, W, None) is work


def test_options_of_too_many_numbers_are_not_known(both):
    most = (1.0,) * (again._NUMBER_BYTES // 9)
    assert both.find(most, X, W, None) is None
    assert both.find((*most, 1.0), X, W, None) is False


@pytest.mark.parametrize("setting", ["BACKEND", "MAX_CTAS"])
def test_other_settings(both, monkeypatch, setting):
    monkeypatch.setenv(settings.PREFIX + setting, {"BACKEND": "triton", "MAX_CTAS": "3"}[setting])
    assert both.find("chain", X, W, None) is None
    monkeypatch.setenv(settings.PREFIX + setting, "-1")
    assert both.find("chain", X, W, None)[0] is ck.errors.SettingError
    monkeypatch.delenv(settings.PREFIX + setting)
    assert both.find("chain", X, W, None) is work


def test_a_device_that_is_not_remembered(both, monkeypatch):
    monkeypatch.setattr(again, "remembers", lambda t: t.is_cuda)
    assert both.find("chain", X[:2], W, None) is False


def test_what_is_refused_is_known_and_what_is_forgotten_is_not(both):
    both.calls._known[again._key("tree", (X, W, None))] = False
    assert both.find("tree", X, W, None) is False
    both.calls._known.clear()
    assert both.find("chain", X, W, None) is None
    both.calls.forget()
    assert "find" not in vars(both.calls)


def test_no_calls_outlive_their_owner(in_c, monkeypatch):
    """Those with a mask hold its lists until it goes."""
    monkeypatch.setattr(extension, "calls", lambda: in_c)
    calls = again.Calls(lambda *tensors: lambda: held)
    held = torch.ones(3)
    calls.keep("chain", (X, W))
    before = sys.getrefcount(held)
    again_all = len(again._all)
    gc.disable()
    try:
        del calls
    finally:
        gc.enable()
    assert len(again._all) == again_all - 1 and sys.getrefcount(held) == before


# ---- what fails, and references ------------------------------------------------------------------


def counts(things) -> list[int]:
    return [sys.getrefcount(thing) for thing in things]


def lost(before: list[int], things, calls: int) -> list[str]:
    """Of what so many calls kept or lost a reference each; others in the process take some."""
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
    (data_parallel, "sharding", NoTruth),
    (settings, "get", failing),
    (again, "remembers", failing),
    (again, "_asked", failing),
    (again, "_in_mode", failing),
    (torch.compiler, "_is_compiling_flag", NoTruth()),
]


@pytest.mark.parametrize(("module", "name", "value"), FAILING)
def test_what_a_guard_raises_is_raised(both, monkeypatch, module, name, value):
    watched = (value, X, W, None)
    monkeypatch.setattr(module, name, value)
    with contextlib.ExitStack() as stack:
        if name == "_asked":
            stack.enter_context(Asked())
        if name == "_in_mode":
            stack.enter_context(ck.batch_invariant())
        before = counts(watched)
        for _ in range(100):
            assert both.find("tree", X, W, None) == (OSError, "it fails")
        assert not lost(before, watched, 100)


@pytest.mark.parametrize("name", ["sharding", "get", "remembers", "MODE", "_current_level"])
def test_what_is_missing_is_an_error(in_c, name):
    """As in a test that patches too much; nothing falls over."""
    names = [{}] + [dict(vars(module)) for module in (again, data_parallel, settings)]
    for one in names:
        one.pop(name, None)
    if name == "_current_level":
        with mock.patch.object(forward_ad, name, "none"), pytest.raises(TypeError):
            in_c.finder(*names)("chain", X, W)
    else:
        with pytest.raises(AttributeError, match=name):
            in_c.finder(*names)("chain", X, W)


def test_bad_arguments_of_the_module(in_c):
    for bad in ((), ({},), ({}, {}, {}, []), ({}, {}, {}, {}, {})):
        with pytest.raises(TypeError):
            in_c.finder(*bad)
    find = in_c.finder({}, vars(again), vars(data_parallel), vars(settings))
    for bad in ((), ("chain",)):
        with pytest.raises(TypeError, match="options and tensors"):
            find(*bad)
    with pytest.raises(TypeError):
        in_c.computer(len)


def test_no_reference_is_lost_or_kept_and_no_memory(both):
    options = "chain" * 3, 1.5
    both.calls.keep(options, (X, W, None))
    find, known, modules = both.calls.find, both.calls._known, (again, data_parallel, settings)
    names = [vars(module) for module in modules]
    watched = X, W, options, work, known, *names, None, True, False, again.MODE, settings.get

    def hammer():
        for _ in range(300):
            for call, _ in (*OTHERS.values(), ((options, X, W, None), work)):
                with contextlib.suppress(OSError):
                    find(*call)

    hammer()
    gc.collect()
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
        times.append(lost(before, watched, 300))
    assert not all(times), times


# ---- computer ------------------------------------------------------------------------------------

G = torch.randn(3, requires_grad=True)
#: Arguments -> whether a gradient is asked for.
ARGUMENTS = {
    "plain": ((X, W, None, "chain", 1, 1.5, True), False),
    "a parameter": ((X, torch.nn.Parameter(W), None, "chain"), True),
    "a frozen parameter": ((X, torch.nn.Parameter(W, requires_grad=False)), False),
    "a leaf": ((X, None, G), True),
    "a result": ((G * 2, "chain"), True),
    "a list": ((X, [W, G]), True),
    "a list without": ((X, [W, X], [1, 2], (1.0,)), False),
    "a list of a few": ((X, [None, G]), None),
    "a tuple": ((X, (W, G)), None),
    "a list in a list": ((X, [[G]]), None),
    "a subclass": ((G.detach().as_subclass(Subclass).requires_grad_(),), True),
    "a subclass without": ((X.as_subclass(Subclass), torch.float32), False),
    "nothing": ((), False),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_gradients_are_asked_for_where_torch_says_so(in_c, name):
    arguments, wanted = ARGUMENTS[name]
    made = [
        make(lambda *args: ("run", args), lambda *args: ("node", args))
        for make in (in_c.computer, torch_ops._computer)
    ]
    one, other = (computed(*arguments) for computed in made)
    assert one[0] == other[0] and all(a is b for a, b in zip(one[1], arguments, strict=True))
    assert wanted is None or one[0] == ("node" if wanted else "run")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert [computed(*arguments)[0] for computed in made] == ["run", "run"]


def test_a_computer_keeps_no_reference(in_c):
    node = object.__new__(type("Node", (), {"__call__": lambda self, *args: args[0]}))
    computed = in_c.computer(failing, node)
    watched = X, G, node, failing, None
    before = counts(watched)
    for _ in range(300):
        assert computed(G, X, [X, G], None) is G
        with pytest.raises(OSError):
            computed(X, [X], None)
    assert not lost(before, watched, 300)
    before = sys.getrefcount(node)
    del computed
    assert sys.getrefcount(node) == before - 1
