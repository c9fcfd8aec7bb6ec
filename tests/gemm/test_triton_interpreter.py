"""The Triton kernels of gemm in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import interpreted

pytest.importorskip("triton")

HERE = Path(__file__).parent
FILES = [HERE / "triton_interpreted.py", HERE / "triton_tree_interpreted.py"]


# Mutants by day, when the same source is compiled and runs in ptxsim: test_triton_simulated.py.
@pytest.mark.parametrize(
    ("chosen", "least"),
    [("test_killed", 5), pytest.param("test", 85, marks=pytest.mark.nightly)],
)
def test_interpreted(chosen, least):
    interpreted.check(FILES, least, chosen=chosen)
