"""The Triton rowwise: its sm_90 code in ptxsim, its source in the interpreter, and mutants.

What an engine is, and what a row of a table: tests/triton_runner.py.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.rowwise import config, cpu
from cute_kernels.rowwise.triton import launch
from ptxsim.skips import requires_core
from tests.triton_runner import INTERPRETER, SM90, case, mutants

from . import rotary_cases
from . import triton_cases as cases
from .cases import BF16, DTYPES, FP32
from .triton_engine import RUNNER

pytestmark = pytest.mark.simulates("rowwise.triton")

RANDOM = {"warp_order": 1, "cta_order": 1, "seed": 5}
CHECKS = [
    *(case(SM90, check, **RANDOM) for check in cases.CHECKS.values()),
    *(case(INTERPRETER, check, night=True) for check in cases.CHECKS.values()),
    *(
        case(
            *(SM90, cases.activations, kind, dtype),
            night=dtype != FP32 or kind not in ("silu", "gelu_tanh"),
            **RANDOM,
        )
        for kind, dtype in itertools.product(config.KINDS, DTYPES)
    ),
    *(
        case(SM90, cases.softmax, width, dtype, night=width not in (7, 1030), **RANDOM)
        for width, dtype in cases.WIDTHS
    ),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_values(engine, check, options):
    with RUNNER.running(engine, **options) as launch:
        check(launch)


@pytest.mark.sim
@requires_core
def test_a_plan_of_q_and_k_launches_what_its_launcher_does():
    """Of its own call, and of another with its signature."""
    one, other = (rotary_cases.operands(BF16, BF16, 16, 20, seed) for seed in (0, 5))
    # `call` sets the device for a plan.
    with RUNNER.simulated(**RANDOM), torch.cuda.device(one[0].device):
        for options in ((1, FP32, False), (1, BF16, True)):
            plan = launch.plan_rotary_pair(*one, *options)
            assert plan.fresh and plan.cacheable
            for args in (one, other):
                got, want = plan.run(*args, *options), cpu.rotary_pair(*args, *options)
                assert all(map(rotary_cases.same_numbers, got, want))
                assert [t.stride() for t in got] == [t.stride() for t in want]


# ---- mutants -------------------------------------------------------------------------------------

SUM = "over_columns(tl.reshape(v, [1, LANES]), 1, LANES)"
NEIGHBOURS = SUM, SUM.replace("over_columns", "pairs")
MUTANTS = {
    "a_sum_of_neighbours": (INTERPRETER, cases.lanes, NEIGHBOURS),
    "a_sum_of_neighbours_in_machine_code": (SM90, cases.lanes, NEIGHBOURS),
    "lanes_by_the_device": (
        *(INTERPRETER, cases.lanes),
        ("*like.stride(), LANES=lanes(n)", "*like.stride(), LANES=64"),
    ),
    "tokens_descending": (
        *(INTERPRETER, cases.embedding),
        ("order_ptr + first + k,", "order_ptr + place + end - 1 - first - k,"),
    ),
    "tokens_in_fours": (
        *(INTERPRETER, cases.embedding),
        (
            "        for first in range(place, end, _UNROLL):\n",
            "        for first in range(place, end, _UNROLL):\n"
            "            four = tl.zeros([COLUMNS], tl.float32)\n",
        ),
        (
            "total = tl.where(there, total + dy, total)",
            "four = tl.where(there, four + dy, four)\n            total += four",
        ),
    ),
    "tokens_from_the_end": (
        *(INTERPRETER, cases.embedding),
        (
            "entry, order = ids.sort(stable=True)",
            "entry, order = ids.flip(0).sort(stable=True)\n    order = len(ids) - 1 - order",
        ),
    ),
    "padding_is_added": (
        *(INTERPRETER, cases.embedding),
        ("(v != before) & (v != padding)", "v != before"),
    ),
    "a_sum_from_zero": (
        *(INTERPRETER, cases.cuts),
        (
            "total = tl.load(into, mask=mask, other=0.0).to(tl.float32)",
            "total = tl.zeros([COLUMNS], tl.float32)",
        ),
    ),
    "squares_in_fp32": (
        *(INTERPRETER, cases.squares),
        ("            x = x * x", "            x = (x * x).to(tl.float32)"),
    ),
    "no_maximum": (
        *(INTERPRETER, cases.masked_rows),
        ("    top = tl.max(top, axis=0)", "    top = 0.0"),
    ),
    "the_sines_own_sign": (
        *(INTERPRETER, cases.rotary),
        ("sin = tl.where(first[None, :], sin, -sin)", "sin = tl.where(first[None, :], -sin, sin)"),
    ),
    "a_product_that_is_not_rounded": (
        *(INTERPRETER, cases.rotary_pair),
        ("    return _stepped(a * b, like_ptr, ROUND)", "    return a * b"),
    ),
    "no_zero_is_added": (
        *(INTERPRETER, cases.rotary_pair),
        ("(_product(x2, s2, like, ROUND) + 0.0)", "_product(x2, s2, like, ROUND)"),
    ),
    "the_other_halfs_sine": (
        *(INTERPRETER, cases.rotary_pair),
        (
            "_product(x1, c1, like, ROUND) - _product(x2, s1, like, ROUND)",
            "_product(x1, c1, like, ROUND) - _product(x2, s2, like, ROUND)",
        ),
    ),
    "one_rounding_of_a_gated_row": (
        *(INTERPRETER, cases.gated_rows),
        (
            "value(gate, KIND).to(out_ptr.dtype.element_ty).to(tl.float32)\n",
            "value(gate, KIND)\n",
        ),
    ),
    "up_of_the_next_row": (*(INTERPRETER, cases.gated_rows), ("(first + N)", "(first + 2 * N)")),
    "k_by_the_strides_of_q": (
        *(INTERPRETER, cases.rotary_pair),
        (
            "Q_TILES, k_ptr, k_out_ptr, cos_ptr, sin_ptr, K_ROWS, K_B, K_C, k_a, k_b, k_c,",
            "Q_TILES, k_ptr, k_out_ptr, cos_ptr, sin_ptr, K_ROWS, K_B, K_C, q_a, q_b, q_c,",
        ),
    ),
    "a_gate_that_is_not_rounded": (
        *(INTERPRETER, cases.gated_in_steps),
        (
            "_stepped(activation_value(_loaded(gate_ptr, at, mask), KIND), gate_ptr, STEPS)",
            "activation_value(_loaded(gate_ptr, at, mask), KIND)",
        ),
    ),
    "a_gradient_in_one_step": (
        *(INTERPRETER, cases.gated_in_steps),
        (
            "activation_slope(gate, KIND) * _product(dy, up, up_ptr, STEPS)",
            "activation_slope(gate, KIND) * (dy * up)",
        ),
    ),
    "one_part_of_pi": (
        *(INTERPRETER, cases.tables),
        ("(angle - n * _PI_0) - n * _PI_1", "(angle - n * _PI_0)"),
    ),
}


@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
def test_killed(engine, check, edits):
    RUNNER.kill(engine, check, *edits)
