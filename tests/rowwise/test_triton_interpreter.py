"""The Triton kernels of rowwise in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import interpreted

pytest.importorskip("triton")

HERE = Path(__file__).parent


# Mutants by day, when the same source is compiled and runs in ptxsim: test_triton_simulated.py.
@pytest.mark.parametrize(
    ("chosen", "least"),
    [("test_killed", 11), pytest.param("test", 48, marks=pytest.mark.nightly)],
)
def test_interpreted(chosen, least):
    interpreted.check([HERE / "triton_interpreted.py"], least, chosen=chosen)
