"""Bugs planted in a copy of the kernels or launcher; the check beside each must notice it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

import cute_kernels.gemm.triton as package
from ptxsim.skips import requires_core
from tests.oracles import gemm as reference

from ..triton_copies import copy_of
from . import triton_cases as cases
from .triton_engine import BF16, FP32, engine, far_offsets
from .triton_harness import TARGETS, WildAccess, compiled, simulated
from .triton_inspect import complaints

K_LOOP = "for step in tl.range(0, steps):\n"
BY_M = (
    "rows = tl.sum(in_m.to(tl.int32))\n    for up in tl.range(0, steps):\n"
    "        step = up if rows > 32 else steps - 1 - up\n"
)
SIZES = "    (m, k), n = a.shape, b.shape[0]\n    plan = plan_of(a.dtype)\n"
SPLIT_BY_M = SIZES + (
    "    if m < 32 and k > 64 and accumulator is None:\n"
    "        left = _launch(a[:, :64], b[:, :64], bias, None, programs)\n"
    "        return left + _launch(a[:, 64:], b[:, 64:], None, None, programs)\n"
)
START = "            acc = tl.load(out_ptrs, mask=in_m & in_n, other=0.0)\n"
ZERO_START = START.replace("acc =", "before =") + (
    "            acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)\n"
)
BIAS = "\n        if bias_ptr is not None:\n"
ADD_LATE = "\n        if ACCUMULATE:\n            acc += before" + BIAS
STORE = "tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_m & in_n)"
LOAD_A = "a = tl.load(a_ptrs + step * a_step, mask=in_m & in_k[None, :], other=0.0)"
LOAD_B = "b = tl.load(b_ptrs + step * b_step, mask=in_k[:, None] & in_n, other=0.0)"
WHOLE_A = LOAD_A.replace("in_m & in_k[None, :]", "in_m")
ADD_BIAS = "acc += bias.to(tl.float32)[None, :]"
ROUND_FIRST = "acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32) + bias.to(tl.float32)[None, :]"
LANE = "for lane in tl.range(0, LANES):"
PARTIAL = "partial += tl.load(ptrs + step * stride, mask=in_m & in_n, other=0.0).to(tl.float32)"


def chain(epilogue, dtype=BF16, shape=(130, 7, 200)):
    return lambda gemm, _: cases.chain_bits(gemm, *shape, dtype, epilogue)


def of(check, dtype=BF16):
    return lambda gemm, _: check(gemm, dtype)


def sums(dtype):
    return lambda _, column_sum: cases.column_sums(column_sum, dtype)


MUTANTS = {
    "k_descending": ([(K_LOOP, "for step in tl.range(steps - 1, -1, -1):\n")], chain("plain")),
    "k_descending_fp32": (
        [(K_LOOP, "for step in tl.range(steps - 1, -1, -1):\n")],
        chain("plain", FP32),
    ),
    "k_order_by_m": ([(K_LOOP, BY_M)], of(cases.rows_alone)),
    "split_k_by_m": ([(SIZES, SPLIT_BY_M)], of(cases.rows_alone)),
    "last_k_group_dropped": ([("steps = (K - 1) // BLOCK_K + 1", "steps = K // BLOCK_K")],)
    + (chain("bias"),),
    "k_tail_multiplied": (
        [(LOAD_A, WHOLE_A + "\n        a = a * in_k[None, :].to(a.dtype)")],
        of(cases.neighbours),
    ),
    "k_tail_of_one_operand_unmasked": ([(LOAD_A, WHOLE_A)], of(cases.neighbours)),
    "n_tail_unmasked": ([(LOAD_B, LOAD_B.replace(" & in_n", ""))], chain("plain")),
    "m_tail_stored": ([(STORE, STORE.replace("in_m & in_n", "in_n"))], of(cases.neighbours)),
    "n_tail_stored": ([(STORE, STORE.replace("in_m & in_n", "in_m"))], of(cases.neighbours)),
    "bias_after_the_rounding": ([(ADD_BIAS, ROUND_FIRST)], chain("bias")),
    "bias_added_twice_rounded_once": ([(ADD_BIAS, ADD_BIAS + "\n            " + ADD_BIAS)],)
    + (chain("bias"),),
    "accumulator_added_at_the_end": ([(START, ZERO_START), (BIAS, ADD_LATE)], of(cases.pieces)),
    "accumulator_ignored": ([(START, START.replace("out_ptrs,", "out_ptrs,").replace(
        "acc = tl.load(out_ptrs, mask=in_m & in_n, other=0.0)",
        "acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)",
    ))], chain("accumulate")),
    "stride_of_the_grid_fixed": (
        [("tiles_n, tl.num_programs(0)):", "tiles_n, 132):")],
        of(cases.programs),
    ),
    "raster_ignores_the_last_group": (
        [("height = tl.minimum(tiles_m - first_m, GROUP_M)", "height = GROUP_M")],
        of(cases.programs),
    ),
    "alignment_taken_on_trust": (
        [("return 16 if size % 16 == 0 and 1 in strides else 1", "return 16")],
        chain("plain"),
    ),
    "guard_dropped": (
        [("with torch.cuda.device(a.device):\n        if order", "if True:\n        if order")],
        chain("plain"),
    ),
    "lanes_descending": ([(LANE, "for lane in tl.range(LANES - 1, -1, -1):")], sums(FP32)),
    "lanes_as_a_tree": (
        [("total += tl.sum(tl.where((lanes == lane)[:, None], partial, 0.0), axis=0)",
          "total = tl.sum(partial, axis=0)")],
        sums(FP32),
    ),
    "row_tail_unmasked": ([(PARTIAL, PARTIAL.replace("in_m & in_n", "in_n"))], sums(FP32)),
    "partial_sums_rounded": (
        [(PARTIAL, PARTIAL + "\n        partial = partial.to(ptrs.dtype.element_ty)"
                             ".to(tl.float32)")],
        sums(BF16),
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
        check(engine(monkeypatch, mutant), mutant.column_sum)


@pytest.mark.sim
@requires_core
def test_an_unedited_copy_lives(monkeypatch, tmp_path):
    """Copying alone changes nothing: the checks pass on the module in test_triton_simulated.py."""
    copy = copy_of(package, tmp_path)
    with simulated(copy):
        cases.chain_bits(engine(monkeypatch, copy), 130, 7, 200, BF16, "bias")


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_data_can_show_an_order(dtype):
    """Rounded to 16 bits, more than a tenth of the outputs tell ascending from descending K."""
    a, b, _, _ = cases.problem(130, 7, 200, dtype, "plain")
    tail = a.new_zeros(a.shape[0], 8), b.new_zeros(b.shape[0], 8)
    a, b = (torch.cat(pair, 1) for pair in zip((a, b), tail, strict=True))
    down = torch.arange(208).view(13, 16).flip(0).reshape(-1)
    up, reverse = reference.chain(a, b), reference.chain(a[:, down], b[:, down])
    assert (up.to(dtype) != reverse.to(dtype)).float().mean() > 0.1


@pytest.mark.sim
@requires_core
@pytest.mark.parametrize(
    "old", ["row_offsets = rows.to(tl.int64)[:, None]", "tl.arange(0, LANES).to(tl.int64)"]
)
def test_int32_offsets_are_killed(monkeypatch, tmp_path, old):
    mutant = copy_of(package, tmp_path, (old, old.replace(".to(tl.int64)", "")))
    with simulated(mutant), pytest.raises((AssertionError, WildAccess)):
        far_offsets(engine(monkeypatch, mutant), mutant.column_sum, tmp_path)


@pytest.mark.sim
@requires_core
def test_specialising_on_m_is_noticed(tmp_path):
    mutant = copy_of(package, tmp_path, ('["M", "N", "K"]', '["N", "K"]'))
    b = cases.random(32, 48, dtype=BF16, seed=1)
    launch = [
        lambda m=m: mutant._launch(cases.random(m, 48, dtype=BF16, seed=m), b, None, None, 132)
        for m in (1, 7, 16)
    ]
    kernels = [compiled(mutant, "sm_90", call)[0] for call in launch]
    assert len({kernel.hash for kernel in kernels}) == 3


@pytest.mark.parametrize("target", TARGETS)
def test_atomics_are_noticed(tmp_path, target):
    atomic = STORE.replace("tl.store", "tl.atomic_add").replace(
        "acc.to(out_ptr.dtype.element_ty)", "acc"
    )
    mutant = copy_of(package, tmp_path, (STORE, atomic))
    a, b, _, start = cases.problem(32, 32, 32, BF16, "accumulate")
    kernels = compiled(mutant, target, lambda: mutant._launch(a, b, None, start, 132))
    assert "atomics" in complaints(kernels[0], BF16, "accumulate")


def test_tf32_is_noticed(tmp_path):
    old = '"INPUT_PRECISION": plan.input_precision'
    mutant = copy_of(package, tmp_path, (old, old.replace("plan.input_precision", '"tf32"')))
    a, b, _, _ = cases.problem(32, 32, 32, FP32, "plain")
    kernels = compiled(mutant, "sm_90", lambda: mutant._launch(a, b, None, None, 132))
    assert "tf32" in complaints(kernels[0], FP32, "plain")


def test_a_wide_dot_in_the_accumulate_path_is_noticed(tmp_path):
    """On gfx950 a dot of 64 takes 32 k in one instruction: a cut at 16 would show."""
    edit = ("plan.accumulate_k if accumulate else plan.block_k", "plan.block_k")
    mutant = copy_of(package, tmp_path, edit)
    a, b, _, start = cases.problem(32, 32, 64, torch.float16, "accumulate")
    kernels = compiled(mutant, "gfx950", lambda: mutant._launch(a, b, None, start, 132))
    assert "matrix instruction" in complaints(kernels[0], torch.float16, "accumulate")


def test_unpinned_mfma_is_noticed(tmp_path):
    edit = ('out["matrix_instr_nonkdim"] = plan.hip_matrix_instr_nonkdim', "pass")
    mutant = copy_of(package, tmp_path, edit)
    a, b, _, _ = cases.problem(32, 32, 64, BF16, "plain")
    kernels = compiled(mutant, "gfx942", lambda: mutant._launch(a, b, None, None, 132))
    assert "matrix instruction" in complaints(kernels[0], BF16, "plain")
