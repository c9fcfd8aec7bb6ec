"""The Triton kernels of systems in Triton's interpreter, in a process of their own.

By day their mutants alone, in one process: the same source is compiled and runs in ptxsim, for
values, rows and orders.  A system whose tables run through `triton_runner.Runner.running` has its
interpreter in the process of its tests, and is not here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import interpreted

pytest.importorskip("triton")

TESTS = Path(__file__).parent
#: (file, marks, at least so many tests): by night everything.
NIGHT = [
    ("logp/triton_interpreted.py", "not nightly", 47),
    ("logp/triton_interpreted.py", "nightly", 52),
    ("mhc/triton_interpreted.py", "not nightly", 81),
    ("norm/triton_interpreted.py", interpreted.EITHER, 50),
    ("rowwise/triton_interpreted.py", interpreted.EITHER, 31),
    ("sparse_attn/triton_interpreted.py", interpreted.EITHER, 83),
]
#: How many mutants of each file run at every commit; those of mhc are run in ptxsim by day.
KILLED = {"logp": 12, "norm": 5, "rowwise": 7, "sparse_attn": 11}


def test_mutants():
    files = [TESTS / system / "triton_interpreted.py" for system in KILLED]
    passed = interpreted.check(files, marked="not nightly", chosen="test_killed")
    for file, least in zip(files, KILLED.values(), strict=True):
        assert passed[str(file.relative_to(interpreted.ROOT))] >= least, passed


@pytest.mark.nightly
@pytest.mark.parametrize(("file", "marked", "least"), NIGHT)
def test_everything(file, marked, least):
    assert interpreted.check([TESTS / file], marked=marked).total() >= least
