"""Triton kernels of the state space scan: sm_90 code in ptxsim, source in the interpreter."""

from __future__ import annotations

from typing import NamedTuple

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.cpu import elementary
from cute_kernels.linear_attn import cpu_ssd, op_ssd
from cute_kernels.linear_attn.config import SSD_CHUNK
from cute_kernels.linear_attn.tensors import Last, StateSpace, StateSpaceGradients, StateSpaceSaved
from ptxsim.skips import requires_core
from tests.contract import same_bytes
from tests.oracles import ssd_chunks
from tests.runtime.cached_calls import drawn
from tests.triton_runner import (
    CARD,
    HOPPER,
    INTERPRETER,
    LATE,
    SM90,
    TARGETS,
    case,
    complaints,
    device_guard,  # noqa: F401  (a fixture)
)

from .ssd_cases import BF16, FP32, INF, ROWS, SUMMED, Case, operands, upstream
from .triton_engine import SSD, SSD_BACKWARD

pytestmark = pytest.mark.simulates("linear_attn.triton")

#: Two chunks and a tail, one row, no row; rows behind the last sequence.
PACK = Case((140, 0, 1), heads=(1, 2), sizes=(16, 32), skip=2, behind=3)
BATCH = Case(
    (131,), batch=2, heads=(2, 2), sizes=(32, 16), dt=FP32, skip=1, gate=False, bias=False,
    initial=False, softplus=False,
)  # fmt: skip


class Forward(NamedTuple):
    """Results of a forward: y, the last states, what is saved."""

    out: torch.Tensor
    final: torch.Tensor
    saved: StateSpaceSaved


def forward(launch, given: Case, o: StateSpace, lag: int = -1) -> Forward:
    shape = (given.batch, given.lengths[0]) if given.batch else (1, given.rows)
    x, B = (t.unflatten(0, shape) for t in (o.x, o.B))
    slots = given.sequences.slots(SSD_CHUNK)
    saved = op_ssd.SCAN.saved(o._replace(x=x, B=B), slots, on_cpu=launch is cpu_ssd)
    out = torch.full(o.x.shape, float("nan"), dtype=o.x.dtype)
    final = torch.full((given.count, given.heads[1], *given.sizes), float("nan"))
    launch.ssd_scan(o, given.sequences, given.options, out, Last(final, lag), saved)
    return Forward(out, final, saved)


