"""The rules that a syntax tree can show: one table of rules, and planted files that break them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from cute_kernels.systems import SYSTEMS
from tests.hang import HANG_SECONDS
from tests.trees import Source, sources

MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 600, 120, 8
LIBRARY = ("cute_kernels/", "schedulers/")
TESTS = ("tests/", "ptxsim/")
#: Files whose functions the DSL traces into kernels.
DEVICE = re.compile(
    r"^cute_kernels/(dsl/\w+|\w+/device/\w+|\w+/kernel(_\w+)?_sm90)\.py$"
    r"|^schedulers/.*_device\.py$"
)


def is_small(file: Source) -> Iterator[str]:
    if (lines := file.text.count("\n")) > MAX_FILE:
        yield f"{lines} lines"
    for node in file.functions:
        if (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION:
            yield f"{node.lineno} {node.name}: {lines} lines"


def raises_in_checks_alone(file: Source) -> Iterator[str]:
    """Launchers and kernels do not raise: checks.py is the place."""
    if re.match(r"cute_kernels/(.*/)?(kernel_\w+|launch)\.py$", file.name):
        yield from (str(node.lineno) for node in file.nodes if isinstance(node, ast.Raise))


def keeps_annotations(file: Source) -> Iterator[str]:
    """In traced files: stringified annotations break @cute.struct."""
    if DEVICE.match(file.name) and "from __future__ import annotations" in file.text:
        yield "from __future__ import annotations"


def says_what_it_is(file: Source) -> Iterator[str]:
    """Files have docstrings, and public functions of the library."""
    exempt = re.match(r"(docs/conf\.py|tests/(\w+/)*__init__\.py)$", file.name)
    if not exempt and not ast.get_docstring(file.tree):
        yield "no docstring"
    for node in file.tree.body if file.name.startswith(LIBRARY) else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            types = [ast.unparse(mark) for mark in node.decorator_list] == ["overload"]
            if not types and not ast.get_docstring(node):
                yield f"{node.lineno} {node.name}"


def is_finished(file: Source) -> Iterator[str]:
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b|raise NotImplementedError")
    if file.name != "tests/test_style.py":
        yield from (match[0] for match in marks.finditer(file.text))


def reads_settings_by_name(file: Source) -> Iterator[str]:
    """One table of variables: nothing else in the package reads CUTE_KERNELS_*."""
    if file.name.startswith(LIBRARY) and file.name != "cute_kernels/settings.py":
        yield from re.findall(r"environ[^\n]*CUTE_KERNELS_", file.text)


def imports_no_test(file: Source) -> Iterator[str]:
    """What tests share lies in modules without ``test_``; those of a card, of mutants and of
    certificates may run the tests of another module."""
    again = re.search(r"gpu|mutants|certificate|battery", file.name)
    for node in file.nodes if file.name.startswith("tests/") and not again else ():
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            stem = "tests." * bool(node.level) + f"{node.module or ''}."
            targets = [stem + alias.name for alias in node.names]
        else:
            continue
        for target in targets:
            if re.match(r"tests\.(.*\.)?test_", target):
                yield f"{node.lineno} {target}"


#: Signatures that somebody else's call gives: public functions, other libraries' hooks, commands,
#: torch ops.
GIVEN = re.compile(
    r"/(api|op|op_\w+|policy_op|converters|te)\.py$|/integrations/|/cli/|(commands?|__main__)\.py$"
    r"|^cute_kernels/(__main__|nn)\.py$|^(ptxsim/)?tests/"
)


def takes_few(file: Source) -> Iterator[str]:
    """What travels together is bundled; device code has `is_typed` instead."""
    for node in () if GIVEN.search(file.name) or DEVICE.match(file.name) else file.functions:
        if "triton.jit" in " ".join(map(ast.unparse, node.decorator_list)):
            continue
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        if node.name != "__call__" and count > MAX_PARAMETERS:
            yield f"{node.name} takes {count}"


#: Types that say nothing about what they hold.
UNTYPED = {"tuple", "list", "dict", "object", "Any", "Tuple", "List", "Dict"}


def is_vague(annotation: ast.expr | None) -> bool:
    """Whether there is none, or one with a bare container, ``object`` or ``Any`` in it."""
    if annotation is None:
        return True
    nodes = list(ast.walk(annotation))
    typed = {id(n.value) for n in nodes if isinstance(n, ast.Subscript)}
    names = [(n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", None), n) for n in nodes]
    return any(name in UNTYPED and id(n) not in typed for name, n in names)


def is_typed(file: Source) -> Iterator[str]:
    """Every parameter and field of device code names its type (style.md, rule 4)."""
    for node in file.nodes if DEVICE.match(file.name) else ():
        if isinstance(node, ast.FunctionDef):
            skipped = {"self", "cls"}
            if any("dsl_user_op" in ast.unparse(mark) for mark in node.decorator_list):
                skipped |= {"loc", "ip"}
            args = node.args
            rest = [one for one in (args.vararg, args.kwarg) if one is not None]
            for one in (*args.posonlyargs, *args.args, *args.kwonlyargs, *rest):
                if one.arg not in skipped and is_vague(one.annotation):
                    yield f"{one.lineno} {node.name}({one.arg})"
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and is_vague(field.annotation):
                    yield f"{field.lineno} {node.name}.{ast.unparse(field.target)}"


#: Of torch, and what they take from a default unless it is named.  ``arange`` counts integers here,
#: which are int64 everywhere.
NEEDED = {
    **{name: {"dtype", "device"} for name in ("as_tensor", "asarray", "empty", "empty_strided")},
    **{name: {"dtype", "device"} for name in ("eye", "full", "linspace", "logspace", "ones")},
    **{name: {"dtype", "device"} for name in ("rand", "randn", "scalar_tensor", "tensor", "zeros")},
    **{name: {"device"} for name in ("arange", "randint", "randperm")},
    **{name: {"device"} for name in ("tril_indices", "triu_indices")},
}
#: Constructors of BlockMask that make tensors of numbers alone.
MASKS = ("from_rule", "full", "causal", "sliding_window", "dilated_window")
#: They show torch's own behaviour, and hand tensors to code that is not ours.
LEFT_OUT = ("cute_kernels/demo/", "cute_kernels/integrations/")


def names_dtype_and_device(file: Source) -> Iterator[str]:
    """torch's default dtype and device are the user's: tests/test_defaults.py."""
    if not file.name.startswith(LIBRARY) or file.name.startswith(LEFT_OUT):
        return
    for node in file.nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="Generator")):
                complete = bool(node.args or node.keywords)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
                complete = NEEDED.get(name, set()) <= {keyword.arg for keyword in node.keywords}
            case ast.Call(func=ast.Attribute(value=ast.Name(id="BlockMask"), attr=name)):
                complete = name not in MASKS or {"device", None} & {k.arg for k in node.keywords}
            case _:
                continue
        if not complete:
            yield f"{node.lineno} {ast.unparse(node)}"


# ---- limits of time -----------------------------------------------------------------------------

#: Clocks that may be read: what prints times, a fake clock, and hosts of cards.
READS_CLOCKS = {
    "tests/hang.py",
    "tests/integrations/vllm/card.py",
    "tests/perf/core/clocks.py",
    "ptxsim/__main__.py",
}
#: Names of arguments that are limits, and of calls whose numbers are.
LIMITS = {"timeout", "timeout_s", "timeout_seconds", "deadline"}
CALLS = {"wait", "communicate", "join", "Timer", "dump_traceback_later", "alarm"}
#: Waits in vain: tests pass if they end by their limit.
PAUSES = {"left.wait(0.1)"}
CLOCKS = re.compile(r"\b(perf_counter|monotonic|process_time|thread_time)(_ns)?\b")
GPU_ONLY = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.gpu\b", re.MULTILINE)


def has_no_near_limit(file: Source) -> Iterator[str]:
    """No test has a limit of time that a loaded machine could meet: tests of GPUs alone may."""
    is_of_gpus = "/gpu_" in file.name or GPU_ONLY.search(file.text)
    if not file.name.startswith(TESTS) or is_of_gpus or file.name == "tests/test_style.py":
        return
    if CLOCKS.search(file.text) and file.name not in READS_CLOCKS:
        yield "reads a clock"
    assigned = [node for node in file.tree.body if isinstance(node, ast.Assign)]
    names = {t.id: n.value for n in assigned for t in n.targets if isinstance(t, ast.Name)}

    def number(node: ast.expr) -> float | None:
        """The value of an expression of numbers and of the module's constants."""
        if isinstance(node, ast.Name) and node.id in names:
            node = names[node.id]
        if isinstance(node, ast.Constant):
            return node.value if type(node.value) in (int, float) else None
        if isinstance(node, ast.BinOp):
            out = [n for n in (number(node.left), number(node.right)) if n is not None]
            return min(out, default=None)
        return None

    for node in file.nodes:
        limits: list[float | None] = []
        if isinstance(node, ast.Call) and ast.unparse(node) not in PAUSES:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            values = [k.value for k in node.keywords if k.arg in LIMITS]
            values += node.args if name in CALLS else []
            values += [k.value for k in node.keywords if name == "timedelta" and k.arg == "seconds"]
            limits = [number(value) for value in values]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            limits = [float(n) for n in re.findall(r"\btimeout(?:_s)?=\s*([\d.]+)", node.value)]
        yield from (f"{node.lineno}: {n} s" for n in limits if n and n < HANG_SECONDS)


