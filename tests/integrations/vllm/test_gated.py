"""The gated activation of a GPU: two roundings in one launch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ranks import ROOT

pytest.importorskip("triton")


def test_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    file = f"{__package__.replace('.', '/')}/gated_interpreted.py"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [*command, file], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-3000:]
