"""mhc's SM90 kernels in the simulator: values, orders of sums, and what shows in no byte."""

from __future__ import annotations

import itertools

import pytest

from cute_kernels.mhc import launch as planners
from cute_kernels.mhc.config import ProjectBackwardWgmmaConfig, wgmma_configs
from ptxsim.modes import MODES, run_modes
from ptxsim.skips import requires_sim
from tests.contract import same_bytes
from tests.mhc import launcher_cases as cases
from tests.mhc import sm90_orders as orders
from tests.mhc import triton_rows as rows
from tests.mhc.launcher_cases import BF16, FP32, Shape, given
from tests.mhc.simulated import launchers as launch
from tests.mhc.simulated import simulated
from tests.old_memory import old_memory

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_values test_orders test_bytes_of_the_other"
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


def check_values(name: str, shape: Shape) -> None:
    g = given(shape)
    with simulated(), old_memory():
        cases.CHECKS[name](launch, g)


@pytest.mark.parametrize("shape", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", cases.CHECKS)
def test_values(name, shape):
    check_values(name, shape)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", list(every()), ids=str)
@pytest.mark.parametrize("name", cases.CHECKS)
def test_values_of_every_kind(name, shape):
    check_values(name, shape)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [WIDE, NARROW, *every()], ids=str)
def test_every_kind_of_upstream(shape):
    g = given(shape)
    with simulated(), old_memory():
        cases.projection_backward(launch, g, cases.KINDS)


@pytest.mark.parametrize("name", ["reduce", "gates_backward", "projection_backward"])
def test_two_chunks_of_tokens(name):
    check_values(name, LONG)


def test_far_logits():
    """No row or column is lost where logits differ by more than fp32 has exponents."""
    with simulated(), old_memory():
        cases.far_logits(launch)


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


def test_no_address_shows():
    """Rows that are not aligned are copied: the same bytes."""
    g = given(Shape(19, 584, 2, "cn", BF16))
    moved = cases.moved(g)
    assert moved.x.data_ptr() % 16 and not g.x.data_ptr() % 16
    with simulated(), old_memory():
        got, want = cases.results(launch, moved), cases.results(launch, g)
    assert len(got) > 20
    assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))


# ---- the projection's backward on TMA and WGMMA --------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "make"), [("res and out", given), by_night("nothing", orders.cancelling)]
)
def test_bytes_of_the_other(kind, make):
    """Dtypes and layouts that TMA does not take have the other kernel: one contract, one order."""
    orders.bytes_of_the_other(make(orders.TILES), kind)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape", [orders.TILES, orders.TILES._replace(n=2, c=44), orders.TWO_CHUNKS], ids=str
)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_bytes_of_every_kind(kind, shape):
    for math in orders.MATHS:
        orders.bytes_of_the_other(given(shape), kind, math)


@pytest.mark.parametrize("shape", [orders.TILES, by_night(orders.TWO_CHUNKS)], ids=str)
@pytest.mark.parametrize("kinds", [cases.KINDS[:2], by_night(cases.KINDS)], ids=len)
def test_values_by_wgmma(shape, kinds):
    with simulated(), old_memory():
        cases.projection_backward(launch, given(shape), kinds)


def test_no_schedule_shows_by_wgmma():
    orders.no_schedule_shows("projected_back", given(orders.TILES), (1, 7))


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [orders.TILES, orders.TWO_CHUNKS], ids=str)
def test_no_schedule_of_any_kind_shows_by_wgmma(shape):
    orders.no_schedule_shows("projected_back", given(shape), modes=MODES)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "fields"), [("nothing", ("", False)), ("res and out", ("res", True))]
)
def test_no_timing_shows_in_any_configuration(monkeypatch, kind, fields):
    g = given(orders.TWO_CHUNKS._replace(n=4, m=300))
    for chosen in wgmma_configs(4, *fields):
        monkeypatch.setattr(planners, "project_backward_wgmma_config", lambda *of, one=chosen: one)

        def run():
            with simulated(2, orders.with_kernel(ProjectBackwardWgmmaConfig)), old_memory():
                return orders.gradients(g, kind)

        run_modes(run, MODES)


def test_the_choice_fills_rounds():
    """The configurations that an H200 was fastest with: (slab, stages, CTAs an SM)."""
    best = {
        (2048, 4096): ((128, 3, 2), (128, 2, 2)),
        (4096, 2560): ((64, 2, 5), (64, 2, 3)),
        (8192, 5120): ((64, 2, 5), (128, 2, 2)),
        (8192, 7168): ((128, 2, 3), (128, 2, 2)),
        (32768, 4096): ((128, 2, 3), (128, 2, 2)),
    }
    for (m, c), expected in best.items():
        for fields, want in zip((("", False), ("res", True)), expected, strict=True):
            one = planners.project_backward_wgmma_config(4, *fields, m // 1024, 4 * c, 132)
            assert (one.slab, one.stages, one.blocks) == want, (m, c, fields)


def test_every_configuration_is_catalogued():
    """Every configuration that a launch may choose, of every upstream, is certified."""
    entries = {entry.kernel.identity for entry in planners.catalogue()}
    for n, dy, d_out in itertools.product((2, 4), ("", "add", "res"), (False, True)):
        for chosen in wgmma_configs(n, dy, d_out):
            assert planners.entry(chosen).identity in entries
