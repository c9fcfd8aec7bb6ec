"""Import graph of our modules, read off the syntax trees."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cute_kernels"
SCHEDULERS = ROOT / "schedulers"
VERIFY = ROOT / "verify"


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted name inside the package -> file."""
    out = {}
    for base, prefix in ((PACKAGE, ()), (SCHEDULERS, ("schedulers",)), (VERIFY, ("verify",))):
        for path in base.rglob("*.py"):
            out[".".join((*prefix, *path.relative_to(base).with_suffix("").parts))] = path
    return out


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only tools read: ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        yield node
        yield from run_time_nodes(node)


def source_of(node: ast.ImportFrom, package: list[str]) -> str:
    """Dotted name of the module that a ``from`` import of a file in this package names."""
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def imports_of(name: str, path: Path, known: set[str]) -> set[str]:
    """The package's own modules that one file imports, anywhere in it."""
    package = ["cute_kernels", *name.split(".")[:-1]]
    out = set()
    for node in run_time_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            stem = source_of(node, package)
            targets = [f"{stem}.{alias.name}" for alias in node.names] + [stem]
        else:
            continue
        for target in targets:
            inside = target.removeprefix("cute_kernels.")
            if (inside != target or target.partition(".")[0] == "verify") and (
                inside in known or f"{inside}.__init__" in known
            ):
                out.add(inside if inside in known else f"{inside}.__init__")
    return out


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports, at its top or anywhere else."""
    out = modules()
    return {name: imports_of(name, path, set(out)) - {name} for name, path in out.items()}
