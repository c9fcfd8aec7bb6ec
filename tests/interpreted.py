"""Tests of Triton kernels in Triton's interpreter, in a process of their own.

Triton reads ``TRITON_INTERPRET`` when it is imported, so the files cannot run in this process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import triton_in_numpy
from tests.hang import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[1]
EITHER = "nightly or not nightly"


def check(files: Iterable[Path], *, marked: str = EITHER, chosen: str = "test") -> Counter:
    """Run the tests of ``files`` that ``-m marked -k chosen`` selects: all pass, none is skipped.

    Returns how many of each file passed.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    selection = ["-m", marked, "-k", chosen, *map(str, files)]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "CUTE_KERNELS"))
    } | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    run = subprocess.run(
        [*command, *selection],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = Counter(re.findall(r"^(\S+\.py)::.* PASSED", run.stdout, re.M))
    assert re.search(rf"\b{passed.total()} passed\b", run.stdout), run.stdout[-2000:]
    assert "skipped" not in run.stdout
    return passed


@pytest.fixture(autouse=True)
def same_on_every_machine(monkeypatch):
    """`same_bits`, for the tests of a module that imports it."""
    triton_in_numpy.same_bits(monkeypatch)