def slow(given: Case) -> StateSpace:
    """Operands whose decays let rows of other chunks count."""
    o = operands(given)
    return o._replace(A=o.A * 0.02)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the 2-norm."""
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def values(launch, given: Case) -> None:
    """y and states against the CPU backend, which test_ssd.py holds to float64."""
    o = slow(given)
    got, want = forward(launch, given, o), forward(cpu_ssd, given, o)
    assert error(got.out, want.out) < 4e-3 and error(got.final, want.final) < 4e-3
    behind = got.out[sum(given.lengths) * max(given.batch, 1) :]
    assert not behind.view(torch.int16).any()


def predicted(launch, given: Case = PACK) -> None:
    """y and states have the bytes of the written order; decays are powers of two, so exact."""
    given = given._replace(gate=False, bias=False, softplus=False, limit=(-INF, INF))
    o = operands(given)
    ties = o.initial.to(BF16).float().view(torch.int32) + 0x8000
    ln2 = 1 / torch.tensor(elementary.LOG2E_FP32[0], dtype=FP32)
    dt = drawn(*o.dt.shape, seed=20, dtype=FP32)
    dt[:, 0] = (dt[:, 0] * 0.8).round().abs()
    o = o._replace(A=torch.stack([-ln2, 0 * ln2]), dt=dt, initial=ties.view(FP32))
    assert o.A[0] * elementary.LOG2E_FP32[0] == -1 and len(dt[:, 0].unique()) > 2
    got = forward(launch, given, o)
    for s, (first, end) in enumerate(given.sequences.bounds()):
        for head in range(given.heads[1] if end > first else 0):
            rows = slice(first, end)
            y, final = ssd_chunks.state_space(
                o.x[rows, head], o.dt[rows, head], o.A[head], o.B[rows, 0], o.C[rows, 0],
                o.D[head], o.initial[s, head],
            )  # fmt: skip
            assert same_bytes(got.out[rows, head], y.to(BF16))
            assert same_bytes(got.final[s, head], final)


def wide(given: Case) -> Case:
    """The case with sizes that the public function takes on a GPU."""
    return given._replace(sizes=(64, 128 if given is PACK else 64))


def pack_is_alone(launch, given: Case = PACK) -> None:
    """A sequence has the bytes that it has alone; NaN behind the pack reaches nothing."""
    o, behind = nan_behind(given, operands(given))
    got = forward(launch, given, o)
    for s, (first, end) in enumerate(given.sequences.bounds()):
        if end == first:
            assert same_bytes(got.final[s], o.initial[s])
            continue
        alone = forward(launch, *part(given, o, s))
        assert same_bytes(alone.out, got.out[first:end])
        assert same_bytes(alone.final[0], got.final[s])
    assert not got.out[behind].view(torch.int16).any()


def nan_behind(given: Case, o: StateSpace) -> tuple[StateSpace, slice]:
    """Operands with NaN in the rows behind a pack, and these rows."""
    behind = slice(sum(given.lengths), None)
    for name in ROWS:
        if (t := getattr(o, name)) is not None:
            t[behind] = float("nan")
    return o, behind


def part(given: Case, o: StateSpace, s: int) -> tuple[Case, StateSpace]:
    """Sequence ``s`` of a pack as a batch of one."""
    first, end = given.sequences.bounds()[s]
    rows = {n: t[first:end] for n in ROWS if (t := getattr(o, n)) is not None}
    own = o._replace(**rows, initial=o.initial[s : s + 1])
    return given._replace(lengths=(end - first,), batch=1, behind=0), own


def parts(launch, sizes: tuple[int, int] = (16, 16)) -> None:
    """Rows of a sequence that stops, and goes on from the state of its last whole chunk."""
    given = Case((260,), batch=1, heads=(1, 1), sizes=sizes)
    o = slow(given)
    whole = forward(launch, given, o)
    for cut, lag in ((1, 0), (128, 0), (140, 0), (131, 5), (259, 0)):
        begun = {n: getattr(o, n)[:cut] for n in ROWS}
        first = forward(launch, given._replace(lengths=(cut,)), o._replace(**begun), lag)
        grid = max(cut - lag, 0) // 128 * 128
        rest = {n: getattr(o, n)[grid:] for n in ROWS}
        goes_on = given._replace(lengths=(260 - grid,))
        rest = forward(launch, goes_on, o._replace(**rest, initial=first.final))
        assert same_bytes(first.out, whole.out[:cut]), cut
        assert same_bytes(rest.out, whole.out[grid:]) and same_bytes(rest.final, whole.final), cut


CHECKS = [
    *(case(engine, values, given) for engine in (SM90, INTERPRETER) for given in (PACK, BATCH)),
    *(case(engine, pack_is_alone) for engine in (SM90, INTERPRETER)),
    *(case(CARD, values, wide(given)) for given in (PACK, BATCH)),
    *(case(CARD, check, wide(PACK)) for check in (predicted, pack_is_alone)),
    case(CARD, parts, (64, 64)),
    case(INTERPRETER, parts),
    case(SM90, parts, night=True),
    case(SM90, predicted, **HOPPER),
    case(SM90, pack_is_alone, **LATE, night=True),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_forward(engine, check, options):
    with SSD.running(engine, **options) as launch:
        check(launch)


#: Each changes a byte of the written order, or reads what is not there.
MUTANTS = {
    "the_update_on_the_state": (
        predicted,
        ("update = product(tl.trans(x), b, tl.zeros([P, COLUMNS], tl.float32), UPCAST)",
         "update = product(tl.trans(x), b, s * tl.exp2(whole), UPCAST)"),
        ("s = tl.fma(tl.broadcast_to(tl.exp2(whole), s.shape), s, update + 0.0)\n        if",
         "s = update\n        if"),
    ),
    "the_state_last": (
        predicted,
        ("        y = y * tl.exp2(decay)[:, None]\n",
         "        of_state = y * tl.exp2(decay)[:, None]\n        y = tl.zeros_like(y)\n"),
        ("        y = y + 0.0\n", "        y = of_state + y\n"),
    ),
    "D_of_the_first_head": (predicted, ("head * D_head + columns", "0 * D_head + columns")),
    "the_later_half_first": (
        predicted,
        ("y = _take_rows(\n            y, cb0,", "y = _take_rows(\n            y, cb_1,"),
        ("y = _take_rows(\n            y, cb1,", "y = _take_rows(\n            y, cb0,"),
        ("y, cb_1,", "y, cb1,"),
        ("start, i, j0, end", "start, i, j_1, end"),
        ("start, i, j1, end", "start, i, j0, end"),
        ("start, i, j_1, end", "start, i, j1, end"),
    ),
    "rows_behind": (
        pack_is_alone,
        ("return tl.load(ptr + offset, mask=inside[:, None], other=0.0)",
         "return tl.load(ptr + offset)"),
    ),
    "steps_of_rows_behind": (
        pack_is_alone,
        ("weight = tl.where(inside, tl.exp2(whole - decay) * step, 0.0)",
         "weight = tl.exp2(whole - tl.load(decay_ptr + head * N + row)) * step"),
    ),
    "no_limit": (
        values, PACK, ("tl.where(step < low, low, tl.where(step > high, high, step))", "step"),
    ),
}  # fmt: skip


@pytest.mark.mutants
@requires_core
@pytest.mark.sim
@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name):
    check, *edits = MUTANTS[name]
    given = [e for e in edits if isinstance(e, Case)]
    edits = [e for e in edits if e not in given]
    SSD.kill(SM90, lambda launch: check(launch, *given), *edits, **HOPPER)


def backward(launch, given: Case, o: StateSpace, of: Forward, slopes=None, main=None):
    """Gradients; A, D and dt_bias are added to zeros, or to ``main``."""
    d_out, d_final = upstream(given) if slopes is None else slopes
    into = StateSpaceGradients(
        *(None if t is None else torch.full_like(t, float("nan")) for t in o)
    )
    summed = {"A": o.A, "D": o.D, "dt_bias": o.dt_bias}
    zeros = {n: torch.zeros(t.shape) for n, t in summed.items() if t is not None}
    gradients = into._replace(**zeros | (main or {}))
    launch.ssd_scan_backward(d_out, d_final, o, given.sequences, given.options, of.saved, gradients)
    return gradients


def gradients(launch, given: Case = PACK) -> None:
    """Gradients against the CPU backend's."""
    o = slow(given)
    got = backward(launch, given, o, saved_by(given, o))
    want = backward(cpu_ssd, given, o, forward(cpu_ssd, given, o))
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, b) < 1e-2, (name, error(a, b))


