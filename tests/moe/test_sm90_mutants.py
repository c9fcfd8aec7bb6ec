"""Defects put into the SM90 kernels on purpose: the simulator or the oracle must notice each."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

import ptxsim
from cute_kernels.moe import tiles
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests.contract import same_bytes
from tests.kernels import edited
from tests.kernels.ring_defects import DEFECTS as RING_DEFECTS
from tests.kernels.ring_defects import LIMITS, SETTINGS, pipeline

from . import cases
from .simulated import builder
from .sm90_cases import BF16, PRODUCTS, far_apart

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_a_defect_is_killed test_an_edit_is_killed"
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("moe", often=EACH_COMMIT)]

#: Of few rows: one warpgroup, and two of them.
ONE, TWO = tiles.Few(8, 64, 128), tiles.Few(32, 128, 64)
RACES = modes.RACES[0].options
#: Kernel -> (product, (load, N, K), options, settings) of runs that show its defects.
RUNS = {
    "grouped": [
        ("many", ("uneven", 136, 600), {"ctas": 6}, SETTINGS),
        ("many", ("few", 40, 56), {"ctas": 6}, SETTINGS),
    ],
    "grouped_few": [
        ("few", ("uneven", 136, 600), {"few": ONE}, (*SETTINGS, RACES)),
        ("few", ("few", 41, 2200), {"few": ONE}, (*SETTINGS, RACES)),
    ],
    "grouped_dw": [("dw", ("uneven", 136, 136), {}, (*SETTINGS, RACES))],
    "grouped_tree": [
        (name, shape, {}, SETTINGS)
        for shape in (("uneven", 136, 1100), ("few", 40, 56))
        for name in ("tree", "leaves")
    ],
}


def survives(entry: str, kernel: Callable, **more) -> bool:
    """Whether every run under every setting is right, without a warning or a race."""
    for name, shape, options, settings in RUNS[entry]:
        product = PRODUCTS[name]
        operands = product.operands(*shape)
        want, mutants = product.want(*operands), {entry: kernel}
        for setting in settings:
            try:
                chosen = options | more | setting | LIMITS
                got = product.run(operands, kernels=mutants, **chosen)
            except ptxsim.PtxsimError:
                return False
            report = ptxsim.report()
            if not same_bytes(got, want) or report["fence_warnings"]["count"] or report["races"]:
                return False
    return True


def table_without_a_barrier(monkeypatch, module):
    monkeypatch.setattr(pipeline(), "await_barriers", lambda cluster: None)


def a_leaf_goes_on(monkeypatch, module):
    monkeypatch.setattr(module.Frame, "chain", module.Frame.add_chain)


DEFECTS = [(entry, defect) for entry in RUNS for defect in RING_DEFECTS.values()]
DEFECTS.remove(("grouped_few", RING_DEFECTS["no_proxy_fence"]))
DEFECTS += [("grouped_few", table_without_a_barrier), ("grouped_tree", a_leaf_goes_on)]

BARRIER = (
    "        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=CONSUMERS * mma.WARPGROUP)\n"
)
#: Kernel -> name -> (old text, new text).
EDITS = {
    "grouped": {
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
    },
    "grouped_few": {
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
    },
    "grouped_dw": {
        "tail_of_the_next_expert": (
            "        self.clear(cta.sA, read.index, tail, groups)\n"
            "        self.clear(cta.sB, read.index, tail, groups)\n",
            "",
        ),
        "no_barrier_behind_the_zeros": (BARRIER, ""),
        "no_fence_behind_the_zeros": (
            '        cute.arch.fence_proxy("async.shared", space="cta")\n' + BARRIER,
            BARRIER,
        ),
        "one_token_kept": ("cutlass.range(tail, groups", "cutlass.range(tail + 1, groups"),
        "one_token_lost": ("cutlass.range(tail, groups", "cutlass.range(tail - 1, groups"),
        "tail_dropped": ("if tail > 0:", "if tail > 16:"),
        "tokens_from_the_start": ("tile, tile.row0, tile.rows)", "tile, 0, tile.rows)"),
        "start_of_expert_0": ("(tile.expert,))", "(0,))"),
        "tile_of_the_neighbour": (
            "m * self.config.cluster_m + rank[0]",
            "m * self.config.cluster_m",
        ),
        "stored_to_expert_0": ("tma.sliced(consumer.d, tile.expert)", "tma.sliced(consumer.d, 0)"),
    },
    "grouped_tree": {
        "leaves_descending": (
            "return leaf * args.length,",
            "return (cute.ceil_div(k, args.length) - 1 - leaf) * args.length,",
        ),
        "leaf_into_the_next_one": (
            "cutlass.min(args.length, k",
            "cutlass.min(cute.ceil_div(args.length, 64) * 64, k",
        ),
        "leaf_0_stored": ("tma.sliced(consumer.d, leaf)", "tma.sliced(consumer.d, 0)"),
        "pairs_of_leaf_0": ("cutlass.Int64(leaf) *", "cutlass.Int64(0) *"),
    },
}
#: The same of device/work_table.py.
UNIT_EDITS = {
    "an_expert_skipped": ("else middle + 1", "else middle + 2"),
    "the_expert_before": ("table.sEnds[middle] > index", "table.sEnds[middle] >= index"),
    "units_of_rounded_down_rows": ("cute.ceil_div(rows, tile_rows)", "(rows // tile_rows)"),
    "one_lane_short": ("if lane >= 1 << power:", "if lane > 1 << power:"),
    "warps_forgotten": ("before += sWarps[other]", "before += 0"),
    "sums_of_warps_without_a_barrier": ("    cute.arch.sync_threads()\n", ""),
}
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


@pytest.mark.parametrize(
    ("entry", "options"),
    [*((entry, {}) for entry in RUNS), ("grouped_few", {"few": TWO})],
)
def test_the_kernel_survives(entry, options):
    assert survives(entry, builder(entry), **options)


@pytest.mark.parametrize(
    ("entry", "defect"), DEFECTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_defect_is_killed(monkeypatch, entry, defect):
    module = importlib.import_module(f"cute_kernels.moe.kernel_{entry}_sm90")
    defect(monkeypatch, module)
    assert not survives(entry, builder(entry, module))


@pytest.mark.parametrize(("entry", "name"), [(e, name) for e in EDITS for name in EDITS[e]])
def test_an_edit_is_killed(tmp_path, entry, name):
    module = edited.changed(tmp_path, f"moe.kernel_{entry}_sm90", *EDITS[entry][name])
    options = {"few": TWO} if name.startswith("sums_") else {}
    assert not survives(entry, builder(entry, module), **options)


def many_experts(kernel: Callable) -> bool:
    """Whether units of experts that several warps count are found."""
    counts = [2 if expert % 7 == 0 else 0 for expert in range(700)]
    shapes = (sum(counts), 16), (len(counts), 8, 16), (len(counts), 8)
    x, weight, bias = (cases.drawn(*s, seed=i, dtype=BF16) for i, s in enumerate(shapes, 1))
    operands, product = (x, weight, cases.offsets_of(counts), bias), PRODUCTS["few"]
    options = {"few": ONE, "kernels": {"grouped_few": kernel}} | SETTINGS[1] | LIMITS
    try:
        return same_bytes(product.run(operands, **options), product.want(*operands))
    except ptxsim.PtxsimError:
        return False


def test_the_kernel_finds_many_experts():
    assert many_experts(builder("grouped_few"))


@pytest.mark.parametrize("name", UNIT_EDITS)
def test_an_edit_of_units_is_killed(tmp_path, monkeypatch, name):
    from cute_kernels.moe import kernel_grouped_few_sm90 as module

    table = edited.changed(tmp_path, "moe.device.work_table", *UNIT_EDITS[name])
    monkeypatch.setattr(module, "work_table", table)
    kernel = builder("grouped_few", module)
    assert not (survives("grouped_few", kernel) and many_experts(kernel))


@pytest.mark.parametrize("name", NARROW_OFFSETS)
def test_narrow_offsets_are_killed(tmp_path, monkeypatch, name):
    from cute_kernels.moe import kernel_grouped_few_sm90 as module

    path, *text = NARROW_OFFSETS[name]
    changed = edited.changed(tmp_path, path, *text)
    owner, part = (module, "swapped") if name == "bias" else (module.swapped, "copy")
    monkeypatch.setattr(owner, part, changed)
    assert not far_apart("few", builder("grouped_few", module))
