"""The Triton kernels of mhc in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import interpreted

pytest.importorskip("triton")

HERE = Path(__file__).parent


# By day the same source is compiled and runs in ptxsim: test_triton_simulated.py.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("file", "marked", "least"),
    [
        ("triton_interpreted.py", "not nightly", 42),
        ("triton_mutants.py", "not nightly", 62),
        ("triton_interpreted.py", "nightly", 60),
    ],
)
def test_interpreted(file, marked, least):
    interpreted.check([HERE / file], least, marked=marked)
