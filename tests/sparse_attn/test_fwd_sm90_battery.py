"""The forward's promises in the simulator: what may surround a query row and not change a byte.

Timing and dispatch order, the chunk it comes in, its batch and head, padding, what other rows,
heads and masked keys hold, which blocks its neighbours need, and how the mask is written down.
"""

from __future__ import annotations

import pytest

import ptxsim
from ptxsim.skips import requires_sim
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

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_schedules test_batches test_heads test_neighbours test_padding "
    "test_other_rows_of_the_mask"
)
pytestmark = [
    requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]


def wide(*every: int):
    """Head sizes: D = 64, those of ``every``, and the wider ones by night."""
    others = [d for d in (192, 256) if d not in every]
    return [64, *every, *(pytest.param(d, marks=pytest.mark.nightly) for d in others)]


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
        ("causal", (1, 2, 1, 192), (383, 300)),
        ("random", (1, 2, 2, 256), (300, 512)),
    ],
)
def test_schedules(name, shape, lengths):
    schedules(name, shape, lengths)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "width"),
    [
        *(("window", 64), ("bits", 64), ("bits", 256)),
        *(pytest.param("window", d, marks=pytest.mark.nightly) for d in (192, 256)),
    ],
)
def test_chunked_prefill(name, width):
    chunked_prefill(name, width)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("width", [128, *wide(256)[1:]])
def test_one_row_at_a_time(width):
    one_row_at_a_time(width)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("width", wide(192))
def test_batches(width):
    batches(width)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("width", wide(256))
def test_heads(width):
    heads(width)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "width"), [(n, 64) for n in ("window", "document", "random")] + [("random", 256)]
)
def test_neighbours(name, width):
    among_neighbours(name, width)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("width", wide(192))
def test_padding(width):
    padding(width)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("width", wide(256))
def test_other_rows_of_the_mask(width):
    other_rows_of_the_mask(width)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_forms(head_dim):
    forms(head_dim)


def test_zero_has_one_sign():
    zero_has_one_sign()
