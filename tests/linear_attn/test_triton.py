"""The convolution's Triton kernels: their sm_90 code in ptxsim, their source in the interpreter.

What an engine is, and what a row of a table: tests/triton_runner.py.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.linear_attn import cpu
from cute_kernels.linear_attn.tensors import Conv, ConvGradients
from cute_kernels.linear_attn.triton import launch as launcher
from tests.contract import same_bytes
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

from .cases import BF16, CASES, FP32, Case, Operands, operands
from .triton_engine import RUNNER

pytestmark = pytest.mark.simulates("linear_attn.triton")


def run(launch, given: Case, o: Operands, sums=None) -> list[torch.Tensor]:
    """Results of both passes: y, dx, dweight, dbias, and d_initial if there are states."""
    call = Conv(*o[:4]), given.sequences, given.silu
    if sums is None:
        sums = torch.zeros(o.weight.shape), torch.zeros(given.channels)
    y, dx = (torch.full_like(o.x, float("nan")) for _ in range(2))
    launch.conv(*call, y)
    d_initial = None if o.initial is None else torch.full_like(o.initial, float("nan"))
    launch.conv_backward(o.dy, *call, ConvGradients(dx, *sums, d_initial))
    return [y, dx, *sums, *([] if d_initial is None else [d_initial])]


def close(actual: torch.Tensor, expected: torch.Tensor, eps: float) -> bool:
    scale = expected.double().abs().max() if expected.numel() else 0
    return bool(((actual.double() - expected.double()).abs() <= eps * (scale + 1e-9)).all())


def values(launch, name: str) -> None:
    """Both passes against the CPU backend, which test_conv.py holds to float64."""
    given, o = CASES[name], operands(CASES[name])
    eps = torch.finfo(given.dtype).eps
    y, dx, *sums = run(launch, given, o)
    want_y, want_dx, *want_sums = run(cpu, given, o)
    assert close(y, want_y, max(eps / 2, 1e-6)) and close(dx, want_dx, max(eps / 2, 1e-6))
    bounds = 1e-6, 1e-6, max(eps / 2, 1e-6)
    assert all(map(close, sums, want_sums, bounds[: len(sums)]))


def neighbours(launch, lengths: tuple[int, ...], behind: int) -> None:
    """A sequence of a pack has the bytes that it has alone; what is behind the pack is 0."""
    pack = Case(lengths, behind=behind)
    o = operands(pack)
    y, dx, _, _, d_initial = run(launch, pack, o)
    for s, (first, end) in enumerate(pack.sequences.bounds()):
        if end == first:
            continue
        rows = slice(first, end)
        part = o._replace(x=o.x[rows], dy=o.dy[rows], initial=o.initial[s : s + 1])
        alone = run(launch, Case((end - first,), batch=1), part)
        assert same_bytes(alone[0], y[rows]) and same_bytes(alone[1], dx[rows])
        assert same_bytes(alone[4][0], d_initial[s])
    for t in (y, dx):
        assert not t[sum(lengths) :].view(torch.int16).any()


def nan_neighbours(launch) -> None:
    """Rows behind the pack, and another sequence's, may be NaN."""
    pack = Case((66, 2), behind=2)
    o = operands(pack)
    want = run(launch, pack, o)
    x, dy, initial = o.x.clone(), o.dy.clone(), o.initial.clone()
    x[66:], dy[66:], initial[1] = float("nan"), float("nan"), float("nan")
    got = run(launch, pack, o._replace(x=x, dy=dy, initial=initial))
    assert same_bytes(got[0][:66], want[0][:66]) and same_bytes(got[1][:66], want[1][:66])
    assert same_bytes(got[4][0], want[4][0])


def split(launch, dtype: torch.dtype) -> None:
    """main_grads of one micro-batch, and of one for each sequence: the same bytes."""
    pack = Case((70, 3, 64), dtype=dtype)
    o = operands(pack)
    mains = [(drawn(40, 4, seed=7, dtype=FP32), drawn(40, seed=8, dtype=FP32)) for _ in "ab"]
    run(launch, pack, o, mains[0])
    for s, (first, end) in enumerate(pack.sequences.bounds()):
        part = o._replace(x=o.x[first:end], dy=o.dy[first:end], initial=o.initial[s : s + 1])
        run(launch, Case((end - first,), dtype=dtype), part, mains[1])
    assert all(map(same_bytes, *mains))


def zeros_keep_their_sign(launch) -> None:
    """A main_grad of -0 stays -0 where nothing is added: slots without rows add nothing."""
    pack = Case((0, 0), channels=8)
    o = operands(pack._replace(behind=2))
    mains = torch.full((8, 4), -0.0), torch.full((8,), -0.0)
    run(launch, pack._replace(behind=2), o, mains)
    assert all(t.view(torch.int32).eq(-(2**31)).all() for t in mains)