def large_steps(launch) -> None:
    """Steps of 25, whose own terms cancel in the gradient of the decays, beside steps of 0."""
    given = Case(
        (131,), batch=2, heads=(1, 2), sizes=(32, 32), dt=FP32, skip=0, gate=False, bias=False,
        initial=False, softplus=False, limit=(0.0, INF),
    )  # fmt: skip
    o = operands(given)
    o.dt[5::9] = 0.0
    got = backward(launch, given, o, saved_by(given, o))
    want = backward(cpu_ssd, given, o, forward(cpu_ssd, given, o))
    assert error(got.A, want.A) < 1e-2 and error(got.dt, want.dt) < 5e-3
    assert error(got.dt[5::9], want.dt[5::9]) < 5e-3
    assert not got.x[5::9].any()


def gradients_of_a_pack(launch, given: Case = PACK) -> None:
    """Gradients of a sequence, and sums of all, have the bytes of sequences one by one."""
    o, behind = nan_behind(given, operands(given))
    d_out, d_final = upstream(given)
    d_out[behind] = float("nan")
    mains = [
        {n: drawn(*getattr(o, n).shape, seed=40 + i, dtype=FP32) for i, n in enumerate(SUMMED)}
        for _ in "ab"
    ]
    got = backward(launch, given, o, saved_by(given, o), (d_out, d_final), mains[0])
    for s, (first, end) in enumerate(given.sequences.bounds()):
        if end == first:
            assert same_bytes(got.initial[s], d_final[s])
            continue
        alone, own = part(given, o, s)
        slopes = d_out[first:end], d_final[s : s + 1]
        single = backward(launch, alone, own, saved_by(alone, own), slopes, mains[1])
        assert same_bytes(single.initial[0], got.initial[s])
        for name in ROWS:
            assert same_bytes(getattr(single, name), getattr(got, name)[first:end]), name
    for name in ROWS:
        assert not getattr(got, name)[behind].float().view(torch.int32).any(), name
    for name in SUMMED:
        assert same_bytes(*(main[name] for main in mains)), name


def saved_by(given: Case, o: StateSpace) -> Forward:
    """A forward in the interpreter."""
    with SSD.running(INTERPRETER) as before:
        return forward(before, given, o)


GRADIENTS = [
    *(case(engine, gradients, given) for engine in (SM90, INTERPRETER) for given in (PACK, BATCH)),
    *(case(engine, large_steps) for engine in (SM90, INTERPRETER)),
    *(case(CARD, gradients, wide(given)) for given in (PACK, BATCH)),
    case(CARD, gradients_of_a_pack, wide(PACK)),
    case(INTERPRETER, gradients_of_a_pack),
    case(SM90, gradients_of_a_pack, **LATE, night=True),
]


