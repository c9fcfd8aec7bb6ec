"""Import rules of perf, read off the syntax trees; one table names the systems."""

from __future__ import annotations

import ast

import pytest

from cute_kernels.systems import SYSTEMS
from tests.import_graph import source_of
from tests.trees import Source, sources

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


def wrong(file: Source) -> list[str]:
    """The folders of perf that a file of it may not import, and does."""
    package = file.name.split("/")[:-1]
    folder = package[1] if len(package) > 1 else "."
    found = set()
    for node in file.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{source_of(node, package)}.{alias.name}" for alias in node.names}
    inside = {name.split(".")[1] for name in found if name.startswith("perf.")}
    return sorted(inside & set(MAY) - MAY[folder] - {folder})


def test_imports_go_down_and_systems_do_not_meet():
    files = [file for file in sources() if file.name.startswith("perf/")]
    assert {file.name.split("/")[1] for file in files if file.name.count("/") > 1} == {*MAY} - {"."}
    assert {file.name: out for file in files if (out := wrong(file))} == {}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("perf/core/x.py", "from ..gemm import targets"),
        ("perf/attention/x.py", "import perf.gemm.page"),
        ("perf/x.py", "from .attention import page"),
    ],
)
def test_a_planted_import_is_found(name, line):
    assert wrong(Source(name, line))
