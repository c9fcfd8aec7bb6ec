"""The SM90 kernels of mhc in the simulator: values, and the bytes of two ways to one result."""

from __future__ import annotations

import itertools

import pytest

from ptxsim.skips import requires_sim
from tests.mhc import sm90_cases as cases
from tests.mhc.simulated import simulated
from tests.mhc.triton_cases import BF16, FP32, Shape, given
from tests.old_memory import old_memory

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_values test_far_logits"
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("mhc", often=EACH_COMMIT)]

#: Tails of tokens and of vectors; two chunks of channels; rows that are copied.
WIDE = Shape(37, 530, 4, "cn", BF16)
NARROW = Shape(19, 71, 2, "nc", FP32, "bf16x3", norm_weight=False, bias=False)
#: Two chunks of tokens.
LONG = Shape(1043, 16, 2, "cn", BF16)


def every():
    """Every kind of row, of sizes that differ: for the nightly run."""
    kinds = itertools.product((2, 4), ("cn", "nc"), (BF16, FP32), ("bf16x2", "bf16x3"), (0, 1))
    for i, (n, layout, dtype, precision, odd) in enumerate(kinds):
        chunk = (2048 if precision == "bf16x2" else 1024) // n
        # Less than a step, several, more than a chunk; a multiple of every unit, or of none.
        c = (24, 104, chunk + 72)[i % 3] + odd
        m = (1, 13, 16, 35, 70)[i % 5]
        yield Shape(m, c, n, layout, dtype, precision, i % 4 < 2, i % 3 > 0)


def check(name: str, shape: Shape) -> None:
    g = given(shape)
    with simulated(), old_memory():
        cases.CHECKS[name](g)


@pytest.mark.parametrize("shape", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", cases.CHECKS)
def test_values(name, shape):
    check(name, shape)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", list(every()), ids=str)
@pytest.mark.parametrize("name", cases.CHECKS)
def test_values_of_every_kind(name, shape):
    check(name, shape)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [WIDE, NARROW, *every()], ids=str)
def test_every_kind_of_upstream(shape):
    g = given(shape)
    with simulated(), old_memory():
        cases.projection_backward(g, cases.KINDS)


@pytest.mark.parametrize("name", ["reduce", "gates_backward", "projection_backward"])
def test_two_chunks_of_tokens(name):
    check(name, LONG)


def test_far_logits():
    """No row or column is lost where logits differ by more than fp32 has exponents."""
    with simulated(), old_memory():
        cases.far_logits()
