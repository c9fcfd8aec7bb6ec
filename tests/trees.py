"""Syntax trees of the project's Python files, each parsed once a process."""

from __future__ import annotations

import ast
import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Source:
    """A file: its name from the root on, and its text."""

    name: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree."""
        return tuple(ast.walk(self.tree))

    @functools.cached_property
    def statements(self) -> list[ast.stmt]:
        """Every statement: a walk that leaves out the expressions, ten times as many."""
        out: list = [self.tree]
        for node in out:
            for block in ("body", "orelse", "finalbody", "handlers", "cases"):
                out += getattr(node, block, ())
        return out

    @functools.cached_property
    def functions(self) -> list[ast.FunctionDef]:
        return [n for n in self.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the project: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:  # an unpacked archive has no git
        paths = [p for p in ROOT.rglob("*.py") if ".venv" not in p.parts]
    else:
        paths = [ROOT / line for line in run.stdout.splitlines() if (ROOT / line).exists()]
    return tuple(
        [Source(p.relative_to(ROOT).as_posix(), p.read_text(encoding="utf-8")) for p in paths]
    )


@functools.cache
def by_name() -> dict[str, Source]:
    return {source.name: source for source in sources()}


def parsed(path: Path) -> Source:
    """The file at a path: that of `sources`, or one that is planted elsewhere."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return by_name().get(name) or Source(path.as_posix(), path.read_text(encoding="utf-8"))