def rows_that_are_not_there(launch) -> None:
    """A row behind a sequence, which the last inputs would make infinite, has no gradient."""
    given = Case((9,), batch=1, bias=False, initial=False, dtype=FP32)
    o = operands(given)
    weight = torch.tensor([4.0, 0.5, 0.5, 0.5]).expand_as(o.weight).contiguous()
    x = o.x.clone()
    x[6], x[7:] = 3e38, 0
    _, dx, *_ = run(launch, given, o._replace(x=x, weight=weight))
    assert dx.isfinite().all()


def gradients_apart(launch) -> None:
    """Each gradient has the bytes that it has beside the others."""
    given = Case((5, 0, 66), channels=8)
    o = operands(given)
    _, *want = run(launch, given, o)
    for which in range(4):
        mine = torch.full_like(o.x, float("nan")), torch.zeros(8, 4), torch.zeros(8)
        mine = *mine, torch.full_like(o.initial, float("nan"))
        asked = ConvGradients(*(t if i == which else None for i, t in enumerate(mine)))
        launch.conv_backward(o.dy, Conv(*o[:4]), given.sequences, True, asked)
        assert same_bytes(mine[which], want[which])


#: Edits: SiLU and its slope as triton_elementary has them.
ELEMENTARY = (
    (
        "from ...runtime.triton_sums import halves\n",
        "from ...runtime.triton_elementary import activation_slope, activation_value\n"
        "from ...runtime.triton_sums import halves\n",
    ),
    ("y = _silu(y)", 'y = activation_value(y, "silu")'),
    (
        "slope = _silu_slope(_chain(bias, inputs, taps, WIDTH)) * slope",
        'slope = activation_slope(_chain(bias, inputs, taps, WIDTH), "silu") * slope',
    ),
)
#: Of these numbers the square of a rounded inverse gives another quotient.
CLOSE = tuple(
    map(
        float.fromhex,
        ("-0x1.0dd12ap-1", "-0x1.a0f0b2p-1", "-0x1.f2202cp+0", "-0x1.28f394p+1"),
    )
)
SPECIAL = 0.0, -0.0, 1e-40, -1e-40, 87.3, -87.4, 88.7, -88.72, -88.73, 103.0, -104.0, 1e30, -1e30
INFINITE = float("inf"), float("-inf"), float("nan")


def silu(launch, engine: str) -> None:
    """SiLU and its slope have the bits of triton_elementary's."""
    given = Case((48,), batch=1, channels=128, bias=False, initial=False, dtype=FP32)
    o = operands(given)
    x = o.x * torch.tensor([1e-3, 1.0, 6.0, 40.0]).repeat(12)[:, None]
    x.view(-1)[: len(CLOSE + SPECIAL + INFINITE)] = torch.tensor(CLOSE + SPECIAL + INFINITE)
    # One tap, so that a row is its own; dx of a row is its slope.
    weight = torch.tensor([0.0, 1.0]).repeat(128, 1)
    one_tap = given._replace(width=2), o._replace(x=x, weight=weight, dy=torch.ones_like(x))
    finite = torch.isfinite(x)
    with RUNNER.running(engine, *ELEMENTARY) as elementary:
        want_y, want_dx, *_ = run(elementary, *one_tap)
    y, dx, *_ = run(launch, *one_tap)
    assert same_bytes(y[finite], want_y[finite]) and same_bytes(dx[finite], want_dx[finite])
    assert torch.equal(y.isnan(), want_y.isnan()) and torch.equal(dx.isnan(), want_dx.isnan())


