"""Runs the interpreted tests in their own process: triton reads the switch when it is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_interpreted():
    here = Path(__file__)
    root = here.parents[2]
    files = [str(here.with_name(f"triton_{name}interpreted.py")) for name in ("", "tree_")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in [name for name in environment if name.startswith(("PYTEST", "CUTE_KERNELS"))]:
        del environment[name]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = re.search(r"(\d+) passed", done.stdout)
    assert counts and int(counts[1]) >= 85, done.stdout[-2000:]
    assert "skipped" not in done.stdout and "deselected" not in done.stdout
