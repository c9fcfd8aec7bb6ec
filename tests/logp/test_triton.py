"""The Triton linear_logp: its sm_90 code in ptxsim, its source in the interpreter, and mutants.

What an engine is, and what a row of a table: tests/triton_runner.py.
"""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch

import cute_kernels.gemm.triton as gemm_package
from cute_kernels.logp import api, chunks, config, policy_sweep
from cute_kernels.logp.triton import launch
from cute_kernels.logp.triton import plan as plans
from cute_kernels.runtime import dispatch
from tests.contract import same_bytes
from tests.triton_runner import ENGINES, INTERPRETER, SM90, Runner, case, mutants

from . import policy_cases
from . import triton_cases as cases
from .triton_cases import BF16, FP16, FP32, NAMES, Shape
from .triton_engine import RUNNER

pytestmark = pytest.mark.simulates("logp.triton")

RANDOM = {"warp_order": 1, "cta_order": 1, "seed": 5}


def in_blocks(launch, size: int, rows: int) -> None:
    """A workspace of so many bytes, or blocks of so many rows, show in no byte."""
    with mock.patch.multiple(plans, WORKSPACE=size, BLOCK_ROWS=rows):
        given = cases.hidden(FP32, "chain", bias=True)
        blocks = list(launch._Blocks(given.hidden, given.head))
        sizes = {(r.stop - r.start) * (c.stop - c.start) * 4 for r, c in blocks}
        assert len(blocks) > 1 and max(sizes) <= size
        assert all(c.start % 16 == 0 for _, c in blocks)
        cases.heads(launch, FP32, "chain", True)


def masked_is_no_index(launch) -> None:
    """What lies before a row is NaN, and can be read; what lies before the first one cannot."""
    given = cases.whole_powers(144)
    given.rows.target[::2] = config.MASKED
    cases.states_bytes(launch, given._replace(logits=cases.padded(given.logits)))
    cases.states_bytes(launch, given)


def by_day(dtype: torch.dtype, number: int) -> bool:
    """Every shape in fp32, and the other dtypes once."""
    return dtype == FP32 or (dtype, number) in ((BF16, 4), (FP16, 6))


