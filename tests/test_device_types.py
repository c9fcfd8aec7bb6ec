"""Typed parameters in device code: every parameter and field names its type (style.md rule 4).

Device code is ``dsl/``, ``*/device/``, the ``kernel_*_sm90.py`` files and the device half of the
schedulers.  A finding is a parameter without an annotation, or a parameter or field whose type is
a bare ``tuple``, ``list`` or ``dict``, ``object`` or ``Any``.
"""

from __future__ import annotations

import ast

import pytest

from cute_kernels.systems import SYSTEMS

from .device_code import device_files, folder

#: Types that say nothing about what they hold.
UNTYPED = {"tuple", "list", "dict", "object", "Any", "Tuple", "List", "Dict"}

#: Folders with device code; a new system needs no row.
FOLDERS = sorted({folder(name) for name in device_files()})


def is_untyped(annotation: ast.expr) -> bool:
    """Whether an annotation has a bare container, ``object`` or ``Any`` in it."""
    typed = {id(n.value) for n in ast.walk(annotation) if isinstance(n, ast.Subscript)}
    for node in ast.walk(annotation):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
        if name in UNTYPED and id(node) not in typed:
            return True
    return False


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    """Parameters that need a type: all but ``self``, ``cls`` and the DSL's ``loc`` and ``ip``."""
    args = function.args
    rest = [one for one in (args.vararg, args.kwarg) if one is not None]
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, *rest]
    skipped = {"self", "cls"}
    if any("dsl_user_op" in ast.unparse(mark) for mark in function.decorator_list):
        skipped |= {"loc", "ip"}
    return [one for one in named if one.arg not in skipped]


def untyped(name: str, tree: ast.Module) -> list[str]:
    """Findings of one file, as ``file:line function(parameter)``."""
    findings = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            findings += [
                f"{name}:{one.lineno} {node.name}({one.arg})"
                for one in parameters(node)
                if one.annotation is None or is_untyped(one.annotation)
            ]
        elif isinstance(node, ast.ClassDef):
            findings += [
                f"{name}:{field.lineno} {node.name}.{ast.unparse(field.target)}"
                for field in node.body
                if isinstance(field, ast.AnnAssign) and is_untyped(field.annotation)
            ]
    return findings


@pytest.mark.parametrize("name", FOLDERS)
def test_parameters_of_device_code_are_typed(name):
    files = {file: path for file, path in device_files().items() if folder(file) == name}
    texts = {file: ast.parse(path.read_text()) for file, path in files.items()}
    findings = [line for file, tree in texts.items() for line in untyped(file, tree)]
    assert not findings, "\n".join(findings)


def test_every_system_with_a_launcher_has_device_code():
    systems = {f"cute_kernels/{system.package}" for system in SYSTEMS if system.launcher}
    assert set(FOLDERS) == systems | {"cute_kernels/dsl", "schedulers"}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f(a, b: int, *c, d=1, **e): pass", 4),
        ("def f(a: tuple, b: list | None, c: dict): pass", 3),
        ("def f(a: tuple[int, list], b: object, c: typing.Any): pass", 3),
        ("def f(a: tuple[int, ...], b: list[cute.Tensor], c: cute.Tensor | None): pass", 0),
        ("class A:\n    x: tuple\n    y: int\n    def f(self, z): pass", 2),
        ("def f(a: int):\n    def g(row): pass", 1),
        ("@dsl_user_op\ndef f(a: int, *, loc=None, ip=None): pass", 0),
        ("def f(a: int, *, loc=None, ip=None): pass", 2),
    ],
)
def test_planted_parameters_are_found(text, count):
    assert len(untyped("planted.py", ast.parse(text))) == count
