"""The sm_90 code of moe's Triton kernels in ptxsim: bytes of gemm's, routing, bad offsets."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

import cute_kernels.moe.triton as package
from cute_kernels.gemm.triton import launch as gemm_launch
from cute_kernels.moe.triton import launch, routing
from ptxsim.skips import requires_core
from tests.oracles import moe as oracle

from .. import triton_harness as harness
from ..triton_copies import copy_of
from . import cases
from .triton_harness import DTYPES, HOPPER, LATE, described, far, simulated

pytestmark = [pytest.mark.sim, requires_core]

GEMM = {"gemm_kernel": ("out_ptr",), "column_sum_kernel": ("out_ptr",)}


class Gemm:
    """gemm's Triton products in the simulator, with the same options."""

    def __init__(self, **options):
        self.options = options

    def _run(self, call):
        with described(), harness.on_the_cpu(), harness.simulated(gemm_launch, GEMM, self.options):
            return call()

    def gemm(self, a, b, bias, accumulator):
        return self._run(lambda: gemm_launch.gemm(a, b, bias, accumulator))

    def column_sum(self, rows):
        return self._run(lambda: gemm_launch.column_sum(rows))


@pytest.mark.parametrize("options", [HOPPER, LATE], ids=["hopper", "late"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_linear(dtype, options):
    with simulated(**options):
        cases.rows_of_linear(launch, Gemm(**options), "uneven", dtype)


def test_more_tiles_than_one():
    with simulated(**HOPPER):
        cases.rows_of_linear(launch, Gemm(**HOPPER), "tiles", cases.BF16, n=136, k=136)


@pytest.mark.parametrize("cap", ["1", "2", "7", "132"])
def test_programs(monkeypatch, cap):
    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", cap)
    with simulated(**HOPPER):
        cases.rows_of_linear(launch, Gemm(**HOPPER), "few", cases.BF16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "check", [cases.pieces, cases.neighbours, cases.layouts], ids=lambda check: check.__name__
)
def test_products(check, dtype):
    with simulated(**HOPPER):
        check(launch, dtype)


def test_sums_of_rows_have_the_lanes_of_sm90():
    """Lane l adds rows l, l + 32, ...; then lanes, ascending: the order of both GPU backends."""
    _, _, offsets, _, dy = cases.operands("uneven", cases.BF16)
    with simulated(**LATE):
        got = launch.grouped_column_sum(dy, offsets)
    for expert, rows in oracle.experts(offsets):
        lanes, total = torch.zeros(32, dy.shape[1]), torch.zeros(dy.shape[1])
        for i, row in enumerate(dy[rows].float()):
            lanes[i % 32] += row
        for lane in lanes:
            total += lane
        assert cases.same_bytes(got[expert], total.to(cases.BF16))


def test_bad_offsets_stay_inside():
    x, weight, _, _, dy = cases.operands("few", cases.FP32)
    with simulated():
        for values in ([-5, 3, 1, 9, 2, 4, 2**31 - 1], [7, -(2**31), 8, 8, 8, 8, 100]):
            cases.inside(launch, x, weight, dy, torch.tensor(values, dtype=torch.int32))


@pytest.mark.parametrize(
    "check",
    [cases.ties, cases.not_numbers, cases.zeros_keep_their_sign],
    ids=lambda check: check.__name__,
)
def test_single(check):
    with simulated(**LATE):
        check(routing)


@pytest.mark.parametrize(
    "check",
    [
        cases.sorted_slots,
        cases.choices,
        cases.weights,
        cases.slot_weights,
        cases.combined,
        cases.without_an_expert,
    ],
    ids=lambda check: check.__name__,
)
def test_drawn_routings(check):
    with simulated(**LATE):
        for seed in range(12):
            check(routing, seed)


@pytest.mark.parametrize(("tokens", "experts"), [(1500, 5), (2100, 700)])
def test_many_slots(tokens, experts):
    """Blocks of slots; with 700 experts several groups of slots a block."""
    with simulated(**LATE):
        cases.many_slots(routing, tokens, experts)


def test_positions_outside_are_not_written():
    """Rows and gradients of positions that are no rows reach nothing."""
    x, order = torch.ones(2, 32), torch.arange(4, dtype=torch.int32)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    positions = torch.tensor([[0, 2**31 - 1], [-5, 3]], dtype=torch.int32)
    with simulated():
        routing.gather(x, offsets, order, positions)
        rows, weights = torch.ones(4, 32), torch.ones(2, 2)
        _, got = routing.combine_backward(x, rows, weights, offsets, order, positions)
    assert got.tolist() == [[32, 0], [0, 32]]


def test_one_binary_for_every_number_of_rows():
    """Neither tokens nor loads select another binary."""
    with simulated() as kernels:
        for load in ("few", "empty ends", "tiles"):
            x, weight, _, _, dy = cases.operands(load, cases.BF16)
            weight = weight[:1].expand(4, -1, -1).contiguous()
            counts = (cases.LOADS[load] + [0] * 4)[:4]
            offsets, rows = cases.offsets_of(counts), sum(counts)
            launch.grouped_gemm(x[:rows], weight, offsets, None)
            launch.grouped_dw(dy[:rows], x[:rows], offsets, None)
        assert len({kernel.hash for kernel in kernels}) == 2


def test_offsets_beyond_int32(tmp_path):
    """Row 2 starts at element 2³¹: operands and results reach it."""
    x, weight, _, _, dy = (t[:3] for t in cases.operands("few", cases.BF16))
    offsets = cases.offsets_of([1, 1, 1])
    order, positions = torch.tensor([[2, 0, 1], [1, 2, 0]], dtype=torch.int32)
    weights = torch.rand(3, 1)
    far_x, far_dy = (far(t, tmp_path / name) for t, name in ((x, "x"), (dy, "dy")))
    with simulated():
        for run in (
            lambda x, dy: launch.grouped_gemm(x, weight, offsets, None),
            lambda x, dy: launch.grouped_dw(dy, x, offsets, None),
            lambda x, dy: launch.grouped_column_sum(dy, offsets),
            lambda x, dy: routing.gather(x, offsets, order, positions[:, None]),
            lambda x, dy: routing.combine(x, None, offsets, positions[None]),
            lambda x, dy: torch.cat(
                routing.combine_backward(x, x, weights, offsets, order, positions[:, None]), 1
            ),
        ):
            assert cases.same_bytes(run(far_x, far_dy), run(x, dy))


def test_narrow_offsets_are_killed(tmp_path):
    """Offsets of 32 bits leave the tensor, or wrap inside it."""
    old = "row_offsets = (tl.cast(row0, tl.int64) + rows)[:, None]"
    mutant = copy_of(package, tmp_path, (old, "row_offsets = (row0 + rows)[:, None]"))
    x, weight = (t[:3] for t in cases.operands("few", cases.BF16)[:2])
    offsets, far_x = cases.offsets_of([1, 1, 1]), far(x, tmp_path / "x")
    with simulated(mutant), pytest.raises((AssertionError, harness.WildAccess)):
        got = mutant.grouped_gemm(far_x, weight, offsets, None)
        assert cases.same_bytes(got, mutant.grouped_gemm(x, weight, offsets, None))
