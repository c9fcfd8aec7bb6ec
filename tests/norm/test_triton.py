"""The Triton norm: its sm_90 code in ptxsim, its source in the interpreter, and mutants.

What an engine is, and what a row of a table: tests/triton_runner.py.  An fma rounds once in both,
so the bytes are those of the orders that `triton_orders` writes down.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from cute_kernels.norm.triton import launch
from ptxsim.skips import requires_core
from tests.triton_runner import INTERPRETER, SM90, case, mutants, unedited

from . import cases
from . import triton_checks as checks
from .cases import BF16, FP32, Case, Rule
from .triton_checks import LAYERS
from .triton_engine import RUNNER

pytestmark = pytest.mark.simulates("norm.triton")

#: Rows of several warps, of a whole program, and of blocks.
LARGE = (Case(3, 4104, LAYERS, bias=True), Case(2, 9000, residual=True))
NIGHT = (Case(2, 16500, LAYERS, bias=True, residual=True), *cases.kinds(), *cases.widths())
BY_DAY = (checks.SMALL[1], LARGE[0])
WHOLE = Case(9, 520, LAYERS, FP32, FP32, bias=True, residual=True)
FEW = Case(11, 96, LAYERS, FP32, FP32, bias=True, residual=True)

CHECKS = [
    *(case(SM90, checks.values, of) for of in BY_DAY),
    *(
        case(SM90, checks.values, of, night=True)
        for of in (*checks.SMALL, *checks.PARTS, *LARGE, *NIGHT)
        if of not in BY_DAY
    ),
    *(
        case(SM90, checks.of_blocks, checks.values, of, night=of != checks.WIDE[0])
        for of in checks.WIDE
    ),
    case(SM90, checks.parts_are_added, night=True),
    *(
        case(SM90, cases.few_rows, of, night=of != FEW)
        for of in (FEW, Case(9, 4104), checks.PARTS[1])
    ),
    *(
        case(SM90, checks.battery, index, BF16 if index % 2 else FP32, 9, night=True)
        for index in range(6)
    ),
    *(
        case(SM90, cases.a_part_is_the_same_anywhere, of, night=of != checks.PARTS[1])
        for of in checks.PARTS
    ),
    case(SM90, checks.no_cut_shows, 1, 1030, 2),
    *(case(SM90, checks.no_cut_shows, index, 104, 2, night=True) for index in (0, 1)),
    *(case(SM90, checks.no_size_shows, of, night=of != WHOLE) for of in (WHOLE, checks.PARTS[0])),
    *(case(SM90, checks.of_blocks, checks.no_size_shows, of, night=True) for of in checks.WIDE),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_values(engine, check, options):
    with RUNNER.running(engine, **options) as module:
        check(module)


@pytest.mark.sim
@requires_core
@pytest.mark.parametrize(
    "of",
    [
        Case(9, 96, residual=True),
        pytest.param(Case(5, 520, LAYERS, FP32, BF16, bias=True), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_no_address_shows(of):
    """Other loads are compiled for what is not aligned; the bytes are the same."""
    with RUNNER.simulated() as kernels:
        cases.no_address_shows(launch, of)
    assert len({k.hash for k in kernels if k.name == "backward_kernel"}) >= 2


# ---- mutants -------------------------------------------------------------------------------------

#: More rows than a program has.
ROWS = Case(20, 500, LAYERS, FP32, FP32, residual=True)
SHORT = INTERPRETER, checks.of_short_parts
BLOCKS = *SHORT, checks.of_blocks
RMS, LAYER, WIDE = checks.SMALL[0], checks.SMALL[1], checks.WIDE[0]
LANES = "    lanes = forward_lanes(width)\n"
PART = "part = tl.cast(step, tl.int64) * AHEAD + i"
INTO = "total = tl.load(out_ptr + c, mask=c < D, other=0.0)"
ADDED = "total = tl.where(there, total + ahead[i], total)"
ROOT = "tl.sqrt_rn(tl.div_rn(squares, size) + eps)"
OUT = "tl.store(out_ptr + c, total.to"
OF_LAYER, OF_RMS, OF_OFFSET = ((*SHORT, checks.bounds, of) for of in (LAYER, RMS, checks.SMALL[4]))
OF_WIDE = *BLOCKS, checks.values, WIDE
ADDED_PARTS = *SHORT, checks.parts_are_added
A_PART = *SHORT, cases.a_part_is_the_same_anywhere, Case(9, 1030, LAYERS, bias=True)

MUTANTS = {
    "lanes_follow_the_rows": (
        *(*SHORT, cases.few_rows, ROWS),
        (LANES, "    lanes = forward_lanes(width) // (1 + (m > 8))\n"),
    ),
    "lanes_of_a_part_follow_the_rows": (
        *(*SHORT, cases.a_part_is_the_same_anywhere, Case(180, 65)),
        ("ROWS=part_lanes(width),", "ROWS=max(1, part_lanes(width) // (1 + (m > 150))),"),
    ),
    "eps_outside_the_root": (
        *(*SHORT, checks.bounds, Case(5, 96, Rule(cases.RMS, 0.25))),
        (ROOT, "(tl.sqrt_rn(tl.div_rn(squares, size)) + eps)"),
    ),
    "parts_descending": (*ADDED_PARTS, (PART, f"{PART}\n            part = count - 1 - part")),
    "parts_added_before": (
        *ADDED_PARTS,
        (INTO, "pass"),
        (OUT, "total += tl.load(out_ptr + c, mask=c < D) if ACCUMULATE else 0.0\n    " + OUT),
    ),
    "parts_that_are_not_there": (*ADDED_PARTS, (ADDED, "total += ahead[i]")),
    "room_behind_parts_forgotten": (*ADDED_PARTS, ("part * parts_m", "part * D")),
    "rows_of_a_part_descending": (
        *OF_WIDE,
        (
            "rows = start + step + tl.zeros([1], tl.int64)",
            "rows = tl.minimum(M, start + PART) - 1 - step + tl.zeros([1], tl.int64)",
        ),
    ),
    "lanes_of_a_part_backwards": (
        *(*SHORT, checks.values, LAYER),
        (
            "rows = start + step * ROWS + tl.arange(0, ROWS)",
            "rows = start + step * ROWS + (ROWS - 1 - tl.arange(0, ROWS))",
        ),
    ),
    "a_part_begins_elsewhere": (
        *A_PART,
        ("tl.int64) * PART\n    end", "tl.int64) * (PART - 1)\n    end"),
    ),
    "last_row_dropped": (
        *(*SHORT, checks.values, RMS),
        ("tl.minimum(start + PART, M)", "tl.minimum(start + PART, M - 1)"),
    ),
    "next_rows_of_another_part": (
        *A_PART,
        ("end = tl.minimum(start + PART, M)", "end = tl.minimum(start + PART + 1, M)"),
    ),
    "residual_not_rounded": (
        *(*SHORT, checks.values, RMS),
        ("        h = h.to(x_ptr.dtype.element_ty).to(tl.float32)\n", ""),
    ),
    "offset_forgotten": (
        *OF_OFFSET,
        (
            "mask=c < D, other=0.0).to(tl.float32) + offset\n",
            "mask=c < D, other=0.0).to(tl.float32)\n",
        ),
    ),
    "offset_forgotten_in_dx": (
        *OF_OFFSET,
        ("other=0.0).to(tl.float32) + offset)", "other=0.0).to(tl.float32))"),
    ),
    "tail_counts_in_the_variance": (
        *OF_LAYER,
        ("tl.where(c < D, h - mean[:, None], 0.0)", "h - mean[:, None]"),
    ),
    "mean_of_the_padded_row": (*OF_LAYER, ("*(float(width), rule.eps", "*(float(lanes), rule.eps")),
    "weight_twice_in_dx": (
        *OF_RMS,
        (
            "        g = dy * (tl.load(",
            "        dy = dy * tl.load("
            "weight_ptr + c, mask=c < D, other=0.0).to(tl.float32)\n        g = dy * (tl.load(",
        ),
    ),
    "no_projection": (
        *OF_RMS,
        ("inner = tl.fma(-x_hat, of_products[:, None] + tl.zeros_like(g), g)", "inner = g + 0.0"),
    ),
    "mean_of_g_forgotten": (*OF_LAYER, ("        inner -= of_g[:, None]", "        inner -= 0.0")),
    "dh_forgotten": (*OF_RMS, ("tl.fma(inner, rstd + tl.zeros_like(g), dh)", "inner * rstd")),
    "bias_forgotten": (*OF_LAYER, ("bias + tl.zeros_like(y))", "tl.zeros_like(y))")),
    "h_not_stored_behind_the_first_block": (
        *OF_WIDE,
        ("            _store(h_ptr, own,", "            _store(h_ptr, own * (block == 0),"),
    ),
    "one_block_less": (
        *(*BLOCKS, checks.bounds, WIDE),
        ("else tl.fma(own, own, lanes)", "else tl.fma(own, own * (block > 0), lanes)"),
    ),
    "columns_of_a_part_backwards": (
        *(*BLOCKS, checks.bounds, Case(3, 1200, LAYERS, bias=True)),
        (
            "c = _columns(tl.program_id(0) % blocks * BLOCK, BLOCK)",
            "c = _columns((blocks - 1 - tl.program_id(0) % blocks) * BLOCK // 2, BLOCK)",
        ),
    ),
    # What a compiler fuses on its own has other bytes than the written order.
    "fused_sums_in_machine_code": (
        *(SM90, checks.values, WHOLE),
        ('"enable_fp_fusion": TRITON.fp_fusion', '"enable_fp_fusion": True'),
    ),
}


@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
def test_killed(engine, check, edits):
    RUNNER.kill(engine, check, *edits)


@pytest.mark.parametrize(("engine", "check"), unedited(MUTANTS))
def test_unedited(engine, check):
    with RUNNER.running(engine) as module:
        check(module)
