"""The SM90 kernel of grouped products in the simulator: bytes of ck.linear's, schedules, poison."""

from __future__ import annotations

import pytest
import torch

import ptxsim
from cute_kernels.gemm import launch as gemm_launch
from cute_kernels.moe import config, launch
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests import contract
from tests.contract import same_bytes
from tests.oracles import moe as oracle

from ..gemm import simulated as gemm_simulated
from . import cases
from .simulated import simulated
from .sm90_cases import by_content, chain, neighbours, poisoned, problem

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_every_configuration test_bytes_of_linear test_battery test_modes test_ctas test_poison "
    "test_bad_offsets_stay_inside"
)
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("moe", often=EACH_COMMIT)]

BF16 = cases.BF16
DTYPES = {name: dtype for dtype, name in config.DTYPE_NAMES.items()}


def every_configuration():
    """By day bf16, and of wide tiles one layout and epilogue each."""
    for chosen in launch.configs():
        often = chosen.dtype == "bf16" and (
            chosen.tile_n == 64 or (chosen.b_major, chosen.bias) == ("k", chosen.tile_n < 256)
        )
        label = "-".join(map(str, vars(chosen).values()))
        yield pytest.param(chosen, id=label, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize("chosen", list(every_configuration()))
def test_every_configuration(chosen):
    """Loads with every kind of tail, K below a group, odd N, several tiles and K blocks."""
    shapes = [("uneven", 40, 56), ("few", 7, 3), ("tiles", chosen.tile_n + 24, 200)]
    for load, n, k in (*shapes, ("empty ends", 72, 600)):
        x, weight, offsets, bias = problem(
            load, n, k, DTYPES[chosen.dtype], chosen.b_major, chosen.bias
        )
        with simulated(width=chosen.tile_n):
            got = launch.grouped_gemm(x, weight, offsets, bias)
        assert same_bytes(got, chain(x, weight, offsets, bias)), (load, n, k)
        assert ptxsim.report()["fence_warnings"]["count"] == 0


@pytest.mark.parametrize("major", ["k", "mn"])
def test_bytes_of_linear(major):
    """Rows have the bytes of gemm's kernel for its own tile, with the truncating adder."""
    x, weight, offsets, bias = problem("uneven", 136, 88, major=major, bias=True)
    with simulated(width=128, wgmma_math="hopper"):
        got = launch.grouped_gemm(x, weight, offsets, bias)
    for expert, rows in oracle.experts(offsets):
        if rows.start < rows.stop:
            with gemm_simulated.simulated(wgmma_math="hopper"):
                want = gemm_launch.gemm(x[rows], weight[expert], bias[expert], None)
            assert same_bytes(got[rows], want), expert


def test_battery():
    weight = cases.drawn(4, 72, 88, seed=1, dtype=BF16)
    assert contract.check_rows(by_content(weight, wgmma_math="hopper"), 70, 3) > 50


def test_layouts():
    """Weights and rows that TMA cannot address are copied, and keep their bytes."""
    x, weight, offsets, bias = problem("few", 41, 57, bias=True)
    with simulated():
        want = launch.grouped_gemm(x, weight, offsets, bias)
        wide = torch.cat([weight, weight], 2)[:, :, 1:58].copy_(weight)
        for view in (wide, weight.mT.contiguous().mT, weight[:, :, :].clone()):
            assert same_bytes(launch.grouped_gemm(x, view, offsets, bias), want)
        column_major = x.mT.contiguous().mT
        assert same_bytes(launch.grouped_gemm(column_major, weight, offsets, bias), want)
        strided = bias.mT.contiguous().mT
        assert same_bytes(launch.grouped_gemm(x, weight, offsets, strided), want)
    assert same_bytes(want, chain(x, weight, offsets, bias))


@pytest.mark.parametrize("major", ["k", "mn"])
def test_neighbours(major):
    def run(*operands):
        with simulated():
            return launch.grouped_gemm(*operands)

    neighbours(run, major)


def test_modes():
    """Every timing gives the same bytes."""
    x, weight, offsets, bias = problem("uneven", 136, 328, bias=True)

    def run():
        with simulated():
            return launch.grouped_gemm(x, weight, offsets, bias)

    assert same_bytes(
        modes.run_modes(run, modes.QUICK_MODES)["default"], chain(x, weight, offsets, bias)
    )


@pytest.mark.parametrize("ctas", [1, 4, 7, 132])
def test_ctas(ctas):
    x, weight, offsets, _ = problem("uneven", 200, 88)
    with simulated(ctas=ctas, cta_order="random", seed=ctas):
        got = launch.grouped_gemm(x, weight, offsets, None)
    assert same_bytes(got, chain(x, weight, offsets))


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F7F])
def test_poison(bits):
    """Results are written everywhere, and neither rows of no expert nor padding is touched."""
    fill = torch.tensor([bits], dtype=torch.int16).view(BF16)
    x, weight, offsets, _ = problem("uneven", 44, 56)
    offsets = offsets - torch.tensor([0, 0, 0, 0, 0, 9], dtype=torch.int32)
    with poisoned(fill) as memory, simulated():
        got = launch.grouped_gemm(x, weight, offsets, None)
    last = int(offsets[-1])
    assert same_bytes(got[:last], chain(x[:last], weight, offsets))
    untouched = contract.bits(fill)
    assert (contract.bits(memory[0][last:]) == untouched).all()
    assert (contract.bits(memory[0][:, 44:]) == untouched).all()


def test_bad_offsets_stay_inside():
    """The simulator stops accesses outside of tensors."""
    x, weight, _, _ = problem("few", 40, 56)
    for values in ([-5, 3, 1, 9, 2, 4, 2**31 - 1], [7, -(2**31), 8, 8, 8, 8, 100]):
        with simulated():
            launch.grouped_gemm(x, weight, torch.tensor(values, dtype=torch.int32), None)


def test_the_launchers_tile():
    """Whatever width the launcher chooses, bytes are the same."""
    x, weight, offsets, _ = problem("few", 264, 56)
    with simulated(width=None):
        got = launch.grouped_gemm(x, weight, offsets, None)
    assert same_bytes(got, chain(x, weight, offsets))
