"""gated_rms_norm's Triton kernels: their sm_90 code in ptxsim, their source in the interpreter.

What an engine is, and what a row of a table: tests/triton_runner.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.linear_attn.config import group_part_rows
from tests.contract import same_bytes
from tests.oracles import linear_attn as oracle
from tests.runtime.cached_calls import drawn
from tests.triton_runner import (
    ENGINES,
    INTERPRETER,
    LATE,
    SM90,
    TARGETS,
    case,
    complaints,
    device_guard,  # noqa: F401  (a fixture)
    mutants,
)

from .gated_norm_cases import CASES, FP32, Case, Operands, operands, run, share
from .triton_engine import GATED_NORM as RUNNER

pytestmark = pytest.mark.simulates("linear_attn.triton")


def values(launch, name: str) -> None:
    """Both passes within the bounds of fp32, which test_gated_norm.py holds to torch's float64."""
    of = CASES[name]
    o = operands(of)
    want = oracle.gated_norm(*o[:4], of.rule)
    got = dict(zip(want, run(launch, of, o), strict=False))
    assert len(got) == 4 - (o.weight is None)
    shares = {label: share(t, want[label]) for label, t in got.items()}
    assert max(shares.values()) <= 1, shares


def cut(o: Operands, rows: slice) -> Operands:
    return Operands(o.x[rows], o.weight, o.gate[rows], o.dy[rows])


def rows_alone(launch, of: Case) -> None:
    """Rows have the bytes among NaN, at strides and from addresses of their own, that they have
    alone."""
    o = operands(of)
    wide = [torch.full((of.rows + 3, of.width + 5), float("nan"), dtype=of.dtype) for _ in "123"]
    for t, rows in zip(wide, (o.x, o.gate, o.dy), strict=True):
        t[2:-1, 3:-2] = rows
    inside = [t[:, 3:-2] for t in wide]
    among = Operands(inside[0], o.weight, *inside[1:])
    got = run(launch, of._replace(rows=of.rows + 3), among)[:3]
    for i in range(of.rows):
        alone = run(launch, of._replace(rows=1), cut(o, slice(i, i + 1)))[:3]
        assert all(same_bytes(t[i + 2 : i + 3], a) for t, a in zip(got, alone, strict=True)), i


def split(launch, of: Case, *cuts: int) -> None:
    """A main_grad after one micro-batch, and after several that are cut between parts."""
    o, part = operands(of), group_part_rows(of.rule.group_size)
    mains = [drawn(of.width, seed=7, dtype=FP32) for _ in "ab"]
    run(launch, of, o, mains[0])
    for first, end in itertools.pairwise((0, *(part * c for c in cuts), of.rows)):
        run(launch, of._replace(rows=end - first), cut(o, slice(first, end)), mains[1])
    assert same_bytes(*mains)


def no_size_shows(launch, of: Case) -> None:
    """Numbers of warps, rows of a program of the forward."""
    o = operands(of)
    want = run(launch, of, o)
    sizes = dataclasses.replace(
        launch.GATED_NORM,
        forward_tile=256,
        forward_elements=4,
        backward_elements=((8192, 32),),
    )
    with mock.patch.object(launch, "GATED_NORM", sizes):
        assert all(map(same_bytes, run(launch, of, o), want))


