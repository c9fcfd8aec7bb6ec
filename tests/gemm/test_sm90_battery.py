"""The contract battery through the SM90 kernels, and schedules that may not change a byte."""

from __future__ import annotations

import pytest
import torch

import ptxsim
from cute_kernels.gemm import launch, tiles
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests import contract
from tests.contract import RowOp, SumOp
from tests.gemm.simulated import WIDE, gemm_kernel, simulated
from tests.gemm.sm90_defects import k_steps_swapped
from tests.kernels.operands import operand

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_battery test_rows_across_a_change_of_tile test_a_tile_with_another_order_is_killed "
    "test_splits test_splits_of_negative_zero test_schedules test_column_sum_schedules"
)
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("gemm", often=EACH_COMMIT)]

N, K, ROWS, SEED = 72, 88, 150, 3
BF16 = torch.bfloat16


def forward(major: str, bias: bool) -> RowOp:
    weight = operand(N, K, BF16, major, seed=1)
    b = torch.randn(N, generator=torch.Generator().manual_seed(2)).bfloat16() if bias else None

    def run(rows):
        with simulated(wgmma_math="hopper"):
            return launch.gemm(rows, weight, b, None)

    return RowOp(f"linear, weight {major}", run, K, BF16)


def partials() -> RowOp:
    """Product with fp32 outputs: an order change shows in 43% of them, in 0.003% of bf16 ones."""
    weight = operand(N, K, BF16, "k", seed=1)

    def run(rows):
        state = torch.zeros(len(rows), N)
        with simulated(wgmma_math="hopper"):
            return launch.gemm(rows, weight, None, state)

    return RowOp("linear, fp32 partials", run, K, BF16)


def weight_gradient(tokens: int) -> SumOp:
    dy, x = operand(tokens, 24, BF16, "k", seed=4), operand(tokens, 40, BF16, "k", seed=5)

    def run(start, pieces):
        state = start.clone()
        with simulated():
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


#: N of a product with a whole tile and a part of one.
ACROSS = 136
NARROW = tiles.Dense(128)


def across_tiles(kernel=None) -> RowOp:
    """Product with fp32 outputs whose number of rows chooses the tile."""
    weight = operand(ACROSS, K, BF16, "k", seed=1)

    def run(rows):
        state = torch.zeros(len(rows), ACROSS)
        tile = NARROW if len(rows) <= 256 else WIDE
        with simulated(kernel=kernel, tile=tile, wgmma_math="hopper"):
            return launch.gemm(rows, weight, None, state)

    return RowOp("linear across a change of tile", run, K, BF16)


def test_rows_across_a_change_of_tile():
    """The narrow tile's bytes of a row are the wide one's, whichever computed the whole batch."""
    sizes = [1, 63, 128, 129, 255, 256, 257, 258, 300]
    assert contract.check_population(across_tiles(), 300, SEED, sizes) == len(sizes)
    assert contract.check_population(across_tiles(), 256, SEED, sizes[:6]) == 6


def narrow_tile_in_another_order(monkeypatch):
    """The narrow kernel is compiled with two k16 groups of each block swapped."""
    from cute_kernels.gemm import kernel_sm90

    with monkeypatch.context() as patch:
        k_steps_swapped(patch, kernel_sm90)
        kernel_config = launch.dense_config(BF16, "k", "k", "accumulate", NARROW)
        swapped = kernel_sm90.build(kernel_config, compile=ptxsim.compile)
    return lambda *chosen: swapped if NARROW in chosen else gemm_kernel(*chosen)


def test_a_tile_with_another_order_is_killed(monkeypatch):
    target = across_tiles(narrow_tile_in_another_order(monkeypatch))
    with pytest.raises(contract.ContractViolation, match="T1 population"):
        contract.check_population(target, 300, SEED, [256])
    assert contract.check_population(target, 300, SEED, [257]) == 1  # the wide tile is intact


@pytest.mark.parametrize("tokens", [200, 145])
def test_splits(tokens):
    with ptxsim.options(wgmma_math="hopper"):
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


@pytest.mark.parametrize("epilogue", ["plain", "bias", "accumulate"])
def test_schedules(epilogue):
    """schedule_invariant: several tiles under every mode of the simulator, and every grid size."""
    a, b = operand(300, 200, BF16, "k", 7), operand(520, 200, BF16, "mn", 8)
    bias = torch.randn(520).bfloat16() if epilogue == "bias" else None
    start = torch.randn(300, 520) if epilogue == "accumulate" else None

    def run(clusters=3):
        with simulated(clusters=clusters):
            return launch.gemm(a, b, bias, None if start is None else start.clone())

    want = modes.run_modes(run)["default"]
    for clusters in (1, 2, 66):
        assert contract.same_bytes(run(clusters), want)


def test_schedules_of_the_narrow_tile():
    """Its ring has more stages: every mode again, with more K blocks than stages."""
    a, b = operand(300, 520, BF16, "k", 7), operand(264, 520, BF16, "mn", 8)
    start = torch.randn(300, 264)

    def run(tile=NARROW):
        with simulated(tile=tile):
            return launch.gemm(a, b, None, start.clone())

    want = modes.run_modes(run)["default"]
    assert contract.same_bytes(run(WIDE), want)


def test_splits_under_schedules():
    """Every cut of the stream, in every mode: the state after all pieces is one shot's."""
    target = weight_gradient(145)
    cuts = contract.splits(145, 16, SEED)
    whole = modes.run_modes(lambda: target.run(target.start, [slice(0, 145)]), modes.QUICK_MODES)
    for label in ("8 pieces", "ragged 0", "every block"):
        results = modes.run_modes(
            lambda label=label: target.run(target.start, cuts[label]), modes.QUICK_MODES
        )
        assert all(contract.same_bytes(results[name], whole[name]) for name in whole), label


def test_column_sum_schedules():
    x = torch.randn(300, 200).bfloat16()

    def run():
        with simulated():
            return launch.column_sum(x)

    want = modes.run_modes(run, modes.QUICK_MODES)["default"]
    with simulated():
        assert contract.same_bytes(launch.column_sum(x.mT.contiguous().mT), want)
        assert contract.same_bytes(launch.column_sum(torch.cat([x, x], 1)[:, :200]), want)