@pytest.mark.parametrize(("engine", "check", "options"), GRADIENTS)
def test_backward(engine, check, options):
    with SSD_BACKWARD.running(engine, **options) as launch:
        check(launch)


GRADIENT_MUTANTS = {
    "the_first_head": (
        gradients,
        ("at = state_at(slot, head, n, H, P, STATE)\n        s = tl.load",
         "at = state_at(slot, group * GROUP, n, H, P, STATE)\n        s = tl.load"),
    ),
    "no_gradient_of_the_end": (gradients, ("dg = tl.fma(tl.exp2(whole), of_states, dg)\n", "\n")),
    "no_read_of_the_end": (
        gradients,
        ("        dg += tl.load(of_ends_ptr + (slot * PARTS + part) * H + head",
         "        dg += 0.0 * tl.load(of_ends_ptr + (slot * PARTS + part) * H + head"),
    ),
    "no_later_rows": (
        gradients,
        ("d1, c1, product(d0, c0, dB, UPCAST), UPCAST) + 0.0", "d0, c0, dB, UPCAST) + 0.0"),
    ),
    "no_step_in_P": (
        large_steps,
        ("* step[:, None]\n    bc =", "\n    bc ="),
        ("acc = acc * (to_end * factor)[:, None]", "acc = acc * to_end[:, None]"),
        ("tl.where(none, 0.0, over_columns(x32 * acc, ROWS, P))",
         "step * over_columns(x32 * acc, ROWS, P)"),
        ("tl.div_rn(over_columns(x32 * acc, ROWS, P), factor)",
         "over_columns(x32 * acc, ROWS, P)"),
        ("dx = tl.where(none[:, None], 0.0, acc)", "dx = acc * step[:, None]"),
    ),
    "no_gradient_of_a_step_of_0": (
        large_steps,
        ("x32 * acc, ROWS, P), factor)", "x32 * acc, ROWS, P), tl.where(none, 2.0, factor))"),
    ),
    "steps_beyond_the_limits": (
        gradients,
        ("tl.where(there & (raw >= low) & (raw <= high), d_dt, 0.0)",
         "tl.where(there, d_dt, 0.0)"),
    ),
    "zeros_by_a_product": (
        gradients_of_a_pack,
        ("tl.where(row < end, d_out * y * activation_slope(z, \"silu\"), 0.0)",
         "d_out * y * activation_slope(z, \"silu\") * (row < end).to(tl.float32)"),
    ),
    "zero_where_there_is_no_part": (
        gradients_of_a_pack,
        ("tl.where(some, total, nothing)", "tl.where(some, total, 1.0)"),
    ),
}  # fmt: skip


@pytest.mark.mutants
@pytest.mark.parametrize("name", GRADIENT_MUTANTS)
def test_killed_gradients(name):
    check, *edits = GRADIENT_MUTANTS[name]
    given = (PACK,) if check is gradients else ()
    SSD_BACKWARD.kill(INTERPRETER, lambda launch: check(launch, *given), *edits)


def everything(given: Case):
    """A call of all kernels; only launched, not run."""
    o = operands(given)

    def call(launch) -> None:
        rows = o._replace(x=o.x[None], B=o.B[None])
        saved = op_ssd.SCAN.saved(rows, given.sequences.slots(SSD_CHUNK), on_cpu=False)
        final = torch.empty(given.count, given.heads[1], *given.sizes)
        if hasattr(launch, "ssd_scan_backward"):
            backward(launch, given, o, Forward(o.x, final, saved))
        else:
            launch.ssd_scan(o, given.sequences, given.options, o.x, Last(final), saved)

    return call


#: They multiply; sums of one number and zeros have one result in any order.  N of 128 spills.
ALLOWED = {"matrix instruction", "a sum in the order of the compiler", "spills"}


@pytest.mark.parametrize("sizes", [(64, 128), (64, 64)])
@pytest.mark.parametrize("runner", [SSD, SSD_BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("target", TARGETS)
def test_code(target, runner, sizes):
    """No atomics, nothing fused, offsets of 64 bits, in every target."""
    given = Case((130, 5), heads=(1, 2), sizes=sizes)
    kernels = runner.compiled(target, lambda: everything(given)(runner.launch))
    assert {kernel.name for kernel in kernels} == set(runner.written)
    assert {kernel.name: set(complaints(kernel)) - ALLOWED for kernel in kernels} == {
        kernel.name: set() for kernel in kernels
    }
