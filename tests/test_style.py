"""The rules of design section 3 that a syntax tree can show."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

from .device_code import DEVICE

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE = 600
MAX_FUNCTION = 120


def sources() -> list[Path]:
    """Every Python file of the project: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:  # an unpacked archive has no git
        return [p for p in ROOT.rglob("*.py") if ".venv" not in p.parts]
    return [ROOT / line for line in run.stdout.splitlines() if (ROOT / line).exists()]


@functools.cache
def trees() -> list[tuple[str, str, ast.Module]]:
    """(name, text, tree) of every file: parsed once a process, which takes seconds."""
    out = []
    for path in sources():
        text = path.read_text()
        out.append((str(path.relative_to(ROOT)), text, ast.parse(text)))
    return out


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_and_functions_are_small():
    long = []
    for name, text, tree in trees():
        if (lines := text.count("\n")) > MAX_FILE:
            long.append(f"{name}: {lines} lines")
        for node in functions(tree):
            if (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION:
                long.append(f"{name}:{node.lineno} {node.name}: {lines} lines")
    assert not long, "\n".join(long)


def test_launchers_and_kernels_do_not_raise():
    pattern = re.compile(r"/(kernel_\w+|launch)\.py$")
    out = [
        f"{name}:{node.lineno}"
        for name, _, tree in trees()
        if name.startswith("cute_kernels/") and pattern.search(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
    ]
    assert not out, f"checks.py is the place: {out}"


def test_traced_files_keep_their_annotations():
    """Stringified annotations break @cute.struct."""
    names = [
        name
        for name, text, _ in trees()
        if DEVICE.match(name) and "from __future__ import annotations" in text
    ]
    assert not names


def test_every_file_says_what_it_is():
    exempt = re.compile(r"^(docs/conf\.py|tests/(\w+/)*__init__\.py)$")
    silent = [
        name for name, _, tree in trees() if not exempt.match(name) and not ast.get_docstring(tree)
    ]
    assert not silent, silent


def stub(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether a definition is one of the types that a function has, for type checkers."""
    return [ast.unparse(mark) for mark in node.decorator_list] == ["overload"]


def test_public_functions_have_docstrings():
    out = []
    for name, _, tree in trees():
        if not name.startswith(("cute_kernels/", "schedulers/")):
            continue
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not stub(node)
            if public and not node.name.startswith("_") and not ast.get_docstring(node):
                out.append(f"{name}:{node.lineno} {node.name}")
    assert not out, "\n".join(out)


def test_nothing_is_left_open():
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b|raise NotImplementedError")
    out = [
        f"{name}:{number}"
        for name, text, _ in trees()
        if not name.endswith("test_style.py")
        for number, line in enumerate(text.splitlines(), 1)
        if marks.search(line)
    ]
    assert not out, out


def test_environment_is_read_in_settings_only():
    """One table of variables: nothing else in the package reads CUTE_KERNELS_*."""
    names = [
        name
        for name, text, _ in trees()
        if name.startswith(("cute_kernels/", "schedulers/"))
        and name != "cute_kernels/settings.py"
        and re.search(r"environ[^\n]*CUTE_KERNELS_", text)
    ]
    assert not names, names


def taken_from_test_modules(name: str, tree: ast.Module) -> list[str]:
    """What a file imports from test modules, or of them: those are for pytest alone.

    Shared functions lie in modules whose names do not begin with ``test_``.
    """
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            stem = "tests." * bool(node.level) + f"{node.module or ''}."
            targets = [stem + alias.name for alias in node.names]
        else:
            continue
        for target in targets:
            first, *rest = target.split(".")
            if first == "tests" and any(part.startswith("test_") for part in rest):
                out.append(f"{name}:{node.lineno} {target}")
    return out


def test_no_test_module_is_imported():
    lines = [
        line
        for name, _, tree in trees()
        if name.startswith("tests/")
        for line in taken_from_test_modules(name, tree)
    ]
    assert not lines, "move what is shared to a helper module:\n" + "\n".join(lines)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("from tests.gemm.test_sm90_mutants import no_release", True),
        ("from tests.gemm import simulated, test_sm90_mutants as mutants", True),
        ("import tests.gemm.test_cpu", True),
        ("from .test_cpu import rows_op", True),
        ("from . import cases, test_cpu", True),
        ("from ..gemm.test_cpu import rows_op", True),
        ("def inside():\n    from tests.gemm import test_cpu", True),
        ("from tests.gemm import simulated", False),
        ("from . import cases", False),
        ("from torch.testing import test_something", False),
    ],
)
def test_a_planted_import_of_a_test_module_is_found(line, wrong):
    assert bool(taken_from_test_modules("planted.py", ast.parse(line))) == wrong


MAX_PARAMETERS = 8
#: Signatures that somebody else's call gives: public functions, other libraries' hooks, commands,
#: torch ops.
GIVEN = re.compile(
    r"/(api|op|policy_op|converters|te)\.py$|/integrations/|/cli/|(commands?|__main__)\.py$"
    r"|^cute_kernels/(__main__|nn)\.py$"
)


def crowded(name: str, tree: ast.Module) -> list[str]:
    """Host functions of a file with more than ``MAX_PARAMETERS``, but for given ones.

    What travels together is bundled: what a backward saved.  Device code has the rule of
    test_device_types.py instead.
    """
    out = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or GIVEN.search(name) or DEVICE.match(name):
            continue
        marks = " ".join(map(ast.unparse, node.decorator_list))
        if "triton.jit" in marks or node.name == "__call__":
            continue
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if len([one for one in names if one not in ("self", "cls")]) > MAX_PARAMETERS:
            out.append(f"{name}: {node.name} takes {len(names)}")
    return out


def test_few_parameters():
    lines = [
        line
        for name, _, tree in trees()
        if not name.startswith(("tests/", "ptxsim/tests/"))
        for line in crowded(name, tree)
    ]
    assert not lines, "\n".join(lines)
    nine = ast.parse("def f(self, a, b, c, d, e, f, g, h, *, i): pass")
    assert crowded("cute_kernels/gemm/launch.py", nine)
    assert not crowded("cute_kernels/gemm/op.py", nine)
