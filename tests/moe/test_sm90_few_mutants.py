"""Defects put into the kernel of few rows on purpose: the simulator or the oracle must notice."""

from __future__ import annotations

import functools

import pytest

import ptxsim
from cute_kernels.moe import launch, tiles
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests import contract
from tests.kernels import edited
from tests.kernels.ring_defects import DEFECTS as RING_DEFECTS
from tests.kernels.ring_defects import LIMITS, SETTINGS, pipeline

from . import cases
from .simulated import grouped_few_kernel, simulated
from .sm90_cases import chain, far_apart, problem

pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("moe")]

BF16 = cases.BF16
#: One warpgroup, and two of them.
ONE, TWO = tiles.Few(8, 64, 128), tiles.Few(32, 128, 64)


def survives(kernel, tile: tiles.Few = ONE) -> bool:
    """Whether every run under every setting is right, without a warning."""
    for load, n, k in (("uneven", 136, 600), ("few", 41, 2200)):
        operands = problem(load, n, k, bias=True)
        want = chain(*operands)
        for options in (*SETTINGS, modes.RACES[0].options):
            try:
                with simulated(few=tile, few_kernel=kernel, **options, **LIMITS):
                    got = launch.grouped_gemm(*operands)
            except ptxsim.PtxsimError:
                return False
            report = ptxsim.report()
            if report["fence_warnings"]["count"] or report["races"]:
                return False
            if not contract.same_bytes(got, want):
                return False
    return True


def table_without_a_barrier(monkeypatch, module):
    monkeypatch.setattr(pipeline(), "await_barriers", lambda cluster: None)


DEFECTS = {name: defect for name, defect in RING_DEFECTS.items() if name != "no_proxy_fence"}
DEFECTS["table_without_a_barrier"] = table_without_a_barrier
#: (old text, new text) of the kernel.
EDITS = {
    "tail_of_the_next_expert": ("(row < tile.end_m)", "(row < args.mY.shape[0])"),
    "rows_of_the_tile_before": ("(row >= bounds.first_m)", "(row >= bounds.start_m - 1)"),
    "one_row_short": ("row0 + rows, self.blocks)", "row0 + rows - 1, self.blocks)"),
    "columns_beyond_n": ("(column < args.mY.shape[1])", "(column < args.mY.shape[1] + 8)"),
    "weight_of_expert_0": ("tma.sliced(w, tile.expert)", "tma.sliced(w, 0)"),
    "bias_of_expert_0": ("args.mBias, tile.expert)", "args.mBias, 0)"),
    "one_tile_of_rows": (
        "tiles_m = cute.ceil_div(rows, tile_m)",
        "tiles_m = cutlass.Int32(1)",
    ),
    "rows_from_the_start": ("first_m = row0 +", "first_m ="),
    "the_first_tokens_loaded": ("(tile.bounds.start_m, 0)", "(0, 0)"),
    "sums_overwritten": ("self.sync_consumers()\n        self.store_sums", "self.store_sums"),
    "sums_read_early": ("tidx)\n        self.sync_consumers()\n", "tidx)\n"),
}  # fmt: skip
#: The same of device/work_table.py.
UNIT_EDITS = {
    "an_expert_skipped": ("else middle + 1", "else middle + 2"),
    "the_expert_before": ("table.sEnds[middle] > index", "table.sEnds[middle] >= index"),
    "units_of_rounded_down_rows": ("cute.ceil_div(rows, tile_rows)", "(rows // tile_rows)"),
    "one_lane_short": ("if lane >= 1 << power:", "if lane > 1 << power:"),
    "warps_forgotten": ("before += sWarps[other]", "before += 0"),
    "sums_of_warps_without_a_barrier": ("    cute.arch.sync_threads()\n", ""),
}  # fmt: skip


def many_experts(kernel) -> bool:
    """Whether units of experts that several warps count are found."""
    counts = [2 if expert % 7 == 0 else 0 for expert in range(700)]
    x = cases.drawn(sum(counts), 16, seed=1, dtype=BF16)
    weight = cases.drawn(len(counts), 8, 16, seed=2, dtype=BF16)
    bias = cases.drawn(len(counts), 8, seed=3, dtype=BF16)
    operands = x, weight, cases.offsets_of(counts), bias
    try:
        with simulated(few=ONE, few_kernel=kernel, **SETTINGS[1], **LIMITS):
            got = launch.grouped_gemm(*operands)
    except ptxsim.PtxsimError:
        return False
    return contract.same_bytes(got, chain(*operands))


@pytest.mark.parametrize("tile", [ONE, TWO], ids=str)
def test_the_kernel_survives(tile):
    assert survives(grouped_few_kernel, tile)


def test_the_kernel_finds_many_experts():
    assert many_experts(grouped_few_kernel)


@functools.cache
def configuration(tile: tiles.Few = ONE):
    return launch.grouped_few_config(BF16, "k", True, tile)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_the_ring_is_killed(monkeypatch, name):
    from cute_kernels.moe import kernel_grouped_few_sm90 as module

    with monkeypatch.context() as patch:
        DEFECTS[name](patch, module)
        mutant = module.build(configuration(), compile=ptxsim.compile)
    assert not survives(lambda *args: mutant)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_killed(tmp_path, name):
    tile = TWO if name.startswith("sums_") else ONE
    module = edited.changed(tmp_path, "moe.kernel_grouped_few_sm90", *EDITS[name])
    mutant = module.build(configuration(tile), compile=ptxsim.compile)
    assert not survives(lambda *args: mutant, tile)


@pytest.mark.parametrize("name", UNIT_EDITS)
def test_an_edit_of_units_is_killed(tmp_path, monkeypatch, name):
    from cute_kernels.moe import kernel_grouped_few_sm90 as module

    table = edited.changed(tmp_path, "moe.device.work_table", *UNIT_EDITS[name])
    with monkeypatch.context() as patch:
        patch.setattr(module, "work_table", table)
        mutant = module.build(configuration(), compile=ptxsim.compile)
    assert not (survives(lambda *args: mutant) and many_experts(lambda *args: mutant))


#: Offsets of 32 bits: file, old text, new text.
NARROW_OFFSETS = {
    "results": (
        "dsl.copy",
        "cutlass.Int64(coord[0]) * tensor.stride[0]",
        "cutlass.Int32(coord[0]) * cutlass.Int32(tensor.stride[0])",
    ),
    "bias": (
        "dsl.swapped",
        "cutlass.Int64(bias_row) * mBias.stride[0] + c",
        "cutlass.Int32(bias_row) * cutlass.Int32(mBias.stride[0]) + c",
    ),
}


@pytest.mark.parametrize("name", NARROW_OFFSETS)
def test_narrow_offsets_are_killed(tmp_path, monkeypatch, name):
    from cute_kernels.moe import kernel_grouped_few_sm90 as module

    path, *text = NARROW_OFFSETS[name]
    changed = edited.changed(tmp_path, path, *text)
    with monkeypatch.context() as patch:
        owner, part = (module, "swapped") if name == "bias" else (module.swapped, "copy")
        patch.setattr(owner, part, changed)
        mutant = module.build(configuration(), compile=ptxsim.compile)
    assert not far_apart(lambda *args: mutant)
