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
WHEEL = runpy.run_path(str(ROOT / "tools" / "check_wheel.py"))
RELATIVE_LINK = re.compile(r"\]\((?!https?:)")


def files() -> list[str]:
    """The tracked files."""
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.skip("an unpacked archive has no git")
    return [line for line in run.stdout.splitlines() if (ROOT / line).is_file()]


def folders() -> set[str]:
    """Those with an __init__.py, by import name."""
    inits = [*ROOT.glob("cute_kernels/**/__init__.py"), *ROOT.glob("schedulers/**/__init__.py")]
    names = (".".join(path.parent.relative_to(ROOT).parts) for path in inits)
    return {f"cute_kernels.{name}" if name.startswith("sched") else name for name in names}


def test_every_package_folder_is_installed(tmp_path):
    packages = SETUP["packages"]
    listed = packages(str(ROOT))
    assert len(listed) >= 17 and sorted(listed) == sorted(folders())
    for name in ("cute_kernels/new/triton", "schedulers/new", "perf/new"):
        (tmp_path / name).mkdir(parents=True)
        for folder in (tmp_path / name, *(tmp_path / name).parents):
            if folder.is_relative_to(tmp_path) and folder != tmp_path:
                (folder / "__init__.py").touch()
    wanted = {"", ".new", ".new.triton", ".schedulers", ".schedulers.new"}
    assert set(packages(str(tmp_path))) == {f"cute_kernels{name}" for name in wanted}


def test_the_description_has_no_dead_links():
    readme = (ROOT / "README.md").read_text()
    assert RELATIVE_LINK.search(readme)
    alone = SETUP["description"](readme, None)
    assert not RELATIVE_LINK.search(alone)
    assert "Demo (`docs/demo.md`)" in alone and SETUP["urls"](None) == {}
    linked = SETUP["description"](readme, "https://code.example/project")
    assert not RELATIVE_LINK.search(linked)
    assert "[Demo](https://code.example/project/blob/main/docs/demo.md)" in linked
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
    modules = {name for name in files() if re.match(r"(cute_kernels|schedulers)/.*\.pyi?$", name)}
    want = {re.sub("^schedulers", "cute_kernels/schedulers", name) for name in modules}
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        (metadata,) = (opened.read(n).decode() for n in names if n.endswith("/METADATA"))
    data = {f"cute_kernels/{name}" for name in ("py.typed", "compile/calls.c", "demo/kernels.json")}
    assert {name for name in names if ".dist-info" not in name} == want | data
    assert "# cute_kernels" in metadata and not RELATIVE_LINK.search(metadata)
    assert "Typing :: Typed" in metadata and "text/markdown" in metadata


def test_the_readmes_examples_need_torch_alone():
    """`make wheel` runs them in an environment without extras; here transformers is hidden."""
    examples = WHEEL["EXAMPLE"].findall((ROOT / "README.md").read_text())
    python, hidden = Path(sys.executable), ("import sys; sys.modules['transformers'] = None\n", "")
    assert len(examples) == 1 and WHEEL["agree"](python, [hidden, *examples], "alone")
    needing = ("import transformers\n", "")
    assert not WHEEL["agree"](python, [hidden, needing, *examples], "with transformers hidden")
