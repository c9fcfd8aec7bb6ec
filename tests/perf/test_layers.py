"""Import rules of perf, read off the syntax trees; one table names the systems."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_kernels.systems import SYSTEMS
from perf.core import record

PERF = record.ROOT / "perf"
FOLDERS = {system.perf for system in SYSTEMS if system.perf}
#: Folder -> the folders of perf that it may import; the files above them import none of FOLDERS.
MAY = {name: {"core"} for name in FOLDERS} | {
    "core": set(),
    "digest": {"core"},
    "model": {"core"},
    "rl": {"core"},
    "probes": {"core", "gemm"},  # what is asked of the card decides how gemm adds
    ".": {"core", "digest", "model", "probes", "rl"},
}


def imported(path: Path, package: list[str]) -> Iterator[list[str]]:
    """The dotted names, split, that a file of a package imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = [*base, *(node.module.split(".") if node.module else [])]
            yield from ([*stem, alias.name] for alias in node.names)


def wrong(path: Path, folder: str) -> list[str]:
    """The folders of perf that a file of `folder` may not import, and does."""
    package = ["perf"] if folder == "." else ["perf", folder]
    known = {*MAY, folder}
    out = {
        name[1]
        for name in imported(path, package)
        if name[0] == "perf" and len(name) > 1 and name[1] in known
    }
    return sorted(out - MAY[folder] - {folder})


def files() -> Iterator[tuple[Path, str]]:
    for path in PERF.rglob("*.py"):
        yield path, path.relative_to(PERF).parts[0] if path.parent != PERF else "."


def test_imports_go_down_and_systems_do_not_meet():
    assert {folder for _, folder in files()} == set(MAY)
    assert {str(path): out for path, folder in files() if (out := wrong(path, folder))} == {}


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("core", "from ..gemm import targets"),
        ("attention", "import perf.gemm.page"),
        (".", "from .attention import page"),
    ],
)
def test_a_planted_import_is_found(folder, line, tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text(line)
    assert wrong(planted, folder)
