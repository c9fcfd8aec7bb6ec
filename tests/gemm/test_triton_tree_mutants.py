"""Bugs planted in a copy of the Triton tree; the check beside each must notice it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

import cute_kernels.gemm.triton as package
from ptxsim.skips import requires_core

from ..triton_copies import copy_of
from . import triton_tree_cases as tree_cases
from .triton_engine import BF16, FP32, tree_engine
from .triton_harness import WildAccess, compiled, simulated
from .triton_inspect import tree_complaints

SUM = "total = tl.where(leaf == first_leaf, acc, total + acc)"
STORE = "tl.store(out_ptrs + tl.cast(leaf, tl.int64) * M * N, acc, mask=in_n & in_m)"
ROUNDED = "acc.to(tl.bfloat16).to(tl.float32)"
WORK = "work = _work(m, n, leaves.length(k), leaves.count(k), plan, compute_units)"
PARTS = "count = leaves.count(k) if deterministic else 1"
FULL = "torch.full((1, m, n), -0.0,"
ROOT = "total += tl.load(sum_ptrs + leaf * size, mask=in_n, other=0.0)"
FIRST = "total = tl.load(sum_ptrs, mask=in_n, other=0.0)"
START = "in_n, in_m, K, zero,"
ROOT_BIAS = "        total += tl.load(bias_ptrs, mask=in_n, other=0.0).to(tl.float32)\n"


def bits(shape=(13, 70, 520), kind="rows", dtype=BF16):
    return lambda tree: tree_cases.tree_bits(tree, *shape, dtype, kind)


def rows(tree):
    tree_cases.rows_alone(tree, BF16, (13, 33))


def of(check):
    return lambda tree: check(tree, BF16)


MUTANTS = {
    "leaves_by_m": (
        [(WORK, f"cut = k if m > 16 else 2 * k\n    {WORK}".replace("length(k)", "length(cut)")),
         ("if work.share == work.leaves or", "work = work._replace(leaves=-(-k // work.length))\n"
          "    count = min(count, work.leaves)\n    if work.share == work.leaves or")],
        rows,
    ),
    "small_tiles_take_k_backwards": (
        [("for step in tl.range(0, steps):\n", "for up in tl.range(0, steps):\n"
          "        step = up if acc.shape[1] > 16 else steps - 1 - up\n")],
        bits((13, 21, 1030)),
    ),
    "leaves_rounded": ([(STORE, STORE.replace("acc,", f"{ROUNDED},"))], bits()),
    "leaves_rounded_in_registers": ([(SUM, SUM.replace("acc)", f"{ROUNDED})"))], bits(kind="n")),
    "root_descending": (
        [(ROOT, ROOT.replace("leaf *", "(LEAVES - leaf) *"))],
        bits(),
    ),
    "root_pairwise": (
        [(ROOT, "total += tl.load(sum_ptrs + leaf * size, mask=in_n, other=0.0) if leaf % 2 == 0 "
          "else 0.0\n    odd = tl.load(sum_ptrs + size, mask=in_n, other=0.0)\n"
          "    for leaf in tl.static_range(3, LEAVES, 2):\n"
          "        odd += tl.load(sum_ptrs + leaf * size, mask=in_n, other=0.0)\n"
          "    total += odd")],
        bits(),
    ),
    "tree_descending": (
        [("leaf, length, b_ptrs", "leaves - 1 - leaf, length, b_ptrs")],
        bits(kind="n"),
    ),
    "leaf_into_the_next_one": (
        [("size = tl.minimum(K - first, length)", "size = tl.minimum(K - first, length + 16)")],
        bits(),
    ),
    "one_chain": (
        [(START, START.replace("zero", "tl.where(leaf == first_leaf, zero, total)")),
         (SUM, "total = acc")],
        bits(kind="n"),
    ),
    "tree_from_plus_zero": ([(SUM, "total = total + acc")], tree_cases.signs),
    "root_from_plus_zero": ([(FIRST, FIRST.replace("= tl", "= 0.0 + tl"))], tree_cases.signs),
    "atomics_from_plus_zero": ([(FULL, FULL.replace("-0.0", "0.0"))], tree_cases.signs),
    "unzeroed_workspace": ([(FULL, "torch.empty(1, m, n,")], of(tree_cases.fast)),
    "last_leaf_dropped": (
        [("tl.range(first_leaf, tl.minimum(first_leaf + share, leaves))",
          "tl.range(first_leaf, tl.minimum(first_leaf + share, leaves - 1))")],
        bits(),
    ),
    "bias_dropped_after_atomics": (
        [("_launch_root((sums,), bias, out, plan)",
          "_launch_root((sums,), bias if deterministic else None, out, plan)")],
        of(tree_cases.fast),
    ),
    "bias_of_the_first_row": ([("row * bias_m", "0 * bias_m")], bits()),
    "bias_after_the_rounding": (
        [(ROOT_BIAS, "        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)\n"
          + ROOT_BIAS)],
        bits(),
    ),
    "row_tail_stored": ([(STORE, STORE.replace("in_n & in_m", "in_n"))], bits((13, 64, 520))),
    "column_tail_stored": ([(STORE, STORE.replace("in_n & in_m", "in_m"))], bits((16, 70, 520))),
    "slices_with_leaves_of_their_own": (
        [("work = _work(m, n, length, cdiv(k, length), plan, compute_units)",
          "work = _work(m, n, leaves.length(k), leaves.count(k), plan, compute_units)")],
        of(tree_cases.slices),
    ),
    "rows_taken_as_aligned": (
        [("return 8 if t.stride(1) == 1 and t.stride(0) % 8 == 0 else 1", "return 8")],
        bits((13, 21, 130)),
    ),
    "k_taken_as_aligned": (
        [("return 8 if k % 16 == 8 and 1 in strides else", "return 8 if k % 2 == 0 else")],
        bits((13, 21, 130)),
    ),
    "guard_dropped": (
        [("with torch.cuda.device(x.device):", "if True:")],
        bits(),
    ),
}  # fmt: skip


@pytest.mark.sim
@requires_core
@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_killed(monkeypatch, tmp_path, name):
    edits, check = MUTANTS[name]
    mutant = copy_of(package, tmp_path, *edits)
    with simulated(mutant), pytest.raises((AssertionError, WildAccess)):
        check(tree_engine(monkeypatch, mutant))


@pytest.mark.sim
@requires_core
def test_an_unedited_copy_lives(monkeypatch, tmp_path):
    copy = copy_of(package, tmp_path)
    with simulated(copy):
        for check in (bits(), bits(kind="n"), rows, tree_cases.signs):
            check(tree_engine(monkeypatch, copy))


@pytest.mark.parametrize(
    ("edit", "stage", "complaint"),
    [
        ((STORE, STORE.replace("tl.cast(leaf, tl.int64)", "leaf")), "leaves", "offsets of 32 bits"),
        ((STORE, STORE.replace("tl.store", "tl.atomic_add")), "leaves", "atomics"),
        (("acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)",
          "acc = tl.trans(tl.dot(tl.trans(b), tl.trans(a), tl.trans(acc)))"),
         "leaves", "matrix instruction"),
    ],
)  # fmt: skip
def test_code_is_noticed(tmp_path, edit, stage, complaint):
    mutant = copy_of(package, tmp_path, edit)
    a, b = tree_cases.operands(16, 256, 1024, BF16)
    skinny_plan = mutant.plans.skinny("sm_90a", mutant.TRITON)
    kernels = compiled(
        mutant, "sm_90", lambda: mutant._launch_skinny(a, b, None, True, skinny_plan, 132)
    )
    assert complaint in tree_complaints(kernels[0], BF16, stage)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
def test_the_data_can_show_an_order_of_leaves(dtype):
    """More than a tenth of the outputs tell ascending from descending leaves."""
    a, b = tree_cases.operands(13, 70, 520, dtype)
    sums = tree_cases.leaf_chains(a, b)
    up, down = (tree_cases.added(of, None, dtype) for of in (sums, sums.flip(0)))
    assert (up != down).float().mean() > 0.1
