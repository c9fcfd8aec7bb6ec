"""The Triton kernels of norm in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import interpreted

pytest.importorskip("triton")

HERE = Path(__file__).parent


# Mutants by day, when the same source is compiled and runs in ptxsim: test_triton_simulated.py.
@pytest.mark.parametrize(
    ("marked", "chosen", "least"),
    [
        ("not nightly", "test_killed", 5),
        pytest.param("not nightly", "test", 17, marks=pytest.mark.nightly),
        pytest.param("nightly", "test", 80, marks=pytest.mark.nightly),
    ],
)
def test_interpreted(marked, chosen, least):
    interpreted.check([HERE / "triton_interpreted.py"], least, marked=marked, chosen=chosen)
