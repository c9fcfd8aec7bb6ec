"""Runs the interpreted tests in their own process: triton reads the switch when it is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hang import HANG_SECONDS

pytest.importorskip("triton")


# Mutants by day, when the same source is compiled and runs in ptxsim: test_triton_simulated.py.
@pytest.mark.parametrize(
    ("marked", "chosen", "least"),
    [
        ("not nightly", "test_killed", 12),
        pytest.param("not nightly", "test", 46, marks=pytest.mark.nightly),
        pytest.param("nightly", "test", 51, marks=pytest.mark.nightly),
    ],
)
def test_interpreted(marked, chosen, least):
    file = Path(__file__).with_name("triton_interpreted.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        marked,
        "-k",
        chosen,
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in [name for name in environment if name.startswith(("PYTEST", "CUTE_KERNELS"))]:
        del environment[name]
    done = subprocess.run(
        [*command, str(file)],
        cwd=file.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = re.search(r"(\d+) passed", done.stdout)
    assert counts and int(counts[1]) >= least, done.stdout[-2000:]
    assert "skipped" not in done.stdout
