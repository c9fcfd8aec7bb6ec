"""The forward's promises in the simulator: what may surround a query row and not change a byte.

Timing and dispatch order, the chunk it comes in, its batch and head, padding, what other rows,
heads and masked keys hold, which blocks its neighbours need, and how the mask is written down.
"""

from __future__ import annotations

import pytest

from tests import ptxsim
from tests.ptxsim.available import requires_sim
from tests.sparse_attn.fwd_battery import (
    among_neighbours,
    batches,
    chunked_prefill,
    forms,
    heads,
    one_row_at_a_time,
    other_rows_of_the_mask,
    padding,
    schedules,
    zero_has_one_sign,
)

pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("sparse_attn")]


@pytest.fixture
def hopper():
    """The truncating adder of the card, as far as it is known."""
    with ptxsim.options(wgmma_math="hopper"):
        yield


@pytest.mark.parametrize(
    ("name", "shape", "lengths"),
    [
        ("full", (1, 2, 2, 96), (200, 383)),
        ("window", (1, 4, 1, 64), (383, 383)),
        ("random", (2, 2, 1, 128), (300, 512)),
    ],
)
def test_schedules(name, shape, lengths):
    schedules(name, shape, lengths)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["window", "bits"])
def test_chunked_prefill(name):
    chunked_prefill(name)


@pytest.mark.usefixtures("hopper")
def test_one_row_at_a_time():
    one_row_at_a_time()


@pytest.mark.usefixtures("hopper")
def test_batches():
    batches()


@pytest.mark.usefixtures("hopper")
def test_heads():
    heads()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["window", "document", "random"])
def test_neighbours(name):
    among_neighbours(name)


@pytest.mark.usefixtures("hopper")
def test_padding():
    padding()


@pytest.mark.usefixtures("hopper")
def test_other_rows_of_the_mask():
    other_rows_of_the_mask()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forms(head_dim):
    forms(head_dim)


def test_zero_has_one_sign():
    zero_has_one_sign()
