"""Import graph of our modules, read off the syntax trees."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tests.trees import parsed

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


def source_of(node: ast.ImportFrom, package: list[str]) -> str:
    """Dotted name of the module that a ``from`` import of a file in this package names."""
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def loaded_module(argument: ast.expr, package: list[str]) -> str:
    """Dotted name in a call of ``import_module``, or "" where a table or a variable has it."""
    parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    text = ""
    for part in parts:
        if isinstance(part, ast.FormattedValue) and ast.unparse(part.value) == "__package__":
            text += ".".join(package)
        elif isinstance(part, ast.Constant):
            text += part.value
        else:
            return ""
    return text


def _called(call: ast.Call) -> str:
    """Last name of the function that is called, or ""."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def imports_of(name: str, path: Path, known: set[str]) -> set[str]:
    """The package's own modules that one file imports, anywhere in it.

    Imports for tools alone (``if TYPE_CHECKING:``) count, and so does ``importlib.import_module``
    of a name that is written there; names that come from a table do not.
    """
    package = ["cute_kernels", *name.split(".")[:-1]]
    out = set()
    source = parsed(path)
    for node in source.nodes if "import_module" in source.text else source.statements:
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            stem = source_of(node, package)
            targets = [f"{stem}.{alias.name}" for alias in node.names] + [stem]
        elif isinstance(node, ast.Call) and _called(node).endswith("import_module"):
            targets = [loaded_module(node.args[0], package)]
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
def imports(name: str) -> set[str]:
    """The modules of ours that one of them imports, at its top or anywhere else."""
    paths = modules()
    return imports_of(name, paths[name], set(paths)) - {name}


def import_graph() -> dict[str, set[str]]:
    """Module -> its `imports`."""
    return {name: imports(name) for name in modules()}
