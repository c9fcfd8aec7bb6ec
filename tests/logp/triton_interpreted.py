"""The Triton linear_logp in Triton's interpreter: its states are the CPU backend's, byte for byte.

Collected by test_triton_interpreter.py only, in a process that has TRITON_INTERPRET=1 before triton
is imported.  2^y and fma are the CPU backend's.  The interpreter truncates when it stores bf16, so
gradients are rounded outside the kernel.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch

from cute_kernels.gemm.triton import launch as gemm_launch
from cute_kernels.logp import api, chunks, policy_sweep
from cute_kernels.logp.triton import launch
from cute_kernels.logp.triton import plan as plans

from ..contract import same_bytes
from ..interpreted import same_on_every_machine  # noqa: F401
from . import policy_cases
from . import triton_cases as cases
from .triton_cases import BF16, FP16, FP32, NAMES, Shape
from .triton_harness import copy_of, exponentials_of_the_cpu, through  # noqa: F401

assert os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def by_night(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


def engine(module=launch, units: int = 2) -> cases.Engine:
    def states(hidden, head, rows, entropy, sums=None):
        return module._states(hidden, head, rows, entropy, units, sums)

    return cases.Engine(
        states,
        functools.partial(module._states_of_logits, units=units),
        functools.partial(module._gradients, interpret=True),
        functools.partial(module._gradients_of_logits, interpret=True),
    )


#: Every shape in fp32, and each dtype once; the others by night.
CHOSEN = ((BF16, 4), (FP16, 6))
SHAPES = [
    pytest.param(
        dtype,
        shape,
        id=f"{NAMES[dtype]}-{number}",
        marks=() if (dtype, number) in CHOSEN or dtype == FP32 else pytest.mark.nightly,
    )
    for dtype in NAMES
    for number, shape in enumerate(cases.SHAPES)
]


@pytest.mark.parametrize(("dtype", "shape"), SHAPES)
def test_states(dtype, shape):
    cases.states_bytes(engine(), cases.case(shape, dtype))


@pytest.mark.parametrize(("dtype", "shape"), SHAPES)
def test_gradients(dtype, shape):
    cases.gradients_bytes(engine(), cases.case(shape, dtype), dtype)


@pytest.mark.parametrize(
    "check", [cases.odd_logits, cases.beyond_the_clamp, cases.order, cases.masked_nan]
)
def test_values(check):
    check(engine())


def test_no_part_shows():
    cases.parts(engine(units=units) for units in (1, 2, 132))


@pytest.mark.nightly
def test_no_row_sees_another():
    cases.rows_alone(engine())


@pytest.mark.parametrize("dtype", [FP16, by_night(BF16), by_night(FP32)], ids=str)
def test_layouts(dtype):
    cases.layouts(engine(), dtype)


@pytest.mark.parametrize(
    ("dtype", "order", "bias"),
    [
        (BF16, "chain", True),
        (FP32, "tree", False),
        by_night(BF16, "tree", False),
        by_night(FP16, "chain", False),
        by_night(FP16, "tree", True),
        by_night(FP32, "chain", False),
        by_night(FP32, "tree", True),
    ],
)
def test_heads(dtype, order, bias):
    cases.head_bytes(engine(), cases.hidden(dtype, order, bias=bias))


#: (bytes, rows) of a block: of 16 columns, of few rows, of all rows.
BLOCKS = [
    by_night(4 * 4 * 16, 4),
    by_night(4 * 5 * 96, 5),
    (4 * 9 * 112, 2048),
]


@pytest.mark.parametrize(("workspace", "rows"), BLOCKS)
def test_no_block_shows(monkeypatch, workspace, rows):
    monkeypatch.setattr(plans, "WORKSPACE", workspace)
    monkeypatch.setattr(plans, "BLOCK_ROWS", rows)
    given = cases.hidden(FP32, "chain", bias=True)
    blocks = list(launch._Blocks(given.hidden, given.head))
    sizes = {(r.stop - r.start) * (c.stop - c.start) * 4 for r, c in blocks}
    assert len(blocks) > 1 and max(sizes) <= workspace
    assert all(c.start % 16 == 0 for _, c in blocks)
    cases.head_bytes(engine(), given)


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


def through_the_ops(tokens: int, dtype: torch.dtype, order: str) -> list[torch.Tensor]:
    """Results and gradients of both public functions."""
    given = cases.hidden(dtype, order, bias=True, tokens=tokens)
    x, weight, bias = given.hidden, given.head.weight, given.head.bias
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, torch.randn(tokens, 300))]
    target = torch.arange(tokens) * 7
    target[1] = -100
    options = {"temperature": torch.linspace(0.5, 2, tokens), "softcap": 20.0}
    options["return_entropy"] = True
    made = [*api.linear_logp(leaves[0], leaves[1], target, leaves[2], order=order, **options)]
    made += api.log_probs(leaves[3], target, vocab_size=290, **options)
    seeds = [torch.linspace(-1, 1, tokens) for _ in made]
    return [t.detach() for t in made] + list(torch.autograd.grad(made, leaves, seeds))


@pytest.mark.parametrize(("dtype", "order"), [(BF16, "tree"), by_night(FP32, "chain")], ids=str)
def test_through_the_ops(dtype, order):
    """On the kernels the public functions give what they give on a CPU."""
    torch.manual_seed(2)
    want = through_the_ops(9, dtype, order)
    torch.manual_seed(2)
    entries = ("logp_states", "logit_states", "logp_gradients", "logit_gradients")
    with through(dict(zip(entries, engine(), strict=True))):
        got = through_the_ops(9, dtype, order)
    assert len(got) == 8
    assert all(same_bytes(one, two) for one, two in zip(got, want, strict=True))


def gemm_interpreted(a, b, bias, accumulator=None, order="chain", out=None):
    made = gemm_launch._launch(a, b, bias, accumulator, 132, interpret=True)
    return made if out is None else out.copy_(made)


def leaf_sums_interpreted(a, b, length):
    chosen = gemm_launch.plans.skinny("gfx942", gemm_launch.plan_of(a.dtype))
    return gemm_launch._launch_leaf_sums(a, b, length, chosen, 132, interpret=True)


def kept_interpreted(sums, head, rows, upstream, out):
    wide = torch.empty(out.shape)
    launch._launch_gradients(launch._columns_of(sums, head), rows, upstream, wide)
    out.copy_(wide)


@pytest.mark.parametrize("tokens", [16, by_night(1 << 20)])
def test_policy_loss(tokens, monkeypatch):
    """Products and kernels of Triton: the bytes of linear_logp, dweight as into main_grad."""
    x = policy_cases.problem("grpo", "some", sizes=(2, 17, 40, 290))
    options = policy_cases.options_of("grpo")
    names = ("logp_states", "logit_states", "logp_gradients", "logit_gradients")
    entries = dict(zip(names, engine(), strict=True))
    entries |= {"gemm": gemm_interpreted, "leaf_sums": leaf_sums_interpreted}
    entries |= {"logp_add_hidden": chunks.add_hidden, "logp_gradients_kept": kept_interpreted}
    policy_cases.budget(monkeypatch, tokens, x)
    monkeypatch.setattr(policy_sweep, "chained", lambda t: True)
    state = torch.zeros(x.weight.shape)
    with through(entries):
        got = policy_cases.fused("grpo", x, **options)
        want = policy_cases.composed("grpo", x, main_grad=state, **options)
    want = want._replace(weight=state.to(BF16))
    assert got.weight.any() and abs(got.loss - want.loss) <= 1e-5 * abs(want.loss)
    for name, a, b in zip(got._fields[1:], got[1:], want[1:], strict=True):
        assert (a is None) == (b is None) and (a is None or same_bytes(a, b)), name


def states_of(shape: Shape):
    return lambda module: cases.states_bytes(engine(module), cases.case(shape))


def gradients_of(shape: Shape):
    return lambda module: cases.gradients_bytes(engine(module), cases.case(shape), FP32)


def on_engine(check):
    return lambda module: check(engine(module))


def heads(module):
    cases.head_bytes(engine(module), cases.hidden(FP32, "chain", bias=True))


def by_parts(module):
    cases.parts(engine(module, units) for units in (1, 132))


def masked_is_no_index(module):
    """What lies before a row is NaN, and can be read."""
    given = cases.case(MANY)
    given = given._replace(logits=cases.padded(given.logits))
    cases.states_bytes(engine(module), given)


HALF = "half = tl.sum(tl.reshape(v, [ROWS, UNITS, 2, 8]), axis=2)"
PAIR = "pair = tl.sum(tl.reshape(half, [ROWS, UNITS, 4, 2]), axis=3)"
MAX = "y = tl.max(z, axis=2) * scale[:, None]"
HERE = "here = (target >= first * COLUMNS) & ("
KEPT = "tl.where((columns < valid) & (target >= 0), gradient, 0.0)"
WITH = "s[j] + tl.where(below == j, value, tl.zeros_like(value))"
PADDED, MANY = Shape(9, 300, start=4096, vocab=4096 + 201), Shape(9, 1008)
ORDER = on_engine(cases.order)

MUTANTS = {
    "neighbours_first": (HALF, HALF.replace("2, 8]), axis=2", "8, 2]), axis=3"), ORDER),
    "neighbours_at_a_distance": (PAIR, PAIR.replace("4, 2]), axis=3", "2, 4]), axis=2"), ORDER),
    "exponent_of_a_tile": (
        MAX,
        "y = (tl.max(z, axis=2) * 0.0 + tl.max(tl.max(z, axis=2), axis=1)[:, None])"
        " * scale[:, None]",
        states_of(MANY),
    ),
    "exponent_rounded_down": ("> _MAX_EXPONENT, _MAX_EXPONENT, y) + _ROUND",
        "> _MAX_EXPONENT, _MAX_EXPONENT, y) - 0.5 + _ROUND", states_of(MANY)),
    "temperature_rounded": (
        "tl.fma(z, scales, -(y - _ROUND)[:, :, None])",
        "z * scales - (y - _ROUND)[:, :, None]",
        states_of(MANY),
    ),
    "temperature_rounded_in_the_gradient": (
        "tl.fma(z, scale, lse2 * -1.0)", "z * scale - lse2", gradients_of(MANY)),
    "units_added_in_fp32": (
        WITH,
        f"({WITH.replace(' +', '.to(tl.float32) +')}.to(tl.float32)).to(tl.int64)",
        states_of(MANY),
    ),
    "bins_not_moved": ("_with(_below(sums, new_top - top), below, value)",
        "_with(sums, below, value)",
        states_of(Shape(9, 3008))),
    "lanes_not_moved": ("moved = _below(s, by)", "moved = s", states_of(MANY)),
    "memory_not_moved": ("stored = _below(stored, by)", "pass", "blocks"),
    "padding_counted": ("tl.where(columns < valid, z,", "tl.where(columns < N, z,",
        states_of(PADDED)),
    "masked_target_is_an_index": (HERE, "here = in_t & (", masked_is_no_index),
    "chosen_in_every_part": (HERE, "here = (target >= 0) & (", by_parts),
    "start_forgotten": ("other=-1) - start", "other=-1)", states_of(PADDED)),
    "start_forgotten_in_the_gradient": ("column + start == target", "column == target",
        gradients_of(PADDED)),
    "mask_multiplied": (
        KEPT,
        "gradient * ((columns < valid) & (target >= 0)).to(tl.float32)",
        on_engine(cases.masked_nan),
    ),
    "masked_rows_have_gradients": (KEPT, KEPT.replace("(target >= 0)", "(target >= -1)"),
        gradients_of(MANY)),
    "padding_has_gradients": (KEPT, KEPT.replace("columns < valid", "columns < N"),
        gradients_of(PADDED)),
    "nan_clamped": (
        "tl.exp2(tl.where(power > 120.0, 120.0, power))",
        "tl.exp2(tl.where(power <= 120.0, power, 120.0))",
        on_engine(cases.odd_logits),
    ),
    "nan_is_an_empty_unit": ("tl.where(total < _MOST, _EMPTY, _LOST)", "_EMPTY",
        on_engine(cases.odd_logits)),
    "huge_sums_kept": (
        "_MOST = tl.constexpr(32.0)",
        '_MOST = tl.constexpr(float("inf"))',
        on_engine(cases.beyond_the_clamp),
    ),
    "clamp_dropped": ("y = tl.where(y > _MAX_EXPONENT, _MAX_EXPONENT, y) + _ROUND",
        "y = y + _ROUND", on_engine(cases.odd_logits)),
    "bias_dropped": ("z = z + bias.to(tl.float32)", "pass", heads),
    "entropy_of_the_unit": ("tl.fma(total, place.to(tl.float32),", "tl.fma(total, 0.0 * total,",
        states_of(MANY)),
}  # fmt: skip


def blocks(module, monkeypatch) -> None:
    monkeypatch.setattr(plans, "WORKSPACE", 4 * 9 * 48)
    heads(module)


#: By day every second one.
DAY_AND_NIGHT = [
    pytest.param(name, marks=pytest.mark.nightly if at % 2 else ())
    for at, name in enumerate(MUTANTS)
]


@pytest.mark.parametrize("name", DAY_AND_NIGHT)
def test_killed(monkeypatch, tmp_path, name):
    old, new, check = MUTANTS[name]
    if isinstance(check, str):
        check = functools.partial(globals()[check], monkeypatch=monkeypatch)
    mutant = copy_of(tmp_path, (old, new))
    with pytest.raises(AssertionError):
        check(mutant)
