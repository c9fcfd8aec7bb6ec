"""The Triton kernels of norm in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import interpreted

pytest.importorskip("triton")

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("marked", "least"),
    [("not nightly", 17), pytest.param("nightly", 80, marks=pytest.mark.nightly)],
)
def test_interpreted(marked, least):
    interpreted.check([HERE / "triton_interpreted.py"], least, marked=marked)
