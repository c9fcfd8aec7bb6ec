"""The contract battery through the SM90 kernels, and schedules that may not change a byte."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.gemm import launch
from tests import contract
from tests.contract import RowOp, SumOp
from tests.gemm.simulated import operand, simulated
from tests.ptxsim.available import requires_sim

pytestmark = [requires_sim, pytest.mark.sim]

N, K, ROWS, SEED = 72, 88, 150, 3
BF16 = torch.bfloat16

#: Timings, orders and residencies; the truncating adder makes any change of order visible.
SCHEDULES = {
    "late": {"async_mode": "late", "wgmma_mode": "late"},
    "refilled early": {
        "async_mode": "now",
        "wgmma_mode": "late",
        "warp_order": "random",
        "seed": 5,
    },
    "random": {
        "async_mode": "random",
        "wgmma_mode": "random",
        "warp_order": "random",
        "cta_order": "random",
        "seed": 9,
    },
    "one cluster at a time": {"resident_ctas": 2, "cta_order": "descending"},
    "one cluster in the grid": {"clusters": 1, "warp_order": "random", "seed": 11},
    "an H200's grid": {"clusters": 66, "resident_ctas": 132, "cta_order": "random"},
    "races watched": {"check_races": 1},
}


def forward(major: str, bias: bool, **options) -> RowOp:
    weight = operand(N, K, BF16, major, seed=1)
    b = torch.randn(N, generator=torch.Generator().manual_seed(2)).bfloat16() if bias else None

    def run(rows):
        with simulated(wgmma_math="hopper", **options):
            return launch.gemm(rows, weight, b, None)

    return RowOp(f"linear, weight {major}", run, K, BF16)


def partials(**options) -> RowOp:
    """fp32 outputs: an order change shows in 43% of them, in 0.003% of bf16 ones."""
    weight = operand(N, K, BF16, "k", seed=1)

    def run(rows):
        state = torch.zeros(len(rows), N)
        with simulated(wgmma_math="hopper", **options):
            return launch.gemm(rows, weight, None, state)

    return RowOp("linear, fp32 partials", run, K, BF16)


def weight_gradient(tokens: int, **options) -> SumOp:
    dy, x = operand(tokens, 24, BF16, "k", seed=4), operand(tokens, 40, BF16, "k", seed=5)

    def run(start, pieces):
        state = start.clone()
        with simulated(wgmma_math="hopper", **options):
            for piece in pieces:
                launch.gemm(dy[piece].mT, x[piece].mT, None, state)
        return state

    start = torch.randn(24, 40, generator=torch.Generator().manual_seed(6))
    return SumOp("dW into main_grad", run, tokens, start)


@pytest.mark.parametrize(
    "make",
    [
        lambda: forward("k", bias=True),
        lambda: forward("mn", bias=False),
        partials,
    ],
    ids=["forward with bias", "dx (weight column-major)", "fp32 partials"],
)
def test_battery(make):
    assert contract.check_rows(make(), ROWS, SEED) > 60


@pytest.mark.parametrize("tokens", [200, 145])
def test_splits(tokens):
    assert contract.check_splits(weight_gradient(tokens), SEED) == 7


def test_splits_of_negative_zero():
    """A whole stream of -0 products on a state of -0: no cut may turn one into +0."""
    dy, x = torch.full((208, 24), -0.0).bfloat16(), torch.ones(208, 40).bfloat16()

    def run(start, pieces):
        state = start.clone()
        with simulated(wgmma_math="fma"):
            for piece in pieces:
                launch.gemm(dy[piece].mT, x[piece].mT, None, state)
        return state

    target = SumOp("dW of -0", run, 208, torch.full((24, 40), -0.0))
    assert contract.check_splits(target, SEED) == 7
    whole = run(target.start, [slice(0, 208)])
    assert contract.same_bytes(whole, target.start)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule):
    """schedule_invariant: several tiles of every epilogue under each timing and residency."""
    options = SCHEDULES[schedule]
    a, b = operand(300, 200, BF16, "k", 7), operand(520, 200, BF16, "mn", 8)
    bias = torch.randn(520).bfloat16()
    start = torch.randn(300, 520)
    results = []
    for chosen in ({}, options):
        with simulated(wgmma_math="hopper", **chosen):
            state = launch.gemm(a, b, None, start.clone())
            results.append([launch.gemm(a, b, None, None), launch.gemm(a, b, bias, None), state])
    for plain, other in zip(*results, strict=True):
        assert contract.same_bytes(plain, other)


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_splits_under_schedules(schedule):
    assert contract.check_splits(weight_gradient(145, **SCHEDULES[schedule]), SEED) == 7


def test_column_sum_schedules():
    x = torch.randn(300, 200).bfloat16()
    with simulated():
        want = launch.column_sum(x)
    for options in ({"warp_order": "random", "seed": 3}, {"resident_ctas": 1}):
        with simulated(**options):
            assert contract.same_bytes(launch.column_sum(x), want)
    with simulated():
        assert contract.same_bytes(launch.column_sum(x.mT.contiguous().mT), want)
        assert contract.same_bytes(launch.column_sum(torch.cat([x, x], 1)[:, :200]), want)
