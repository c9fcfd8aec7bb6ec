"""Grouped products and routing of Triton in its interpreter: masks, pointers, orders, in numpy.

Collected by test_triton_interpreter.py only, in a process that has TRITON_INTERPRET=1 before triton
is imported.  As with gemm's, products are told to multiply in fp32 and to round outside the kernel.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

import cute_kernels.moe.triton as package
from cute_kernels.gemm.triton import launch as gemm_launch
from cute_kernels.moe.triton import launch, routing

from ..triton_copies import copy_of
from ..triton_in_numpy import gpu_rounding, same_on_every_machine  # noqa: F401
from ..triton_runner import device_guard  # noqa: F401
from . import cases, tree_cases

assert os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

DTYPES = pytest.mark.parametrize("dtype", [cases.BF16, cases.FP32], ids=["bf16", "fp32"])
ROUTING_FILES = ("kernel_routing", "routing")


def engine(module, programs: int = 5):
    """The products of a launcher, by ``programs`` programs."""

    def gemm(a, b, offsets, bias):
        return module._launch_gemm(a, b, offsets, bias, programs, interpret=True)

    def dw(dy, x, offsets, accumulator):
        return module._launch_dw(dy, x, offsets, accumulator, programs, interpret=True)

    def leaves(*operands, bias=None, stage="leaves"):
        *operands, length = operands
        return module._launch_leaves(*operands, bias, length, stage, programs, interpret=True)

    def tree(a, b, offsets, bias):
        length = module.leaves.length(a.shape[1])
        return leaves(a, b, offsets, length, bias=bias, stage="tree")

    return SimpleNamespace(
        grouped_gemm=gemm,
        grouped_tree=tree,
        grouped_leaf_sums=leaves,
        grouped_dw=dw,
        grouped_column_sum=lambda rows, offsets: module._launch_sum(rows, offsets, interpret=True),
    )


def gemm():
    """gemm's products in the interpreter."""
    return SimpleNamespace(
        gemm=lambda a, b, bias, acc: gemm_launch._launch(a, b, bias, acc, 3, interpret=True),
        column_sum=lambda rows: gemm_launch._launch_column_sum(rows, interpret=True),
    )


def gemm_tree():
    """gemm's products in the order ``tree`` in the interpreter."""

    def leaf_sums(a, b, length):
        plan = gemm_launch.plans.skinny("gfx942", gemm_launch.plan_of(a.dtype))
        return gemm_launch._launch_leaf_sums(a, b, length, plan, 132, interpret=True)

    return SimpleNamespace(
        gemm=lambda a, b, bias: gemm_launch._launch_tree(a, b, bias, 3, interpret=True),
        leaf_sums=leaf_sums,
    )


@DTYPES
@pytest.mark.parametrize("load", cases.LOADS)
def test_rows_of_linear(load, dtype):
    cases.rows_of_linear(engine(launch), gemm(), load, dtype)


def test_wide_rows_of_linear():
    """More tiles than one along every dimension."""
    cases.rows_of_linear(engine(launch), gemm(), "tiles", cases.BF16, n=264, k=144)


@pytest.mark.parametrize("programs", [1, 2, 132])
def test_programs(programs):
    cases.rows_of_linear(engine(launch, programs), gemm(), "uneven", cases.BF16)


@DTYPES
@pytest.mark.parametrize(
    "check", [cases.pieces, cases.neighbours, cases.layouts], ids=lambda check: check.__name__
)
def test_products(check, dtype):
    check(engine(launch), dtype)


@DTYPES
@pytest.mark.parametrize("load", cases.LOADS)
def test_rows_of_tree(load, dtype):
    tree_cases.rows_of_tree(engine(launch), gemm_tree(), load, dtype)


@DTYPES
@pytest.mark.parametrize(
    "check",
    [
        tree_cases.leaves_of_ranks,
        tree_cases.neighbours,
        tree_cases.layouts,
        tree_cases.inside,
    ],
    ids=lambda check: check.__name__,
)
def test_tree(check, dtype):
    check(engine(launch), dtype)


def test_tree_of_minus_zeros():
    tree_cases.minus_zeros(engine(launch))


def test_bad_offsets_stay_inside():
    """Whatever offsets hold, nothing outside is read or written."""
    x, weight, _, _, dy = cases.operands("few", cases.FP32)
    for values in ([-5, 3, 1, 9, 2, 4, 2**31 - 1], [7, -(2**31), 8, 8, 8, 8, 100]):
        offsets = torch.tensor(values, dtype=torch.int32)
        cases.inside(engine(launch), x, weight, dy, offsets)