CHECKS = [
    *(case(engine, values, name) for engine, name in itertools.product(ENGINES, CASES)),
    *(
        case(engine, neighbours, lengths, behind)
        for engine in ENGINES
        for lengths, behind in (((5, 0, 66, 1), 3), ((32, 64), 0), ((1, 1, 1), 40))
    ),
    *(case(engine, nan_neighbours) for engine in ENGINES),
    *(case(engine, split, dtype) for engine, dtype in itertools.product(ENGINES, (BF16, FP32))),
    *(case(engine, zeros_keep_their_sign) for engine in ENGINES),
    *(case(engine, rows_that_are_not_there) for engine in ENGINES),
    *(case(engine, gradients_apart) for engine in ENGINES),
    *(case(engine, silu, engine) for engine in ENGINES),
    case(SM90, values, "pack", **LATE),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_values(engine, check, options):
    with RUNNER.running(engine, **options) as launch:
        check(launch)


PACK = INTERPRETER, neighbours, (5, 0, 66, 1), 3
#: What comes before the work of a program, in both kernels.
SEQUENCE = (
    "    if sequence < SEQUENCES:\n"
    "        taps, bias = _taps(weight_ptr, channel, D, WIDTH), _bias(bias_ptr, channel, D)\n"
    "        "
)
MUTANTS = {
    "rows_of_the_sequence_before": (
        *(INTERPRETER, values, "batch, two chunks"),
        (
            "inside = (row >= first) & (row < end)\n",
            "inside = (row >= 0) & (row < end)\n",
        ),
    ),
    "the_last_slope_first": (
        *(INTERPRETER, values, "batch"),
        ("out = out + (taps[WIDTH - 1 - w],)", "out = out + (taps[w],)"),
    ),
    "another_sequences_state": (
        *PACK,
        (
            "(sequence * D + channel) * (WIDTH - 1) + place\n",
            "channel * (WIDTH - 1) + place\n",
        ),
    ),
    "chunks_of_the_pack": (
        *(INTERPRETER, split, FP32),
        (
            "return low, first, end, first + chunk * ROWS",
            "return low, first, end, tl.maximum(first, (first // ROWS + chunk) * ROWS)",
        ),
    ),
    "nothing_is_plus_0": (
        *(INTERPRETER, zeros_keep_their_sign),
        (
            "tl.where((sequence < SEQUENCES) & (start < end), total, nothing)",
            "tl.where((sequence < SEQUENCES) & (start < end), total, 0.0)",
        ),
    ),
    "slots_that_are_not_there_add_0": (
        *(INTERPRETER, zeros_keep_their_sign),
        ("total = tl.where(i * FOLD < COUNT, added, total)", "total = added + 0.0"),
    ),
    "what_is_behind_is_a_sequence": (
        *(INTERPRETER, neighbours, (5, 66), 3),
        (f"{SEQUENCE}before", f"{SEQUENCE.replace('SEQUENCES', 'SEQUENCES + 1')}before"),
    ),
    "what_is_behind_has_gradients": (
        *(SM90, neighbours, (5, 66), 3),
        (f"{SEQUENCE}backwards", f"{SEQUENCE.replace('SEQUENCES', 'SEQUENCES + 1')}backwards"),
    ),
    "newest_first": (
        *(INTERPRETER, values, "batch"),
        ("out = out + (tap.to(tl.float32),)", "out = (tap.to(tl.float32),) + out"),
    ),
    "no_silu_in_the_gradient": (
        *(INTERPRETER, values, "batch"),
        (
            "slope = _silu_slope(_chain(bias, inputs, taps, WIDTH)) * slope",
            "slope = _chain(bias, inputs, taps, WIDTH) * 0.0 + slope",
        ),
    ),
    "no_bias_in_the_sums": (
        *(INTERPRETER, values, "batch"),
        ("(sums[WIDTH] + slope,)", "(sums[WIDTH] + slope * 0.0,)"),
    ),
    "the_next_chunk_in_the_sums": (
        *(INTERPRETER, values, "batch, two chunks"),
        ("if step + i < count_summed:", "if step + i < count_summed + 1:"),
    ),
    "the_chunk_before_is_written_too": (
        *(SM90, values, "batch, two chunks"),
        ("(step + i >= WIDTH - 1) & (i < left_dx)", "i < left_dx"),
    ),
    "each_chunk_writes_the_gradient_of_the_state": (
        *(SM90, values, "pack"),
        ("tl.where(start == first, WIDTH - 1, 0)", "WIDTH - 1"),
    ),
    "rows_in_flight_of_the_next_chunk": (
        *(SM90, neighbours, (5, 66), 3),
        ("x_row, left - AHEAD, AHEAD)\n            for", "x_row, left, AHEAD)\n            for"),
    ),
    "slopes_behind_the_sequence": (
        *(INTERPRETER, rows_that_are_not_there),
        ("slope = tl.where(i < left, slope, 0.0)", "slope = slope + 0.0"),
    ),
    "another_half_of_e": (
        *(INTERPRETER, silu, INTERPRETER),
        ("(m.to(tl.int32, bitcast=True) ^ flip)", "m.to(tl.int32, bitcast=True)"),
    ),
    "an_inverse_without_newtons_step": (
        *(INTERPRETER, silu, INTERPRETER),
        ("tl.fma(tl.fma(square * -1.0, inverse, one), inverse, inverse)", "inverse * one"),
    ),
    "a_quotient_without_its_remainder": (
        *(SM90, silu, SM90),
        ("tl.fma(tl.fma(square * -1.0, quotient, e), inverse, quotient)", "quotient * one"),
    ),
}


@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
def test_killed(engine, check, edits):
    RUNNER.kill(engine, check, *edits)


def everything(given: Case):
    def call() -> None:
        run(launcher, given, operands(given))

    return call


@pytest.mark.parametrize("name", ["batch", "pack", "plain"])
@pytest.mark.parametrize("target", TARGETS)
def test_code(target, name):
    """No atomics, nothing fused, IEEE divisions, offsets of 64 bits, for every target."""
    kernels = RUNNER.compiled(target, everything(CASES[name]))
    assert {kernel.name: complaints(kernel) for kernel in kernels} == {
        kernel.name: [] for kernel in kernels
    }
    assert len(kernels) >= 4
