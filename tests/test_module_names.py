"""Every attribute that a file reads of one of our modules exists there.

Tests that need a GPU and programs under perf/ are imported at every commit and run by few: a name
that moved is found here.
"""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.import_graph import ROOT, source_of

OURS = ("cute_kernels", "tests", "perf", "ptxsim", "verify")
FILES = sorted(
    path
    for folder in ("cute_kernels", "perf", "ptxsim", "tests", "verify")
    for path in (ROOT / folder).rglob("*.py")
    if "schedulers" not in path.parts
)


def dotted(path: Path) -> tuple[str, str]:
    """(module, package) of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__":
        return ".".join(parts[:-1]), ".".join(parts[:-1])
    return ".".join(parts), ".".join(parts[:-1])


def imported(tree: ast.Module, package: str) -> Iterator[tuple[str, str, str]]:
    """(local name, module, name in it) of every ``from`` import of ours."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
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


def read_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(local name, attribute) of every attribute that is read, or patched by ``setattr``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            owner, name = [*node.args, None, None][:2]
            name = getattr(name, "value", None)
        else:
            continue
        if isinstance(owner, ast.Name) and isinstance(name, str):
            yield owner.id, name


def programs(tree: ast.Module) -> Iterator[ast.Module]:
    """The programs that a file holds as texts, for processes of their own."""
    for node in ast.walk(tree):
        text = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and "import " in text and "\n" in text.strip():
            try:
                yield ast.parse(text)
            except SyntaxError:
                continue


def absent(tree: ast.Module, package: str) -> list[str]:
    """The attributes of our modules that a file reads or patches, and that do not exist."""
    wrong = [name for program in programs(tree) for name in absent(program, "")]
    return wrong + absent_alone(tree, package)


def absent_alone(tree: ast.Module, package: str) -> list[str]:
    """`absent`, without the programs that the file holds as texts."""
    nodes = list(ast.walk(tree))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    modules, wrong = {}, []
    for local, source, name in imported(tree, package):
        try:
            value = resolve(source, name)
        except ModuleNotFoundError:
            wrong.append(f"{source}.{name}")
            continue
        if isinstance(value, types.ModuleType) and local not in stored:
            modules[local] = value
    pairs = [(owner, name) for owner, name in read_names(tree) if owner in modules]
    return wrong + [f"{owner}.{name}" for owner, name in pairs if not hasattr(modules[owner], name)]


def test_every_name_exists():
    wrong = {}
    for path in FILES:
        if path == Path(__file__):
            continue  # it holds planted programs
        if missing := absent(ast.parse(path.read_text(encoding="utf-8")), dotted(path)[1]):
            wrong[str(path.relative_to(ROOT))] = missing
    assert not wrong


def chain(node: ast.expr) -> list[str]:
    """["torch", "cuda", ..] of ``torch.cuda...``; empty for anything else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *names[::-1]] if isinstance(node, ast.Name) and node.id == "torch" else []


def absent_of_torch(tree: ast.Module) -> set[str]:
    """The names of torch, through its modules, that a file reads and that torch does not have."""
    wrong = set()
    for names in map(chain, ast.walk(tree)):
        owner = torch
        for name in names[1:]:
            if not isinstance(owner, types.ModuleType) or owner is torch.ops:
                break
            if not hasattr(owner, name):
                wrong.add(".".join(names))
                break
            owner = getattr(owner, name)
    return wrong


def test_every_name_of_torch_exists():
    """A line that only a GPU reaches is read here."""
    wrong = {}
    for path in sorted((ROOT / "cute_kernels").rglob("*.py")):
        if missing := absent_of_torch(ast.parse(path.read_text(encoding="utf-8"))):
            wrong[str(path.relative_to(ROOT))] = missing
    assert not wrong


def test_a_planted_name_of_torch_is_found():
    name = "torch.cuda.is_current_streamcapturing"
    assert absent_of_torch(ast.parse(f"torch.ops.any.name, torch.cuda.Stream, {name}()")) == {name}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from cute_kernels.gemm import launch\nlaunch._dense(1)", "launch._dense"),
        ("from . import public_calls as calls\ncalls.nothing", "calls.nothing"),
        ("from cute_kernels.gemm import lunch", "cute_kernels.gemm.lunch"),
        ("RUN = 'import os\\nfrom cute_kernels.gemm import lunch'", "cute_kernels.gemm.lunch"),
        (
            "from cute_kernels.gemm import launch\nmonkeypatch.setattr(launch, 'skiny', 1)",
            "launch.skiny",
        ),
    ],
)
def test_a_planted_name_is_found(source, name):
    assert absent(ast.parse(source), "tests") == [name]
