"""Type checkers know what each public call returns: tests/typed_calls.py."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CALLS = ROOT / "tests" / "typed_calls.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder where the packages lie as in an installation: schedulers inside cute_kernels."""
    root = tmp_path_factory.mktemp("installed")
    (root / "cute_kernels").mkdir()
    for path in (*(ROOT / "cute_kernels").iterdir(), ROOT / "schedulers"):
        (root / "cute_kernels" / path.name).symlink_to(path)
    return root


def test_the_stubs_name_what_the_packages_have():
    run = subprocess.run([sys.executable, "tools/stubs.py", "--check"], cwd=ROOT)
    assert run.returncode == 0, "a stub is not up to date: python tools/stubs.py"


#: All that mypy reads of torch by day, and of other libraries nothing.
TENSOR = """
from typing import Any
class Tensor:
    def sum(self) -> Tensor: ...
    def __neg__(self) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
"""
BY_DAY = """
[mypy-torch.*,numpy.*,triton.*,cutlass.*,transformers.*,typer.*,rich.*]
follow_imports = skip
[mypy-torch]
follow_imports = silent
"""


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_mypy_agrees_and_finds_a_wrong_type(tmp_path, installed, whole):
    """Each line with another type is an error.  The whole of torch takes five times as long."""
    pytest.importorskip("mypy")
    wrong, settings, stubs = (tmp_path / name for name in ("wrong.py", "mypy.ini", "stubs"))
    text = CALLS.read_text().replace(", Pair)", ", int)")
    wrong.write_text(text)
    settings.write_text("[mypy]\n" if whole else f"[mypy]\n{BY_DAY}")
    (stubs / "torch").mkdir(parents=True)
    (stubs / "torch" / "__init__.pyi").write_text(TENSOR)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--warn-unused-ignores"]
    command += [f"--config-file={settings}", str(CALLS), str(wrong)]
    environment = os.environ | ({} if whole else {"MYPYPATH": str(stubs)})
    run = subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True)
    errors = [line for line in run.stdout.splitlines() if "error:" in line]
    out = {int(line.split(":")[1]) for line in errors if "assert-type" in line}
    assert all(line.partition(":")[0].endswith("wrong.py") for line in errors), run.stdout
    lines = enumerate(text.splitlines(), 1)
    assert out == {n for n, line in lines if line.endswith(", int)")} and len(out) >= 10


def test_pyright_agrees(installed):
    if (pyright := shutil.which("pyright")) is None:
        pytest.skip("pyright is not installed")
    command = [pyright, "--pythonpath", sys.executable, str(CALLS)]
    run = subprocess.run(command, cwd=installed, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_the_types_have_the_arguments_of_the_functions():
    """Every overload names the parameters of its implementation, in their order."""
    checked = 0
    for path in [*(ROOT / "cute_kernels").glob("*/api.py"), ROOT / "cute_kernels" / "nn.py"]:
        for scope in ast.walk(ast.parse(path.read_text())):
            if not isinstance(scope, ast.Module | ast.ClassDef):
                continue
            functions = [node for node in scope.body if isinstance(node, ast.FunctionDef)]
            real = {f.name: signature(f) for f in functions if not f.decorator_list}
            for function in functions:
                if [ast.unparse(mark) for mark in function.decorator_list] == ["overload"]:
                    assert signature(function) == real[function.name], f"{path}: {function.name}"
                    checked += 1
    assert checked >= 17


def signature(function: ast.FunctionDef) -> list[tuple[str, str]]:
    """(kind, name) of each parameter."""
    kinds = {"positional": function.args.args, "keyword": function.args.kwonlyargs}
    return [(kind, arg.arg) for kind, args in kinds.items() for arg in args]
