"""Defects put into the SM90 kernel on purpose: the simulator or the oracle must notice each one."""

from __future__ import annotations

import pytest

import ptxsim
from cute_kernels.moe import launch
from ptxsim.skips import requires_sim
from tests import contract
from tests.kernels import edited
from tests.kernels.ring_defects import DEFECTS, LIMITS, SETTINGS

from . import cases
from .simulated import grouped_kernel, simulated
from .sm90_cases import chain, problem

pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("moe")]

BF16 = cases.BF16
#: Sums that round: exact ones hide a change of order.
ALSO = {"wgmma_math": "fma"}


def survives(kernel) -> bool:
    """Whether every run under every setting is right, without a warning."""
    for load, n, k in (("uneven", 136, 600), ("few", 40, 56)):
        x, weight, offsets, bias = problem(load, n, k, bias=True)
        want = chain(x, weight, offsets, bias)
        for options in SETTINGS:
            try:
                with simulated(ctas=6, kernel=kernel, **options, **LIMITS):
                    got = launch.grouped_gemm(x, weight, offsets, bias)
            except ptxsim.PtxsimError:
                return False
            report = ptxsim.report()
            if not contract.same_bytes(got, want) or report["fence_warnings"]["count"]:
                return False
    return True


EDITS = {
    "tail_of_the_next_expert": ("if row < tile.rows:", "if tile.row0 + row < mD.shape[0]:"),
    "tail_by_tma": ("if row + 64 <= tile.rows:", "if row < tile.rows:"),
    "pairs_beyond_n": ("if column < mD.shape[1]:", "if column >= 0:"),
    "rows_from_the_start": ("tma.shifted(a, (tile.row0, 0))", "a"),
    "weight_of_expert_0": ("tma.sliced(b, tile.expert)", "tma.sliced(b, 0)"),
    "bias_of_expert_0": ("(tile.expert,))", "(0,))"),
    "pairs_at_the_start": ("(tile.row0 + row, column)", "(row, column)"),
    "stored_at_the_start": ("tma.shifted(d, (tile.row0, 0))", "d"),
    "one_unit_too_far": ("& (index >= end)", "& (index > end)"),
    "tile_of_the_neighbour": (
        "n = n * self.config.cluster_n + rank[1]",
        "n = n * self.config.cluster_n",
    ),
}


def test_the_kernel_survives():
    assert survives(grouped_kernel)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_the_ring_is_killed(monkeypatch, name):
    from cute_kernels.moe import kernel_grouped_sm90

    chosen = launch.grouped_config(BF16, "k", True, 64)
    with monkeypatch.context() as patch:
        DEFECTS[name](patch, kernel_grouped_sm90)
        mutant = kernel_grouped_sm90.build(chosen, compile=ptxsim.compile)
    assert not survives(lambda *args: mutant)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_killed(tmp_path, name):
    module = edited.changed(tmp_path, "moe.kernel_grouped_sm90", *EDITS[name])
    chosen = launch.grouped_config(BF16, "k", True, 64)
    mutant = module.build(chosen, compile=ptxsim.compile)
    assert not survives(lambda *args: mutant)
