"""Parameters of device code have types: no bare tuple, list or dict, none unannotated."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Files of device code that obey; a system is added when its parameters have types.
FILES = (
    "cute_kernels/sparse_attn/kernel_*_sm90.py",
    "cute_kernels/sparse_attn/device/*.py",
)
BARE = {"tuple", "list", "dict", "object", "Any"}


def untyped(tree: ast.AST) -> list[str]:
    """Parameters of a file without a type, as ``line function(parameter)``."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = node.args
        extra = [one for one in (given.vararg, given.kwarg) if one]
        for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, *extra):
            bare = one.annotation is None or ast.unparse(one.annotation) in BARE
            if bare and one.arg not in ("self", "cls"):
                found.append(f"{node.lineno} {node.name}({one.arg})")
    return found


@pytest.mark.parametrize("pattern", FILES)
def test_device_parameters_have_types(pattern):
    paths = sorted(ROOT.glob(pattern))
    assert len(paths) > 1
    wrong = [f"{p.name}:{one}" for p in paths for one in untyped(ast.parse(p.read_text()))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("def f(self, at): pass", ["at"]),
        ("def f(rows: tuple, n: int): pass", ["rows"]),
        ("def f(*, lists: list): pass", ["lists"]),
        ("def f(*args): pass", ["args"]),
        ("def f(rows: tuple[int, int], mask: Mask | None = None): pass", []),
    ],
)
def test_a_planted_parameter_is_found(line, names):
    assert [one.split("(")[1][:-1] for one in untyped(ast.parse(line))] == names