SHAPES = [(d, i, shape) for d in NAMES for i, shape in enumerate(cases.SHAPES)]
HEADS = ((BF16, "chain", True), (FP32, "tree", False))
#: (bytes, rows) of a block: of all rows, of 16 columns, of few rows.
BLOCKS = ((4 * 9 * 112, 2048), (4 * 4 * 16, 4), (4 * 5 * 96, 5))
CHECKS = [
    case(SM90, cases.order, **RANDOM),
    case(SM90, cases.rows_alone, 144, **RANDOM),
    case(SM90, cases.rows_alone, 144, BF16, night=True, **RANDOM),
    case(SM90, cases.layouts, FP32, **RANDOM),
    case(SM90, cases.layouts, BF16, night=True, **RANDOM),
    *(
        case(engine, check)
        for engine in ENGINES
        for check in (cases.parts, cases.masked_nan, masked_is_no_index)
    ),
    *(case(SM90, cases.near_float64, softcap, **RANDOM) for softcap in (0.0, 20.0)),
    case(SM90, cases.far_rows),
    *(case(SM90, cases.finished, entropy, 1, 3, 40, 100) for entropy in (False, True)),
    *(case(SM90, cases.scaled, dtype) for dtype in policy_cases.HALVES_AND_FP32),
    case(SM90, cases.scaled_by_one),
    *(
        case(INTERPRETER, check, shape, dtype, night=not by_day(dtype, number))
        for check in (cases.states, cases.gradients)
        for dtype, number, shape in SHAPES
    ),
    *(
        case(INTERPRETER, check)
        for check in (cases.odd_logits, cases.beyond_the_clamp, cases.order)
    ),
    case(INTERPRETER, cases.rows_alone, 400, night=True),
    *(case(INTERPRETER, cases.layouts, dtype, night=dtype != FP16) for dtype in NAMES),
    *(
        case(INTERPRETER, cases.heads, *of, night=of not in HEADS)
        for of in itertools.product(NAMES, ("chain", "tree"), (True, False))
    ),
    *(case(INTERPRETER, in_blocks, *of, night=of != BLOCKS[0]) for of in BLOCKS),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_values(engine, check, options):
    """Of two compute units, so that a part has several tiles."""
    with RUNNER.running(engine, **options) as launch, cases.units(launch, 2):
        check(launch)


@pytest.mark.parametrize("order", ["chain", "tree"])
@pytest.mark.parametrize("tokens", [1, 100, 5000, 70000])
def test_blocks_fit_the_workspace(tokens, order):
    """The leaves of a block and their sum count."""
    head = cases.hidden(FP32, order, bias=False).head
    head = head._replace(weight=torch.empty(200_000, 4096, device="meta"))
    blocks = launch._Blocks(torch.empty(tokens, 4096, device="meta"), head)
    held = blocks.height * blocks.width * 4 * (9 if order == "tree" else 1)
    assert blocks.width % 16 == 0 and held <= 16 * 2**20
    assert held > 8 * 2**20 or blocks.width == 200_000


# ---- through the ops -----------------------------------------------------------------------------

#: For the interpreter, which bounds no writes.
GEMM = Runner(gemm_package, {})
#: Op -> its launcher's name.
LAUNCHERS = {
    "logp_states": "states",
    "logit_states": "states_of_logits",
    "logp_gradients": "gradients",
    "logit_gradients": "gradients_of_logits",
    "logp_gradients_kept": "gradients_of_sums",
}


@contextlib.contextmanager
def through_the_kernels(**others):
    """While it lasts, the ops run on the interpreted kernels of two units, and on ``others``."""
    true = dispatch.launcher
    with RUNNER.running(INTERPRETER) as launch, cases.units(launch, 2):
        launchers = {op: getattr(launch, name) for op, name in LAUNCHERS.items()} | others

        def launcher(op, device, dtype):
            return launchers.get(op) or true(op, device, dtype)

        with mock.patch.object(dispatch, "launcher", launcher):
            yield


def results(tokens: int, dtype: torch.dtype, order: str) -> list[torch.Tensor]:
    """Results and gradients of both public functions."""
    given = cases.hidden(dtype, order, bias=True, tokens=tokens)
    x, weight, bias = given.hidden, given.head.weight, given.head.bias
    logits = torch.randn(tokens, 300, generator=torch.Generator().manual_seed(2))
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, logits)]
    target = torch.arange(tokens) * 7
    target[1] = -100
    options = {"temperature": torch.linspace(0.5, 2, tokens), "softcap": 20.0}
    options["return_entropy"] = True
    made = [*api.linear_logp(leaves[0], leaves[1], target, leaves[2], order=order, **options)]
    made += api.log_probs(leaves[3], target, vocab_size=290, **options)
    seeds = [torch.linspace(-1, 1, tokens) for _ in made]
    return [t.detach() for t in made] + list(torch.autograd.grad(made, leaves, seeds))


@pytest.mark.parametrize(
    ("dtype", "order"),
    [(BF16, "tree"), pytest.param(FP32, "chain", marks=pytest.mark.nightly)],
    ids=str,
)
def test_through_the_ops(dtype, order):
    """On the kernels the public functions give what they give on a CPU."""
    want = results(9, dtype, order)
    with through_the_kernels():
        got = results(9, dtype, order)
    assert len(got) == 8
    assert all(same_bytes(one, two) for one, two in zip(got, want, strict=True))


