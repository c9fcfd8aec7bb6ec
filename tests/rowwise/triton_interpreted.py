"""The Triton rowwise in Triton's interpreter: their mutants.

Collected by test_triton_interpreter.py only, in a process that has TRITON_INTERPRET=1 before triton
is imported.
"""

from __future__ import annotations

import os

import pytest

from cute_kernels.rowwise.triton import launch

from ..interpreted import same_on_every_machine  # noqa: F401
from . import triton_cases as cases
from .triton_harness import copy_of, cpu_arithmetic, device_guard  # noqa: F401

assert os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.nightly
@pytest.mark.parametrize("check", list(cases.CHECKS))
def test_the_originals_live(check):
    cases.CHECKS[check](launch)


#: name -> (the check that kills it, (old, new) each)
MUTANTS = {
    "a sum of neighbours": (
        cases.lanes,
        (
            "over_columns(tl.reshape(v, [1, LANES]), 1, LANES)",
            "pairs(tl.reshape(v, [1, LANES]), 1, LANES)",
        ),
    ),
    "lanes by the device": (
        cases.lanes,
        ("*like.stride(), LANES=lanes(n)", "*like.stride(), LANES=64"),
    ),
    "tokens descending": (
        cases.embedding,
        ("order_ptr + first + k,", "order_ptr + place + end - 1 - first - k,"),
    ),
    "tokens in fours": (
        cases.embedding,
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
    "tokens from the end": (
        cases.embedding,
        (
            "entry, order = ids.sort(stable=True)",
            "entry, order = ids.flip(0).sort(stable=True)\n    order = len(ids) - 1 - order",
        ),
    ),
    "padding is added": (cases.embedding, ("(v != before) & (v != padding)", "v != before")),
    "a sum from zero": (
        cases.cuts,
        (
            "total = tl.load(into, mask=mask, other=0.0).to(tl.float32)",
            "total = tl.zeros([COLUMNS], tl.float32)",
        ),
    ),
    "squares in fp32": (
        cases.squares,
        ("            x = x * x", "            x = (x * x).to(tl.float32)"),
    ),
    "no maximum": (cases.masked_rows, ("    top = tl.max(top, axis=0)", "    top = 0.0")),
    "the sine's own sign": (
        cases.rotary,
        (
            "sin = tl.where(first[None, :], sin, -sin)",
            "sin = tl.where(first[None, :], -sin, sin)",
        ),
    ),
    "a product that is not rounded": (
        cases.rotary_pair,
        ("    return _stepped(a * b, like_ptr, ROUND)", "    return a * b"),
    ),
    "no zero is added": (
        cases.rotary_pair,
        ("(_product(x2, s2, like, ROUND) + 0.0)", "_product(x2, s2, like, ROUND)"),
    ),
    "the other half's sine": (
        cases.rotary_pair,
        (
            "_product(x1, c1, like, ROUND) - _product(x2, s1, like, ROUND)",
            "_product(x1, c1, like, ROUND) - _product(x2, s2, like, ROUND)",
        ),
    ),
    "one rounding of a gated row": (
        cases.gated_rows,
        (
            "    value = _value(gate, KIND).to(out_ptr.dtype.element_ty).to(tl.float32)\n",
            "    value = _value(gate, KIND)\n",
        ),
    ),
    "up of the next row": (cases.gated_rows, ("(first + N)", "(first + 2 * N)")),
    "k by the strides of q": (
        cases.rotary_pair,
        (
            "Q_TILES, k_ptr, k_out_ptr, cos_ptr, sin_ptr, K_ROWS, K_B, K_C, k_a, k_b, k_c,",
            "Q_TILES, k_ptr, k_out_ptr, cos_ptr, sin_ptr, K_ROWS, K_B, K_C, q_a, q_b, q_c,",
        ),
    ),
    "a gate that is not rounded": (
        cases.gated_in_steps,
        (
            "value = _stepped(_value(_loaded(gate_ptr, at, mask), KIND), gate_ptr, STEPS)",
            "value = _value(_loaded(gate_ptr, at, mask), KIND)",
        ),
    ),
    "a gradient in one step": (
        cases.gated_in_steps,
        ("_slope(gate, KIND) * _product(dy, up, up_ptr, STEPS)", "_slope(gate, KIND) * (dy * up)"),
    ),
    "one part of pi": (cases.tables, ("(angle - n * _PI_0) - n * _PI_1", "(angle - n * _PI_0)")),
}


#: By day every third one.
DAY_AND_NIGHT = [
    pytest.param(name, marks=pytest.mark.nightly if at % 3 else ())
    for at, name in enumerate(MUTANTS)
]


@pytest.mark.parametrize("name", DAY_AND_NIGHT)
def test_killed(tmp_path, name):
    check, *edits = MUTANTS[name]
    mutant = copy_of(tmp_path, *edits)
    with pytest.raises(AssertionError):
        check(mutant)
