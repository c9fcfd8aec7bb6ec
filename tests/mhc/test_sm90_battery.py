"""No row, cut, schedule or address shows in the bytes of mhc's SM90 kernels; sums have orders."""

from __future__ import annotations

import pytest
import torch

from ptxsim.modes import MODES
from ptxsim.skips import requires_sim
from tests.contract import same_bytes
from tests.mhc import sm90_orders as orders
from tests.mhc import triton_rows as rows
from tests.mhc.simulated import launchers as launch
from tests.mhc.simulated import simulated
from tests.mhc.sm90_cases import upstream_of
from tests.mhc.triton_cases import BF16, FORMS, FP32, Expand, Given, Parts, Shape, given, shifted
from tests.old_memory import old_memory

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_orders test_no_cut_shows"
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("mhc", often=EACH_COMMIT)]


def by_night(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


#: Two chunks of channels, a tail of tokens, and of vectors no multiple of a warp's.
WIDE = Shape(37, 530, 4, "cn", BF16)
KINDS = [
    Shape(0, 40, 2, "cn", BF16),
    Shape(0, 300, 4, "nc", FP32, "bf16x3", norm_weight=False),
    Shape(0, 530, 4, "cn", BF16),
    Shape(0, 517, 2, "nc", BF16, "bf16x3", bias=False),
]


@pytest.mark.parametrize("shape", [WIDE, by_night(WIDE._replace(n=2, c=1300))], ids=str)
@pytest.mark.parametrize("order", orders.ORDERS)
def test_orders(order, shape):
    g = given(shape)
    with simulated(), old_memory():
        orders.ORDERS[order](g)


@pytest.mark.nightly
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("order", ["sums_of_reduce", "sums_of_bias", "chunks_of_tokens"])
def test_orders_of_the_other_layout(order, n):
    g = given(Shape(11, 1304, n, "nc", BF16))
    with simulated(), old_memory():
        orders.ORDERS[order](g)


def test_few_rows_show_in_none():
    with simulated():
        rows.few_rows(launch, KINDS[0])


@pytest.mark.nightly
@pytest.mark.parametrize("shape", KINDS, ids=str)
def test_no_row_shows(shape):
    with simulated():
        rows.no_row_shows(launch, shape, rows=33)


@pytest.mark.parametrize(
    ("n", "layout"), [(2, "cn"), by_night(4, "nc"), by_night(2, "nc"), by_night(4, "cn")]
)
def test_no_cut_shows(n, layout):
    """Of the stream of tokens, at multiples of 1024."""
    g = given(Shape(2 * 1024 + 77, 5, n, layout, BF16))
    with simulated():
        rows.no_cut_shows(launch, g, 1024)


#: By day, of `orders.KERNELS`: one that reads streams, and one that adds over rows.
BY_DAY = ("projected_back", "reduced")


@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else by_night(name) for name in orders.KERNELS]
)
def test_no_schedule_shows(name):
    orders.no_schedule_shows(name, given(WIDE))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape",
    [
        WIDE._replace(layout="nc", c=536),
        Shape(35, 71, 2, "nc", FP32, "bf16x3"),
        Shape(35, 1032, 2, "cn", FP32),
        Shape(1025, 24, 4, "cn", BF16),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", orders.KERNELS)
def test_no_schedule_of_any_kind_shows(name, shape):
    orders.no_schedule_shows(name, given(shape), modes=MODES)


def results(g: Given) -> list[torch.Tensor]:
    """Results of every launcher of rows."""
    n, streams = g.shape.n, g.streams
    out = [*launch.project(g.x, g.mapping, streams, g.expand)]
    out += launch.combine(g.x, streams, g.pre, g.expand)
    out += launch.project(g.x, g.mapping, streams)[:2]
    out += [launch.combine(g.x, streams, g.pre, None)[1]]
    out += [launch.combine(g.x, streams, None, g.expand)[0]]
    both = upstream_of(g, "res and out")
    by = Expand(g.f, g.bias, g.post)
    out += launch.reduce_channels(g.x, streams, both._replace(d_out=None, pre=None), by, True)
    out += launch.reduce_channels(g.x, streams, both)
    of = (g.x, g.h, g.ms, g.mapping, streams, both)
    out += launch.project_backward(*of, (True, True))
    coefficients_out = launch.coefficients_backward(
        g.h, g.ms, g.gates, n, FORMS[1], g.pre, g.post, g.res
    )
    out += [*launch.gate(g.h, g.ms, g.gates, n), *coefficients_out]
    return [t.values if isinstance(t, Parts) else t for t in out if t is not None]


def test_no_address_shows():
    """Rows that are not aligned are copied: the same bytes."""
    g = given(Shape(19, 584, 2, "cn", BF16))
    moved = g._replace(
        **{name: shifted(getattr(g, name)) for name in ("x", "dy", "f", "d_out", "bias", "ms")},
        **{name: getattr(g, name).contiguous() for name in ("h", "pre", "post", "res")},
        mapping=g.mapping._replace(
            phi=shifted(g.mapping.phi), norm_weight=shifted(g.mapping.norm_weight)
        ),
    )
    assert moved.x.data_ptr() % 16 and not g.x.data_ptr() % 16
    with simulated(), old_memory():
        got, want = results(moved), results(g)
    assert len(got) > 20
    assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))
