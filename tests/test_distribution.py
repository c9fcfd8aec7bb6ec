"""What is distributed: every package, every file that the tests need, a description that links."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUP = runpy.run_path(str(ROOT / "setup.py"))
RELATIVE_LINK = re.compile(r"\]\((?!https?:)")


def files() -> list[str]:
    """The tracked files."""
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.skip("an unpacked archive has no git")
    return [line for line in run.stdout.splitlines() if (ROOT / line).is_file()]


def unpackaged(text: str, folders: set[str]) -> set[str]:
    """The folders with an __init__.py that pyproject.toml does not list as packages."""
    table = re.search(r"^packages = \[(.*?)^\]", text, re.M | re.S).group(1)
    listed = {name.replace(".", "/") for name in re.findall(r'"([\w.]+)"', table)}
    places = dict(re.findall(r'"cute_kernels\.(\w+)" = "(\w+)"', text))
    return folders - {places.get(name.partition("/")[2], name) for name in listed}


def test_every_package_folder_is_installed():
    text = (ROOT / "pyproject.toml").read_text()
    inits = [*ROOT.glob("cute_kernels/**/__init__.py"), *ROOT.glob("schedulers/**/__init__.py")]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in inits}
    assert len(folders) >= 8 and not unpackaged(text, folders)
    mutant = text.replace('    "cute_kernels.demo",\n', "")
    assert unpackaged(mutant, folders) == {"cute_kernels/demo"}


def test_the_description_has_no_dead_links():
    readme = (ROOT / "README.md").read_text()
    assert RELATIVE_LINK.search(readme)
    alone = SETUP["description"](readme, None)
    assert not RELATIVE_LINK.search(alone)
    assert "the demo (`docs/demo.md`)" in alone and SETUP["urls"](None) == {}
    linked = SETUP["description"](readme, "https://code.example/project")
    assert not RELATIVE_LINK.search(linked)
    assert "[the demo](https://code.example/project/blob/main/docs/demo.md)" in linked
    assert len(SETUP["urls"]("https://code.example/project")) == 3


def test_the_distributions_are_complete(tmp_path):
    """The source distribution has every file, so its tests can run; the wheel every module."""
    tree, built = tmp_path / "tree", tmp_path / "built"
    for name in files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    code = "from setuptools import build_meta as b; b.build_sdist({0!r}); b.build_wheel({0!r})"
    command = [sys.executable, "-c", code.format(str(built))]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    (archive,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert set(files()) <= inside
    modules = {name for name in files() if re.match(r"(cute_kernels|schedulers)/.*\.py$", name)}
    want = {re.sub("^schedulers", "cute_kernels/schedulers", name) for name in modules}
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        (metadata,) = (opened.read(n).decode() for n in names if n.endswith("/METADATA"))
    assert {name for name in names if ".dist-info" not in name} == want | {"cute_kernels/py.typed"}
    assert "# cute_kernels" in metadata and not RELATIVE_LINK.search(metadata)
    assert "Typing :: Typed" in metadata and "text/markdown" in metadata
