"""The nightly run with all extras: which tests it has, and that it lets none be skipped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests import extras

IMPORTS = re.compile(rf"^\s*(?:import|from) ({'|'.join(extras.PACKAGES)})\b", re.M)
RUN = "import sys; from tests import extras; print(*(+extras.run(f.split()) for f in sys.argv[1:]))"
#: A test module, and the status of a run of it.
BODIES = {
    "def test():\n    pass": 0,
    "def test():\n    assert 0": 1,
    "import pytest\npytest.importorskip('no_such_package')\ndef test():\n    pass": 5,
    "import pytest\ndef test():\n    pytest.skip('trl is not installed: pip')": 1,
    "import pytest\ndef test_a():\n    pytest.skip('no GPU')\ndef test_b():\n    pass": 0,
}


def test_every_test_of_an_extra_is_in_it():
    """A test module that imports such a package has a guard, and so is found."""
    files = extras.files()
    assert {
        Path("tests/integrations/test_trl.py"),
        Path("tests/model/patch/test_engines.py"),
    } < set(files)
    importing = [
        file.relative_to(extras.ROOT)
        for file in (extras.ROOT / "tests").rglob("test_*.py")
        if IMPORTS.search(file.read_text())
    ]
    assert importing and set(importing) <= set(files)


def test_the_target_installs_what_they_need():
    text = (extras.ROOT / "Makefile").read_text()
    assert re.search(r"^nightly-extras:.*\n\t.*-m tests\.extras", text, re.M)
    project = (extras.ROOT / "pyproject.toml").read_text()
    named = set(re.search(r'-e "\.\[([\w,]+)\]"\n\t@touch \$\(EXTRAS', text)[1].split(","))
    lists = re.findall(r"^(\w+) = \[([^\]]*)\]", project, re.M)
    installed = {
        name
        for extra, packages in lists
        if extra in named
        for name in re.findall(r'"([\w-]+)', packages)
    }
    assert set(extras.PACKAGES) <= installed and {"trl", "deepspeed"} <= named


def test_a_missing_package_is_a_failure(tmp_path):
    lines = []
    for number, body in enumerate(BODIES):
        (tmp_path / f"test_{number}.py").write_text(body)
        options = f"-pno:cacheprovider -q -c /dev/null --rootdir {tmp_path}"
        lines.append(f"{tmp_path}/test_{number}.py {options}")
    command = [sys.executable, "-c", RUN, *lines]
    process = subprocess.run(command, cwd=extras.ROOT, capture_output=True, text=True, check=False)
    statuses = process.stdout.splitlines()[-1].split()
    assert statuses == [str(status) for status in BODIES.values()], process.stdout + process.stderr