RULES: list[Callable[[Source], Iterator[str]]] = [
    is_small,
    raises_in_checks_alone,
    keeps_annotations,
    says_what_it_is,
    is_finished,
    reads_settings_by_name,
    imports_no_test,
    takes_few,
    is_typed,
    names_dtype_and_device,
    has_no_near_limit,
]


@pytest.mark.parametrize("rule", RULES)
def test_every_file_keeps(rule):
    assert len(sources()) > 900
    broken = [f"{file.name}: {line}" for file in sources() for line in rule(file)]
    assert not broken, "\n".join(broken)


def test_every_system_with_a_launcher_has_device_code():
    systems = {f"cute_kernels/{system.package}" for system in SYSTEMS if system.launcher}
    names = [file.name for file in sources() if DEVICE.match(file.name)]
    folders = {re.match(r"schedulers|\w+/\w+", name)[0] for name in names}
    assert folders == systems | {"cute_kernels/dsl", "schedulers"}


NINE = "def f(self, a, b, c, d, e, f, g, h, *, i): pass"
DEVICE_FILE, LAUNCHER = "cute_kernels/gemm/device/x.py", "cute_kernels/gemm/launch.py"
#: (rule, name, source, how many findings).
PLANTED = [
    (is_small, LAUNCHER, "\n" * 601, 1),
    (is_small, LAUNCHER, "def f():\n" + "    x = 1\n" * 120, 1),
    (raises_in_checks_alone, LAUNCHER, "raise ValueError", 1),
    (raises_in_checks_alone, "cute_kernels/gemm/checks.py", "raise ValueError", 0),
    (keeps_annotations, DEVICE_FILE, "from __future__ import annotations", 1),
    (says_what_it_is, LAUNCHER, "def f(): pass\ndef _g(): pass\n@overload\ndef h(): pass", 2),
    (is_finished, LAUNCHER, "# TODO\nraise NotImplementedError", 2),
    (reads_settings_by_name, LAUNCHER, "os.environ['CUTE_KERNELS_LOG']", 1),
    (imports_no_test, "tests/x.py", "from tests.gemm.test_sm90_mutants import no_release", 1),
    (imports_no_test, "tests/x.py", "from tests.gemm import simulated, test_sm90_mutants as m", 1),
    (imports_no_test, "tests/x.py", "import tests.gemm.test_cpu", 1),
    (imports_no_test, "tests/test_gpu.py", "import tests.gemm.test_cpu", 0),
    (imports_no_test, "tests/x.py", "from . import cases, test_cpu", 1),
    (imports_no_test, "tests/x.py", "def f():\n    from ..gemm.test_cpu import rows_op", 1),
    (imports_no_test, "tests/x.py", "from . import cases\nfrom torch.testing import test_x", 0),
    (takes_few, LAUNCHER, NINE, 1),
    (takes_few, "cute_kernels/gemm/op.py", NINE, 0),
    (is_typed, DEVICE_FILE, "def f(a, b: int, *c, d=1, **e): pass", 4),
    (is_typed, DEVICE_FILE, "def f(a: tuple, b: list | None, c: tuple[int, list]): pass", 3),
    (is_typed, DEVICE_FILE, "def f(a: tuple[int, ...], c: cute.Tensor | None, d: object): pass", 1),
    (is_typed, DEVICE_FILE, "class A:\n    x: tuple\n    y: int\n    def f(self, z): pass", 2),
    (is_typed, DEVICE_FILE, "@dsl_user_op\ndef f(a: int, *, loc=None, ip=None): pass", 0),
    (is_typed, DEVICE_FILE, "def f(a: int):\n    def g(row, *, loc=None): pass", 2),
    (names_dtype_and_device, LAUNCHER, "torch.zeros(3, 4)", 1),
    (names_dtype_and_device, LAUNCHER, "torch.empty(3, dtype=torch.float32)", 1),
    (names_dtype_and_device, LAUNCHER, "torch.arange(5), f(torch.tensor([1.0]))", 2),
    (names_dtype_and_device, LAUNCHER, "torch.Generator().manual_seed(1)", 1),
    (names_dtype_and_device, LAUNCHER, "BlockMask.from_rule(rule, 3, 4)", 1),
    (names_dtype_and_device, LAUNCHER, "torch.zeros(3, dtype=d, device=x.device)", 0),
    (has_no_near_limit, "tests/x.py", "subprocess.run(command, timeout=60)", 1),
    (has_no_near_limit, "tests/x.py", "SECONDS = 30\nprocess.communicate(timeout=SECONDS)", 1),
    (has_no_near_limit, "tests/x.py", "WAIT = 30\nthread.join(WAIT // 2)", 1),
    (has_no_near_limit, "tests/x.py", "timedelta(seconds=5), threading.Timer(20, stop)", 2),
    (has_no_near_limit, "tests/x.py", "code = 'run(x, timeout=5)'\ntime.monotonic()", 2),
    (has_no_near_limit, "tests/x.py", "p.wait(HANG_SECONDS)\nt.join()\n','.join(['1'])", 0),
    (has_no_near_limit, "tests/x.py", "pytestmark = pytest.mark.gpu\np.wait(3)", 0),
]


@pytest.mark.parametrize(("rule", "name", "source", "count"), PLANTED)
def test_a_planted_file_breaks_it(rule, name, source, count):
    assert len(list(rule(Source(name, source)))) == count
