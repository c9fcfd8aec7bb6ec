"""Bugs planted in copies of the Triton norm, in Triton's interpreter.

Collected by test_triton_interpreter.py only, in a process that has TRITON_INTERPRET=1 before triton
is imported.  Casts to bf16 round, and an fma is a product and a sum.
"""

from __future__ import annotations

import os

import pytest

from ..interpreted import same_on_every_machine  # noqa: F401
from ..mhc.triton_harness import cpu_arithmetic, device_guard  # noqa: F401
from . import cases
from . import triton_checks as checks
from .cases import FP32, Case, Rule
from .triton_checks import LAYERS
from .triton_harness import copy_of
from .triton_orders import rounds_twice

assert os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def by_night(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


#: More rows than a program has.
ROWS = Case(20, 500, LAYERS, FP32, FP32, residual=True)


def of(case: Case):
    """The bounds, or the bytes of the written order, are missed."""
    return lambda mutant: checks.values(mutant, case, rounds_twice)


def bounds(case: Case):
    """The bounds alone."""

    def check(mutant):
        inputs = cases.inputs_of(case)
        cases.check(cases.run(mutant, case, inputs), case, inputs)

    return check


def by_rows(mutant):
    cases.few_rows(mutant, ROWS)


def by_parts(mutant):
    cases.a_part_is_the_same_anywhere(mutant, Case(9, 1030, LAYERS, bias=True))


RMS, LAYER, WIDE = checks.SMALL[0], checks.SMALL[1], checks.WIDE[0]
LANES = "    lanes = forward_lanes(width)\n"
PART = "part = tl.cast(step, tl.int64) * AHEAD + i"
INTO = "total = tl.load(out_ptr + c, mask=c < D, other=0.0)"
ADDED = "total = tl.where(there, total + ahead[i], total)"
ROOT = "tl.sqrt_rn(tl.div_rn(squares, size) + eps)"
OUT = "tl.store(out_ptr + c, total.to"

#: Name -> (edits, who notices).  Rows of blocks have blocks of 64.
MUTANTS = {
    "lanes_follow_the_rows": ([(LANES, "    lanes = forward_lanes(width) // (1 + (m > 8))\n")],
        by_rows),
    "lanes_of_a_part_follow_the_rows": ([("ROWS=part_lanes(width),",
        "ROWS=max(1, part_lanes(width) // (1 + (m > 150))),")],
        lambda mutant: cases.a_part_is_the_same_anywhere(mutant, Case(180, 65))),
    "eps_outside_the_root": ([(ROOT, "(tl.sqrt_rn(tl.div_rn(squares, size)) + eps)")],
        bounds(Case(5, 96, Rule(cases.RMS, 0.25)))),
    "parts_descending": ([(PART, f"{PART}\n            part = count - 1 - part")],
        checks.parts_are_added),
    "parts_added_before": ([(INTO, "pass"), (OUT,
        "total += tl.load(out_ptr + c, mask=c < D) if ACCUMULATE else 0.0\n    " + OUT)],
        checks.parts_are_added),
    "parts_that_are_not_there": ([(ADDED, "total += ahead[i]")], checks.parts_are_added),
    "room_behind_parts_forgotten": ([("part * parts_m", "part * D")], checks.parts_are_added),
    "rows_of_a_part_descending": ([("rows = start + step + tl.zeros([1], tl.int64)",
        "rows = tl.minimum(M, start + PART) - 1 - step + tl.zeros([1], tl.int64)")], of(
        WIDE)),
    "lanes_of_a_part_backwards": ([("rows = start + step * ROWS + tl.arange(0, ROWS)",
        "rows = start + step * ROWS + (ROWS - 1 - tl.arange(0, ROWS))")], of(LAYER)),
    "a_part_begins_elsewhere": ([("tl.int64) * PART\n    end", "tl.int64) * (PART - 1)\n    end")],
        by_parts),
    "last_row_dropped": ([("tl.minimum(start + PART, M)", "tl.minimum(start + PART, M - 1)")],
        of(RMS)),
    "next_rows_of_another_part": ([("end = tl.minimum(start + PART, M)",
        "end = tl.minimum(start + PART + 1, M)")], by_parts),
    "residual_not_rounded": ([("        h = h.to(x_ptr.dtype.element_ty).to(tl.float32)\n", "")],
        of(RMS)),
    "offset_forgotten": ([("mask=c < D, other=0.0).to(tl.float32) + offset\n",
        "mask=c < D, other=0.0).to(tl.float32)\n")], bounds(checks.SMALL[4])),
    "offset_forgotten_in_dx": ([("other=0.0).to(tl.float32) + offset)",
        "other=0.0).to(tl.float32))")], bounds(checks.SMALL[4])),
    "tail_counts_in_the_variance": ([("tl.where(c < D, h - mean[:, None], 0.0)",
        "h - mean[:, None]")], bounds(LAYER)),
    "mean_of_the_padded_row": ([("*(float(width), rule.eps", "*(float(lanes), rule.eps")],
        bounds(LAYER)),
    "weight_twice_in_dx": ([("        g = dy * (tl.load(", "        dy = dy * tl.load("
        "weight_ptr + c, mask=c < D, other=0.0).to(tl.float32)\n        g = dy * (tl.load(")],
        bounds(RMS)),
    "no_projection": ([("inner = tl.fma(-x_hat, of_products[:, None] + tl.zeros_like(g), g)",
        "inner = g + 0.0")], bounds(RMS)),
    "mean_of_g_forgotten": ([("        inner -= of_g[:, None]", "        inner -= 0.0")],
        bounds(LAYER)),
    "dh_forgotten": ([("tl.fma(inner, rstd + tl.zeros_like(g), dh)", "inner * rstd")],
        bounds(RMS)),
    "bias_forgotten": ([("bias + tl.zeros_like(y))", "tl.zeros_like(y))")], bounds(LAYER)),
    "h_not_stored_behind_the_first_block": ([("            _store(h_ptr, own,",
        "            _store(h_ptr, own * (block == 0),")], of(WIDE)),
    "one_block_less": ([("else tl.fma(own, own, lanes)",
        "else tl.fma(own, own * (block > 0), lanes)")], bounds(WIDE)),
    "columns_of_a_part_backwards": ([("c = _columns(tl.program_id(0) % blocks * BLOCK, BLOCK)",
        "c = _columns((blocks - 1 - tl.program_id(0) % blocks) * BLOCK // 2, BLOCK)")],
        bounds(Case(3, 1200, LAYERS, bias=True))),
}  # fmt: skip


OF_BLOCKS = {
    "rows_of_a_part_descending",
    "h_not_stored_behind_the_first_block",
    "one_block_less",
    "columns_of_a_part_backwards",
}


def narrowed(monkeypatch, name, mutant):
    """Mutants of kernels of blocks meet blocks of 64."""
    if name in OF_BLOCKS:
        checks.blocks_of(monkeypatch, 64, mutant)


#: By day.
FEW = (
    "lanes_follow_the_rows",
    "eps_outside_the_root",
    "parts_descending",
    "rows_of_a_part_descending",
    "weight_twice_in_dx",
)


@pytest.mark.parametrize("name", [name if name in FEW else by_night(name) for name in MUTANTS])
def test_killed(tmp_path, monkeypatch, name):
    edits, check = MUTANTS[name]
    mutant = copy_of(tmp_path, *edits)
    checks.short_parts(monkeypatch, mutant)
    narrowed(monkeypatch, name, mutant)
    with pytest.raises(AssertionError):
        check(mutant)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_an_unedited_copy_lives(tmp_path, monkeypatch, name):
    copy = copy_of(tmp_path)
    checks.short_parts(monkeypatch, copy)
    narrowed(monkeypatch, name, copy)
    MUTANTS[name][1](copy)
