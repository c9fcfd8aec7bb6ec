"""The sm_90 code of the Triton mhc, run in ptxsim: values, rows, cuts, sizes and addresses."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

from cute_kernels.mhc.triton import launch
from cute_kernels.mhc.triton.plan import Sizes
from ptxsim.skips import requires_core

from ..contract import same_bytes
from . import launcher_cases as cases
from . import triton_rows as rows
from .launcher_cases import BF16, FP32, Shape
from .triton_harness import KERNELS, copy_of, simulated

pytestmark = [pytest.mark.sim, requires_core, pytest.mark.simulates("mhc.triton")]

SHAPES = (
    Shape(37, 530, 4, "cn", BF16),
    Shape(9, 33, 2, "nc", FP32),
    Shape(70, 600, 4, "nc", FP32, "bf16x3", norm_weight=False),
    Shape(66, 1040, 2, "cn", BF16, bias=False),
)
#: The checks of tiles with tails; two chunks of channels for the projection alone.
BY_DAY = [(name, SHAPES[1]) for name in cases.TRITON if "gates" not in name]
BY_DAY += [("projection", SHAPES[0]), ("combine", SHAPES[0])]
REST = [pair for pair in itertools.product(cases.TRITON, SHAPES) if pair not in BY_DAY]


def by_night(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("check", "shape"), [*BY_DAY, *(by_night(*pair) for pair in REST)], ids=str
)
def test_values(check, shape):
    with simulated():
        cases.TRITON[check](launch, cases.given(shape))


def test_few_rows_show_in_none():
    with simulated():
        rows.few_rows(launch, Shape(0, 40, 2, "cn", BF16))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape",
    [
        Shape(0, 40, 2, "cn", BF16),
        Shape(0, 300, 4, "nc", FP32, "bf16x3", norm_weight=False),
        Shape(0, 530, 4, "cn", BF16),
        Shape(0, 520, 2, "nc", BF16, "bf16x3"),
    ],
    ids=str,
)
def test_no_row_shows(shape):
    with simulated():
        rows.no_row_shows(launch, shape, rows=33)


@pytest.mark.parametrize(
    ("n", "layout"), [(2, "cn"), by_night(4, "nc"), by_night(2, "nc"), by_night(4, "cn")]
)
def test_no_cut_shows(n, layout):
    g = cases.given(Shape(2 * 1024 + 77, 5, n, layout, BF16))
    with simulated() as kernels:
        rows.no_cut_shows(launch, g, 1024)
    assert {kernel.name for kernel in kernels} < set(sum(KERNELS.values(), ()))


@pytest.mark.parametrize(
    "shape", [Shape(9, 33, 2, "nc", BF16), by_night(Shape(37, 70, 4, "cn", FP32))]
)
def test_no_size_shows(tmp_path, shape):
    """Warps among them: what a thread holds decides no order."""
    other = copy_of(tmp_path)
    other.SIZES = Sizes((8, 32), 8, 2, 16, 2, 4)
    out = []
    for module in (launch, other):
        with simulated(module):
            out.append(cases.results(module, cases.given(shape)))
    assert len(out[0]) > 15
    cases.equal(*out)


@pytest.mark.parametrize(
    ("n", "layout", "dtype"),
    [
        (2, "nc", BF16),
        *(by_night(4, layout, dtype) for layout in ("cn", "nc") for dtype in (BF16, FP32)),
    ],
)
def test_no_address_shows(n, layout, dtype):
    """Other loads are compiled for what is not aligned; the bytes are the same."""
    g = cases.given(Shape(19, 128, n, layout, dtype))
    with simulated() as kernels:
        want = cases.results(launch, g)
        count = len(kernels)
        got = cases.results(launch, cases.moved(g))
    assert all(a.hash != b.hash for a, b in zip(kernels[:2], kernels[count:], strict=False))
    assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))
