"""The CPU backend of moe: bytes of ck.linear, written orders, drawn routings, mutants."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from cute_kernels.gemm import cpu as gemm
from cute_kernels.moe import cpu
from tests.anchors import replaced

from . import cases
from .cases import BF16, FP16, FP32


def by_night(*values):
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)


@DTYPES
@pytest.mark.parametrize("load", cases.LOADS)
def test_rows_of_gemm(load, dtype):
    cases.rows_of_linear(cpu, load, dtype, gemm=gemm)
    cases.rows_of_tree(cpu, load, dtype, gemm=gemm)


@pytest.mark.parametrize(("load", "n", "k"), cases.SHAPES)
def test_shapes_of_trees(load, n, k):
    cases.rows_of_tree(cpu, load, BF16, n, k, gemm=gemm)


@DTYPES
@pytest.mark.parametrize("check", cases.PRODUCTS)
def test_products(check, dtype):
    check(cpu, dtype)


@pytest.mark.parametrize("check", [*cases.SINGLE, cases.minus_zeros])
def test_single(check):
    check(cpu)


@pytest.mark.parametrize("first", [0, *by_night(250, 500, 750)])
def test_drawn_routings(first):
    for seed in range(first, first + 250):
        cases.sorted_slots(cpu, seed)
        cases.choices(cpu, seed)
        if seed % 5 == 0:
            cases.weights(cpu, seed)
            cases.slot_weights(cpu, seed)
            dtype = BF16 if seed % 2 else FP32
            cases.combined(cpu, seed // 5, dtype)
            cases.without_an_expert(cpu, seed // 5, dtype)


def draws(check):
    def run(engine):
        for seed in range(60):
            check(engine, seed)

    return run


MUTANTS = {
    "order_by_load": (
        "flat.sort(stable=True)",
        "flat.sort(stable=True, descending=True)",
        draws(cases.sorted_slots),
    ),
    "unstable_order": (
        "ordered, order = flat.sort(stable=True)",
        "ordered, order = flat.flip(0).sort(stable=True); order = len(flat) - 1 - order",
        draws(cases.sorted_slots),
    ),
    "tie_by_highest": (
        "indices = key.sort(dim=-1, descending=True, stable=True).indices",
        "flipped = key.flip(1).sort(dim=-1, descending=True, stable=True).indices\n"
        "    indices = key.shape[1] - 1 - flipped",
        cases.ties,
    ),
    "zeros_apart": ("bits = (value + 0.0)", "bits = value", cases.ties),
    "groups_by_their_best": (
        "if bias is not None and best",
        "if False and best",
        draws(cases.choices),
    ),
    "combine_by_arrival": (
        "place, slots = positions.long().sort(dim=1)",
        "place = positions.long(); slots = torch.arange(k).expand(tokens, k)",
        draws(cases.combined),
    ),
    "lanes_of_torch": ("return halves(lanes, 1)", "return values.sum(1)", draws(cases.combined)),
    "groups_not_stable": (
        "chosen = group.sort(dim=-1, descending=True, stable=True)",
        "chosen = group.sort(dim=-1, descending=True)",
        cases.ties,
    ),
    "combine_from_zero": (
        "added = total + term if slot else term",
        "added = total + term",
        cases.zeros_keep_their_sign,
    ),
    "weights_by_slot": (
        "values = values.gather(1, keys.sort(dim=1, stable=True).indices)",
        "values = values + 0",
        draws(cases.weights),
    ),
    "slot_weights_by_neighbours": (
        "chosen = chosen / halves(chosen, 1)[:, None]",
        "k = chosen.shape[1]\n"
        "            size = 1 << (k - 1).bit_length()\n"
        "            total = torch.nn.functional.pad(chosen, (0, size - k))\n"
        "            while total.shape[1] > 1:\n"
        "                total = total[:, ::2] + total[:, 1::2]\n"
        "            chosen = chosen / total",
        draws(cases.slot_weights),
    ),
    "slot_weights_rounded_before_their_sum": (
        "chosen = _chosen(scores, _keys(indices, scores.shape[1]))\n    with ieee():\n"
        "        if normalize:\n            chosen = chosen / halves",
        "chosen = _chosen(scores, _keys(indices, scores.shape[1])).to(dtype).float()\n"
        "    with ieee():\n        if normalize:\n            chosen = chosen / halves",
        draws(cases.slot_weights),
    ),
    "rows_of_the_next_expert": (
        "yield expert, slice(first, end)",
        "yield expert, slice(first, min(end + 1, int(offsets[-1])))",
        partial(cases.rows_of_linear, load="uneven", dtype=BF16, gemm=gemm),
    ),
    "weight_of_the_next_expert": (
        "products.product(a[rows], b[expert], order",
        "products.product(a[rows], b[expert - 1], order",
        partial(cases.rows_of_linear, load="few", dtype=BF16, gemm=gemm),
    ),
    "chain_for_tree": (
        "partial(grouped_gemm, order=TREE)",
        "partial(grouped_gemm, order=ORDER)",
        partial(cases.rows_of_tree, load="uneven", dtype=FP32, k=600, gemm=gemm),
    ),
    "leaves_of_the_slice": (
        "products.leaf_sums(a[rows], b[expert], length)",
        "products.leaf_sums(a[rows], b[expert], max(16, a.shape[1] // 128 * 16))[: len(out)]",
        partial(cases.leaves_of_ranks, dtype=FP32),
    ),
    "leaves_of_expert_0": (
        "products.leaf_sums(a[rows], b[expert], length)",
        "products.leaf_sums(a[rows], b[0], length)",
        partial(cases.rows_of_tree, load="few", dtype=BF16, gemm=gemm),
    ),
}


def engine_with(folder: Path, old: str, new: str) -> ModuleType:
    """The backend with one text replaced."""
    path = folder / "mutant.py"
    path.write_text(replaced({"cpu": Path(cpu.__file__).read_text()}, old, new)["cpu"])
    spec = importlib.util.spec_from_file_location("cute_kernels.moe.mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(tmp_path, name):
    old, new, check = MUTANTS[name]
    mutant = engine_with(tmp_path, old, new)
    with pytest.raises((AssertionError, RuntimeError)):
        check(mutant)