@pytest.mark.parametrize(
    "check",
    [cases.ties, cases.not_numbers, cases.zeros_keep_their_sign],
    ids=lambda check: check.__name__,
)
def test_single(check):
    check(routing)


@pytest.mark.parametrize(
    "check",
    [cases.sorted_slots, cases.choices, cases.weights, cases.combined, cases.without_an_expert],
    ids=lambda check: check.__name__,
)
def test_drawn_routings(check):
    for seed in range(6):
        check(routing, seed)


def test_many_slots():
    """More blocks of slots than one, and groups of slots in each."""
    cases.many_slots(routing, 1100, 1000)


def draws(check):
    def run(module):
        for seed in range(30):
            check(module, seed)

    return run


def many(module):
    cases.many_slots(module, 1100, 1000)


def against_gemm(load, dtype=cases.BF16, **sizes):
    # By two programs, one after the other: tiles of the first do not hide what the second spoils.
    return lambda module: cases.rows_of_linear(engine(module, 2), gemm(), load, dtype, **sizes)


def against_tree(load, dtype=cases.BF16, **sizes):
    return lambda module: tree_cases.rows_of_tree(
        engine(module, 2), gemm_tree(), load, dtype, **sizes
    )


MUTANTS = {
    "leaf_into_the_next_one": (
        "size = tl.minimum(K - first, length)",
        "size = tl.minimum(K - first, length + 16)",
        against_tree("few"),
    ),
    "leaves_descending": (
        "leaf, length, b_ptrs",
        "leaves - 1 - leaf, length, b_ptrs",
        against_tree("few", cases.FP32),
    ),
    "leaves_of_the_slice": (
        "    count, shape = plans.cdiv(",
        "    length = leaves.length(a.shape[1])\n    count, shape = plans.cdiv(",
        lambda module: tree_cases.leaves_of_ranks(engine(module, 2), cases.FP32),
    ),
    "tree_of_the_next_expert": (
        "in_m = (rows < count)[None, :]",
        "in_m = (rows < T - row0)[None, :]",
        against_tree("uneven"),
    ),
    "tail_of_the_next_expert": (
        "in_m = (rows < count)[:, None]",
        "in_m = (rows < T - row0)[:, None]",
        against_gemm("uneven"),
    ),
    "tail_of_tokens_multiplied": (
        "in_m, in_n, count, acc",
        "in_m, in_n, T - row0, acc",
        against_gemm("uneven"),
    ),
    "k_descending": (
        "for step in tl.range(0, steps):",
        "for step in tl.range(steps - 1, -1, -1):",
        against_gemm("few", cases.FP32, k=200),
    ),
    "block_k_of_main_grad": (
        "plan.accumulate_k if accumulate else plan.block_k",
        "plan.block_k",
        against_gemm("uneven"),
    ),
    "main_grad_from_zero": (
        "acc = tl.load(out_ptrs, mask=stored, other=0.0)",
        "acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)",
        against_gemm("uneven"),
    ),
    "no_tile_of_a_tail": (
        "heights = rows_of_each // BLOCK_M + (rows_of_each % BLOCK_M > 0).to(tl.int32)",
        "heights = rows_of_each // BLOCK_M",
        against_gemm("tiles"),
    ),
    "bias_of_expert_0": (
        "tl.cast(expert, tl.int64) * bias_e\n            bias_ptrs += columns.",
        "tl.cast(expert, tl.int64) * 0\n            bias_ptrs += columns.",
        against_gemm("few"),
    ),
    "tree_bias_of_expert_0": (
        "bias_ptrs = bias_ptr + tl.cast(expert, tl.int64) * bias_e\n                bias_ptrs",
        "bias_ptrs = bias_ptr + tl.cast(expert, tl.int64) * 0\n                bias_ptrs",
        against_tree("few"),
    ),
    "lanes_descending": (
        "for lane in tl.range(0, LANES):",
        "for lane in tl.range(LANES - 1, -1, -1):",
        against_gemm("uneven", cases.FP32),
    ),
}
ROUTING_MUTANTS = {
    "tie_by_highest": (
        "expert = tl.min(tl.min(tl.where(equal, index, _MOST), axis=1), axis=0)",
        "expert = tl.max(tl.max(tl.where(equal, index, -1), axis=1), axis=0)",
        cases.ties,
    ),
    "zeros_apart": ("bits = (value + 0.0).to", "bits = value.to", cases.ties),
    "order_by_load": (
        "starts = tl.cumsum(totals, 0) - totals",
        "starts = tl.sum(totals, axis=0) - tl.cumsum(totals, 0)",
        draws(cases.sorted_slots),
    ),
    "unstable": (
        "(here[None, :] < here[:, None])",
        "(here[None, :] > here[:, None])",
        draws(cases.sorted_slots),
    ),
    "counts_of_this_block_too": ("tl.where(other < block,", "tl.where(other <= block,", many),
    "groups_of_a_block_apart": (
        "run += tl.sum(chosen.to(tl.int32), axis=0)",
        "run += 0",
        many,
    ),
    "slots_without_an_expert_by_block": (
        "none = placed + (block * SPAN).to(tl.int32) - tl.sum(run, axis=0)",
        "none = placed",
        many,
    ),
    "rows_of_the_first_slots": (
        "slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)",
        "slot = tl.arange(0, SLOTS)",
        draws(cases.combined),
    ),
    "rows_of_the_next_token": (
        "row = tl.load(positions_ptr + token * K + slot, mask=",
        "row = tl.load(positions_ptr + (token * K + slot + 1) % rows, mask=",
        draws(cases.combined),
    ),
    "rows_of_no_expert_added": (
        "has_expert = last < placed\n",
        "has_expert = first + i < K\n",
        draws(cases.without_an_expert),
    ),
    "no_expert_as_a_term": (
        "total = tl.where(experts[i], added, total)",
        "total = tl.where(first + i < K, added, total)",
        draws(cases.without_an_expert),
    ),
    "weight_gradient_of_no_expert": (
        "total = tl.where(has_expert, over_columns(lanes, SLOTS, LANES), 0.0)",
        "total = over_columns(lanes, SLOTS, LANES)",
        draws(cases.without_an_expert),
    ),
    "row_gradient_of_no_expert": (
        "d_row = tl.where(has_expert[:, None], dy * weight, 0.0)",
        "d_row = dy * weight",
        draws(cases.without_an_expert),
    ),
    "row_of_no_expert": (
        "kept = tl.where(row < placed, value, tl.zeros_like(value))",
        "kept = value",
        draws(cases.without_an_expert),
    ),
    "gradient_of_no_weight": (
        "grad = tl.load(grad_ptr + token * K + last % K_ROOM, mask=last // K_ROOM < E, other=0.0)",
        "grad = tl.load(grad_ptr + token * K + last % K_ROOM)",
        draws(cases.without_an_expert),
    ),
    "combine_by_arrival": (
        "last = tl.min(tl.where(position > last, position, _MOST), axis=0)",
        "last = tl.max(tl.where(slot == first + i, position, -1), axis=0)",
        draws(cases.combined),
    ),
    "combine_from_zero": (
        "added = tl.where(first + i == 0, term, total + term)",
        "added = total + term",
        cases.zeros_keep_their_sign,
    ),
    "weights_by_slot": (
        "last = tl.min(tl.where(keys > last, keys, _MOST), axis=0)\n"
        "            term = _score(scores_ptr, token, last // K_ROOM, E, scores_t, scores_e)\n"
        "            total",
        "last = tl.max(tl.where(slot == rank, keys, -1), axis=0)\n"
        "            term = _score(scores_ptr, token, last // K_ROOM, E, scores_t, scores_e)\n"
        "            total",
        draws(cases.weights),
    ),
    "two_best_without_a_bias": (
        "if bias_ptr is not None and SIZE_ROOM > 1:",
        "if SIZE_ROOM > 1:",
        draws(cases.choices),
    ),
}


#: By day every third one.
DAY_AND_NIGHT = [
    pytest.param(name, marks=pytest.mark.nightly if at % 3 else ())
    for at, name in enumerate(MUTANTS)
]


@pytest.mark.parametrize("name", DAY_AND_NIGHT)
def test_killed(tmp_path, name):
    old, new, check = MUTANTS[name]
    mutant = copy_of(package, tmp_path, (old, new))
    with pytest.raises(AssertionError):
        check(mutant)


@pytest.mark.parametrize("name", ROUTING_MUTANTS)
def test_routing_killed(tmp_path, name):
    old, new, check = ROUTING_MUTANTS[name]
    mutant = copy_of(package, tmp_path, (old, new), files=ROUTING_FILES)
    with pytest.raises(AssertionError):
        check(mutant)
