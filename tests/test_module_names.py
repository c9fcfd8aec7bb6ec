"""Every attribute that a file reads of one of our modules exists there.

Tests that need a GPU and programs under perf/ are imported at every commit and run by few: a name
that moved is found here.
"""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Iterator

import pytest
import torch

from tests.import_graph import source_of
from tests.trees import Source, sources

OURS = ("cute_kernels", "tests", "perf", "ptxsim", "verify")


def imported(file: Source, package: str) -> Iterator[tuple[str, str, str]]:
    """(local name, module, name in it) of every ``from`` import of ours."""
    for node in file.nodes:
        if isinstance(node, ast.ImportFrom):
            source = source_of(node, package.split("."))
            if source.partition(".")[0] in OURS and node.names[0].name != "*":
                yield from ((a.asname or a.name, source, a.name) for a in node.names)


def resolve(source: str, name: str) -> object:
    """What ``from source import name`` binds; None if a package that it needs is not installed."""
    try:
        module = importlib.import_module(source)
        if not hasattr(module, name):
            return importlib.import_module(f"{source}.{name}")
        return getattr(module, name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in OURS:
            raise
        return None
    except (pytest.skip.Exception, ImportError):
        return None


def read_names(file: Source) -> Iterator[tuple[str, str]]:
    """(local name, attribute) of every attribute that is read, or patched by ``setattr``."""
    for node in file.nodes:
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            owner, name = [*node.args, None, None][:2]
            name = getattr(name, "value", None)
        else:
            continue
        if isinstance(owner, ast.Name) and isinstance(name, str):
            yield owner.id, name


def programs(file: Source) -> Iterator[Source]:
    """The programs that a file holds as texts, for processes of their own."""
    for node in file.nodes:
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and "import " in text and "\n" in text.strip():
            program = Source("", text)
            try:
                assert program.tree
            except SyntaxError:
                continue
            yield program


def absent(file: Source, package: str) -> list[str]:
    """The attributes of our modules that a file reads or patches, and that do not exist."""
    wrong = [name for program in programs(file) for name in absent(program, "")]
    stored = {n.id for n in file.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored |= {n.arg for n in file.nodes if isinstance(n, ast.arg)}
    modules = {}
    for local, source, name in imported(file, package):
        try:
            value = resolve(source, name)
        except ModuleNotFoundError:
            wrong.append(f"{source}.{name}")
            continue
        if isinstance(value, types.ModuleType) and local not in stored:
            modules[local] = value
    pairs = [(owner, name) for owner, name in read_names(file) if owner in modules]
    return wrong + [f"{owner}.{name}" for owner, name in pairs if not hasattr(modules[owner], name)]


def chain(node: ast.AST) -> list[str]:
    """["torch", "cuda", ..] of ``torch.cuda...``; empty for anything else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *names[::-1]] if isinstance(node, ast.Name) and node.id == "torch" else []


def absent_of_torch(file: Source) -> set[str]:
    """The names of torch, through its modules, that a file reads and that torch does not have."""
    wrong = set()
    for names in map(chain, file.nodes):
        owner = torch
        for name in names[1:]:
            if not isinstance(owner, types.ModuleType) or owner is torch.ops:
                break
            if not hasattr(owner, name):
                wrong.add(".".join(names))
                break
            owner = getattr(owner, name)
    return wrong


def test_every_name_exists():
    """Those of torch too: a line of the library that only a GPU reaches is read here."""
    wrong = {}
    for file in sources():
        top, *rest = file.name.removesuffix(".py").split("/")
        # This file holds planted programs.
        if top not in OURS or "schedulers" in rest or rest == ["test_module_names"]:
            continue
        missing = absent(file, ".".join((top, *rest[:-1])))
        missing += absent_of_torch(file) if top == "cute_kernels" else ()
        wrong |= {file.name: missing} if missing else {}
    assert not wrong


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from cute_kernels.gemm import launch\nlaunch._dense(1)", "launch._dense"),
        ("from . import public_calls as calls\ncalls.nothing", "calls.nothing"),
        ("from cute_kernels.gemm import lunch", "cute_kernels.gemm.lunch"),
        ("RUN = 'import os\\nfrom cute_kernels.gemm import lunch'", "cute_kernels.gemm.lunch"),
        ("from cute_kernels.gemm import launch\nm.setattr(launch, 'skiny', 1)", "launch.skiny"),
        ("torch.ops.any.name, torch.cuda.Stream, torch.cuda.capturing()", "torch.cuda.capturing"),
    ],
)
def test_a_planted_name_is_found(source, name):
    file = Source("tests/planted.py", source)
    assert [*absent(file, "tests"), *absent_of_torch(file)] == [name]