@pytest.mark.parametrize("tokens", [16, pytest.param(1 << 20, marks=pytest.mark.nightly)])
def test_policy_loss(tokens, monkeypatch):
    """Products and kernels of Triton: the bytes of linear_logp, dweight as into main_grad."""
    x = policy_cases.problem("grpo", "some", sizes=(2, 17, 40, 290))
    options = policy_cases.options_of("grpo")
    policy_cases.budget(monkeypatch, tokens, x)
    monkeypatch.setattr(policy_sweep, "chained", lambda t: True)
    state = torch.zeros(x.weight.shape)
    with GEMM.running(INTERPRETER) as gemm:
        products = {"gemm": gemm.gemm, "leaf_sums": gemm.leaf_sums}
        with through_the_kernels(**products, logp_add_hidden=chunks.add_hidden):
            got = policy_cases.fused("grpo", x, **options)
            want = policy_cases.composed("grpo", x, main_grad=state, **options)
    want = want._replace(weight=state.to(BF16))
    assert got.weight.any() and abs(got.loss - want.loss) <= 1e-5 * abs(want.loss)
    for name, a, b in zip(got._fields[1:], got[1:], want[1:], strict=True):
        assert (a is None) == (b is None) and (a is None or same_bytes(a, b)), name


# ---- mutants -------------------------------------------------------------------------------------

HALF = "half = tl.sum(tl.reshape(v, [ROWS, UNITS, 2, 8]), axis=2)"
PAIR = "pair = tl.sum(tl.reshape(half, [ROWS, UNITS, 4, 2]), axis=3)"
MAX = "y = tl.max(z, axis=2) * scale[:, None]"
HERE = "here = (target >= first * COLUMNS) & ("
KEPT = "tl.where((columns < valid) & (target >= 0), gradient, 0.0)"
WITH = "s[j] + tl.where(below == j, value, tl.zeros_like(value))"
CLAMP = "y = tl.where(y > _MAX_EXPONENT, _MAX_EXPONENT, y) + _ROUND"
PADDED, MANY = Shape(9, 300, start=4096, vocab=4096 + 201), Shape(9, 1008)
ORDER = INTERPRETER, cases.order
STATES, GRADIENTS = (INTERPRETER, cases.states, MANY), (INTERPRETER, cases.gradients, MANY)
IN_PADDING, GRADIENTS_IN_PADDING = (
    (INTERPRETER, check, PADDED) for check in (cases.states, cases.gradients)
)
FINISHED = SM90, cases.finished, True, 3, 40, 100