ROWS, HEADS = Case(5, 72, False, 3), Case(1100, 128)
CHECKS = [
    *(
        case(engine, values, name, night=engine == SM90 and name in ("sigmoid", "wide"))
        for engine, name in itertools.product(ENGINES, CASES)
    ),
    *(case(engine, rows_alone, ROWS) for engine in ENGINES),
    case(INTERPRETER, rows_alone, Case(3, 64, dtype=FP32)),
    case(INTERPRETER, split, HEADS, 1),
    case(INTERPRETER, split, HEADS._replace(rows=2100), 1, 2, night=True),
    case(INTERPRETER, split, Case(140, 330, False), 1),
    case(SM90, split, HEADS, 1, night=True),
    case(SM90, no_size_shows, Case(9, 48, groups=2)),
    case(SM90, no_size_shows, Case(70, 600, False), night=True),
    case(SM90, values, "gate first", **LATE),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_values(engine, check, options):
    with RUNNER.running(engine, **options) as launch:
        check(launch)


VALUES = INTERPRETER, values
SPLIT = INTERPRETER, split, HEADS._replace(dtype=FP32), 1
MUTANTS = {
    "eps_outside_the_root": (
        *(*VALUES, "gate first"),
        ("tl.sqrt_rn(mean + eps)", "(tl.sqrt_rn(mean) + eps)"),
    ),
    "mean_of_the_padded_group": (
        *(*VALUES, "gate first, groups"),
        ("1.0 / rule.group_size, rule.eps", "1.0 / block, rule.eps"),
    ),
    "mean_of_the_padded_group_in_the_gradient": (
        *(*VALUES, "gate first, groups"),
        ("1.0 / rule.group_size,\n            **", "1.0 / padded,\n            **"),
    ),
    "no_projection": (
        *(*VALUES, "gate first"),
        ("of_normed = tl.fma(hat, mean, g) * rstd", "of_normed = g * rstd"),
    ),
    "gate_missing_in_dweight": (
        *(*VALUES, "heads"),
        ("tl.fma(dy * value if NORM_FIRST else dy, hat", "tl.fma(dy, hat"),
    ),
    "weight_missing_in_dgate": (
        *(*VALUES, "heads"),
        ("weighted * hat * slope", "dy * hat * slope"),
    ),
    "slope_of_the_other_sign": (
        *(*VALUES, "sigmoid"),
        ("slope = lower * inverse", "slope = lower * sigmoid"),
    ),
    "an_inverse_of_one_step_less": (
        *(*VALUES, "gate first"),
        ("return tl.fma(inverse, tl.fma(t, t, t), inverse)", "return tl.fma(inverse, t, inverse)"),
    ),
    "rows_of_another_piece": (
        *SPLIT,
        ("left = tl.minimum(M - row, PIECE)", "left = tl.minimum(M - row, PIECE + 1)"),
    ),
    "lanes_follow_the_rows": (
        *SPLIT,
        ("rows, fold = GATED_NORM.rows(padded),", "rows, fold = 16 // (1 + (m > 1050)),"),
    ),
    "pieces_of_a_part_follow_the_rows": (
        *SPLIT,
        (
            "AHEAD=TRITON.add_ahead, FOLD=fold",
            "AHEAD=TRITON.add_ahead, FOLD=fold // (1 + (slots > 4))",
        ),
    ),
    "parts_descending": (
        *SPLIT,
        (
            "slot = tl.minimum(i * FOLD + fold, COUNT - 1)",
            "slot = COUNT - 1 - tl.minimum(i * FOLD + fold, COUNT - 1)",
        ),
    ),
    "squares_of_neighbours": (
        *(INTERPRETER, rows_alone, ROWS),
        ("pairs(normed * normed, ROWS, BLOCK)", "pairs(normed * normed, 1, ROWS * BLOCK)"),
    ),
}


@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
def test_killed(engine, check, edits):
    RUNNER.kill(engine, check, *edits)


#: Call -> bytes of stack that a thread may have: some of the widest rows are kept there.
CODE = {
    "heads": (Case(8, 128), 0),
    "groups": (Case(3, 2048, False, 2, dtype=FP32), 0),
    "no weight": (CASES["gate first, sigmoid, no weight"], 0),
    "widest": (Case(2, 8192, False), 256),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n == "widest")) for n in CODE]
)
@pytest.mark.parametrize("target", TARGETS)
def test_code(target, name):
    """No atomics, no stack, nothing fused, IEEE roots, offsets of 64 bits, for every target."""
    of, stack = CODE[name]
    kernels = RUNNER.compiled(target, lambda: run(RUNNER.launch, of, operands(of)))
    assert {k.name: complaints(k, stack) for k in kernels} == {k.name: [] for k in kernels}
    assert len(kernels) == 3 - (of.weight is None)
