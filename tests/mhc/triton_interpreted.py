"""The Triton mhc in Triton's interpreter: values, rows, and cuts of the stream of tokens.

Collected by test_triton_interpreter.py only, in a process that has TRITON_INTERPRET=1 before triton
is imported.  2^y is the CPU backend's, casts to bf16 round, and an fma is a product and a sum, as
the CPU backend's are: then most results are its bytes.
"""

from __future__ import annotations

import os

import pytest

from cute_kernels.mhc.triton import launch

from ..triton_in_numpy import same_on_every_machine  # noqa: F401
from . import triton_cases as cases
from .triton_cases import SHAPES
from .triton_harness import cpu_arithmetic, device_guard  # noqa: F401

assert os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

#: Of a commit; the others by night.
EVERY_COMMIT = 5


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=str(i), marks=() if i < EVERY_COMMIT else pytest.mark.nightly)
        for i, shape in enumerate(SHAPES)
    ],
)
@pytest.mark.parametrize("check", cases.CHECKS)
def test_values(check, shape):
    cases.CHECKS[check](launch, cases.given(shape))


def test_parts_are_added():
    cases.parts_are_added(launch)


@pytest.mark.parametrize("n", [2, 4])
def test_far_logits(n):
    cases.far_logits(launch, n)