MUTANTS = {
    "neighbours_first": (*ORDER, (HALF, HALF.replace("2, 8]), axis=2", "8, 2]), axis=3"))),
    "neighbours_first_in_machine_code": (
        *(SM90, cases.order),
        (HALF, HALF.replace("2, 8]), axis=2", "8, 2]), axis=3")),
    ),
    "neighbours_at_a_distance": (*ORDER, (PAIR, PAIR.replace("4, 2]), axis=3", "2, 4]), axis=2"))),
    "exponent_of_a_tile": (
        *STATES,
        (
            MAX,
            "y = (tl.max(z, axis=2) * 0.0 + tl.max(tl.max(z, axis=2), axis=1)[:, None])"
            " * scale[:, None]",
        ),
    ),
    "exponent_rounded_down": (*STATES, (CLAMP, CLAMP.replace("+ _ROUND", "- 0.5 + _ROUND"))),
    "temperature_rounded": (
        *STATES,
        ("tl.fma(z, scales, -(y - _ROUND)[:, :, None])", "z * scales - (y - _ROUND)[:, :, None]"),
    ),
    "temperature_rounded_in_the_gradient": (
        *GRADIENTS,
        ("tl.fma(z, scale, lse2 * -1.0)", "z * scale - lse2"),
    ),
    "units_added_in_fp32": (
        *STATES,
        (WITH, f"({WITH.replace(' +', '.to(tl.float32) +')}.to(tl.float32)).to(tl.int64)"),
    ),
    "bins_not_moved": (
        *(INTERPRETER, cases.states, Shape(9, 3008)),
        ("_with(_below(sums, new_top - top), below, value)", "_with(sums, below, value)"),
    ),
    "lanes_not_moved": (*STATES, ("moved = _below(s, by)", "moved = s")),
    "memory_not_moved": (
        *(INTERPRETER, in_blocks, 4 * 9 * 48, 2048),
        ("stored = _below(stored, by)", "pass"),
    ),
    "padding_counted": (*IN_PADDING, ("tl.where(columns < valid, z,", "tl.where(columns < N, z,")),
    "masked_target_is_an_index": (*(INTERPRETER, masked_is_no_index), (HERE, "here = in_t & (")),
    "masked_target_is_an_index_in_machine_code": (*(SM90, masked_is_no_index), (HERE, "here = (")),
    "chosen_in_every_part": (INTERPRETER, cases.parts, (HERE, "here = (target >= 0) & (")),
    "start_forgotten": (*IN_PADDING, ("other=-1) - start", "other=-1)")),
    "start_forgotten_in_the_gradient": (
        *GRADIENTS_IN_PADDING,
        ("column + start == target", "column == target"),
    ),
    "mask_multiplied": (
        *(INTERPRETER, cases.masked_nan),
        (KEPT, "gradient * ((columns < valid) & (target >= 0)).to(tl.float32)"),
    ),
    "masked_rows_have_gradients": (
        *GRADIENTS,
        (KEPT, KEPT.replace("(target >= 0)", "(target >= -1)")),
    ),
    "padding_has_gradients": (
        *GRADIENTS_IN_PADDING,
        (KEPT, KEPT.replace("columns < valid", "columns < N")),
    ),
    "nan_clamped": (
        *(INTERPRETER, cases.odd_logits),
        (
            "tl.exp2(tl.where(power > 120.0, 120.0, power))",
            "tl.exp2(tl.where(power <= 120.0, power, 120.0))",
        ),
    ),
    "nan_is_an_empty_unit": (
        *(INTERPRETER, cases.odd_logits),
        ("tl.where(total < _MOST, _EMPTY, _LOST)", "_EMPTY"),
    ),
    "huge_sums_kept": (
        *(INTERPRETER, cases.beyond_the_clamp),
        ("_MOST = tl.constexpr(32.0)", '_MOST = tl.constexpr(float("inf"))'),
    ),
    "clamp_dropped": (INTERPRETER, cases.odd_logits, (CLAMP, "y = y + _ROUND")),
    "bias_dropped": (
        *(INTERPRETER, cases.heads, FP32, "chain", True),
        ("z = z + bias.to(tl.float32)", "pass"),
    ),
    "entropy_of_the_unit": (
        *STATES,
        ("tl.fma(total, place.to(tl.float32),", "tl.fma(total, 0.0 * total,"),
    ),
    # The kernel that finishes states.
    "sums_stay_in_their_bins": (
        *FINISHED,
        ("at, here, own, by)\n        if", "at, here, 0, by)\n        if"),
    ),
    "weighted_sums_stay": (*FINISHED, ("_WEIGHTED, at, here, own,", "_WEIGHTED, at, here, 0,")),
    "a_sum_in_fp32": (
        *FINISHED,
        (
            "total = total * _STEP + s[_BINS - 1 - j]",
            "total = (total * _STEP + s[_BINS - 1 - j]).to(tl.float32).to(tl.float64)",
        ),
    ),
    "four_terms_less": (*FINISHED, ("tl.static_range(1, _TERMS)", "tl.static_range(5, _TERMS)")),
    "constants_in_fp32": (
        *FINISHED,
        (
            "tl.full((ROWS,), value, tl.float64)",
            "tl.full((ROWS,), value, tl.float32).to(tl.float64)",
        ),
    ),
}


@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
def test_killed(engine, check, edits):
    def on_two_units(launch):
        with cases.units(launch, 2):
            check(launch)

    RUNNER.kill(engine, on_two_units, *edits)
