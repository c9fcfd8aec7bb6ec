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
    ("chosen", "least"),
    [("test_killed", 5), pytest.param("test", 85, marks=pytest.mark.nightly)],
)
def test_interpreted(chosen, least):
    here = Path(__file__)
    root = here.parents[2]
    files = [str(here.with_name(f"triton_{name}interpreted.py")) for name in ("", "tree_")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in [name for name in environment if name.startswith(("PYTEST", "CUTE_KERNELS"))]:
        del environment[name]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = re.search(r"(\d+) passed", done.stdout)
    assert counts and int(counts[1]) >= least, done.stdout[-2000:]
    assert "skipped" not in done.stdout
