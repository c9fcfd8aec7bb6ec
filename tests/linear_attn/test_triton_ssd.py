"""Triton kernels of the state space scan: sm_90 code in ptxsim, source in the interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.cpu import elementary
from cute_kernels.linear_attn import cpu_ssd
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
    device_guard,  # noqa: F401  (a fixture)
    mutants,
)

from .launches import (
    ALLOWED,
    backward,
    code,
    error,
    forward,
    gradients,
    gradients_of_a_pack,
    pack_is_alone,
    parts,
    saved_by,
    values,
)
from .ssd_cases import BF16, FP32, INF, Case, operands
from .triton_engine import SSD, SSD_BACKWARD

pytestmark = pytest.mark.simulates("linear_attn.triton")

#: Two chunks and a tail, one row, no row; rows behind the last sequence.
PACK = Case((140, 0, 1), heads=(1, 2), sizes=(16, 32), skip=2, behind=3)
SEQUENCE = Case((260,), batch=1, heads=(1, 1), sizes=(16, 16))
BATCH = Case(
    (131,), batch=2, heads=(2, 2), sizes=(32, 16), dt=FP32, skip=1, gate=False, bias=False,
    initial=False, softplus=False,
)  # fmt: skip


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


CHECKS = [
    *(case(engine, values, given) for engine in (SM90, INTERPRETER) for given in (PACK, BATCH)),
    *(case(engine, pack_is_alone, PACK) for engine in (SM90, INTERPRETER)),
    *(case(CARD, values, wide(given)) for given in (PACK, BATCH)),
    *(case(CARD, check, wide(PACK)) for check in (predicted, pack_is_alone)),
    case(CARD, parts, SEQUENCE._replace(sizes=(64, 64))),
    case(INTERPRETER, parts, SEQUENCE),
    case(SM90, parts, SEQUENCE, night=True),
    case(SM90, predicted, **HOPPER),
    case(SM90, pack_is_alone, PACK, **LATE, night=True),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_forward(engine, check, options):
    with SSD.running(engine, **options) as launch:
        check(launch)


#: Each changes a byte of the written order, or reads what is not there.
MUTANTS = {
    "the_update_on_the_state": (
        SM90, predicted,
        ("update = product(tl.trans(x), b, tl.zeros([P, COLUMNS], tl.float32), UPCAST)",
         "update = product(tl.trans(x), b, s * tl.exp2(whole), UPCAST)"),
        ("s = tl.fma(tl.broadcast_to(tl.exp2(whole), s.shape), s, update + 0.0)\n        if",
         "s = update\n        if"),
    ),
    "the_state_last": (
        SM90, predicted,
        ("        y = y * tl.exp2(decay)[:, None]\n",
         "        of_state = y * tl.exp2(decay)[:, None]\n        y = tl.zeros_like(y)\n"),
        ("        y = y + 0.0\n", "        y = of_state + y\n"),
    ),
    "D_of_the_first_head": (SM90, predicted, ("head * D_head + columns", "0 * D_head + columns")),
    "the_later_half_first": (
        SM90, predicted,
        ("y = _take_rows(\n            y, cb0,", "y = _take_rows(\n            y, cb_1,"),
        ("y = _take_rows(\n            y, cb1,", "y = _take_rows(\n            y, cb0,"),
        ("y, cb_1,", "y, cb1,"),
        ("start, i, j0, end", "start, i, j_1, end"),
        ("start, i, j1, end", "start, i, j0, end"),
        ("start, i, j_1, end", "start, i, j1, end"),
    ),
    "rows_behind": (
        SM90, pack_is_alone, PACK,
        ("return tl.load(ptr + offset, mask=inside[:, None], other=0.0)",
         "return tl.load(ptr + offset)"),
    ),
    "steps_of_rows_behind": (
        SM90, pack_is_alone, PACK,
        ("weight = tl.where(inside, tl.exp2(whole - decay) * step, 0.0)",
         "weight = tl.exp2(whole - tl.load(decay_ptr + head * N + row)) * step"),
    ),
    "no_limit": (
        SM90, values, PACK,
        ("tl.where(step < low, low, tl.where(step > high, high, step))", "step"),
    ),
}  # fmt: skip


@pytest.mark.mutants
@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
def test_killed(engine, check, edits):
    SSD.kill(engine, check, *edits, **HOPPER)


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


def steep(launch) -> None:
    """Decays of e^-10 overflow nothing in chunks that are not whole."""
    given = PACK._replace(lengths=(190,), softplus=False, bias=False, gate=False, limit=(0.0, INF))
    o = operands(given)
    o = o._replace(dt=torch.ones_like(o.dt), A=torch.full_like(o.A, -10.0))
    got = backward(launch, given, o, saved_by(given, o))
    want = backward(cpu_ssd, given, o, forward(cpu_ssd, given, o))
    for name in ("x", "B", "C", "dt"):
        assert error(getattr(got, name), getattr(want, name)) < 1e-2, name


GRADIENTS = [
    case(INTERPRETER, steep),
    *(case(engine, gradients, given) for engine in (SM90, INTERPRETER) for given in (PACK, BATCH)),
    *(case(engine, large_steps) for engine in (SM90, INTERPRETER)),
    *(case(CARD, gradients, wide(given)) for given in (PACK, BATCH)),
    case(CARD, gradients_of_a_pack, wide(PACK)),
    case(INTERPRETER, gradients_of_a_pack, PACK),
    case(SM90, gradients_of_a_pack, PACK, **LATE, night=True),
]


@pytest.mark.parametrize(("engine", "check", "options"), GRADIENTS)
def test_backward(engine, check, options):
    with SSD_BACKWARD.running(engine, **options) as launch:
        check(launch)


GRADIENT_MUTANTS = {
    "weights_behind_the_last_row": (
        INTERPRETER, steep,
        ("scores = tl.where(inside[None, :] & (i[None, :]", "scores = tl.where((i[None, :]"),
    ),
    "decays_behind_the_last_row": (
        INTERPRETER, steep, ("near = head * N + tl.minimum(row, end - 1)", "near = head * N + row"),
        ("decay = tl.load(decay_ptr + near, mask=start < end, other=0.0)",
         "decay = tl.load(decay_ptr + near, mask=inside, other=0.0)"),
    ),
    "the_first_head": (
        INTERPRETER, gradients, PACK,
        ("at = state_at(slot, head, n, H, P, STATE)\n        s = tl.load",
         "at = state_at(slot, group * GROUP, n, H, P, STATE)\n        s = tl.load"),
    ),
    "no_gradient_of_the_end": (
        INTERPRETER, gradients, PACK,
        ("dg = tl.fma(tl.exp2(whole), of_states, dg)\n", "\n"),
    ),
    "no_read_of_the_end": (
        INTERPRETER, gradients, PACK,
        ("        dg += tl.load(of_ends_ptr + (slot * PARTS + part) * H + head",
         "        dg += 0.0 * tl.load(of_ends_ptr + (slot * PARTS + part) * H + head"),
    ),
    "no_later_rows": (
        INTERPRETER, gradients, PACK,
        ("d1, c1, product(d0, c0, dB, UPCAST), UPCAST) + 0.0", "d0, c0, dB, UPCAST) + 0.0"),
    ),
    "no_step_in_P": (
        INTERPRETER, large_steps,
        ("* step[:, None]\n    bc =", "\n    bc ="),
        ("acc = acc * (to_end * factor)[:, None]", "acc = acc * to_end[:, None]"),
        ("tl.where(none, 0.0, over_columns(x32 * acc, ROWS, P))",
         "step * over_columns(x32 * acc, ROWS, P)"),
        ("tl.div_rn(over_columns(x32 * acc, ROWS, P), factor)",
         "over_columns(x32 * acc, ROWS, P)"),
        ("dx = tl.where(none[:, None], 0.0, acc)", "dx = acc * step[:, None]"),
    ),
    "no_gradient_of_a_step_of_0": (
        INTERPRETER, large_steps,
        ("x32 * acc, ROWS, P), factor)", "x32 * acc, ROWS, P), tl.where(none, 2.0, factor))"),
    ),
    "steps_beyond_the_limits": (
        INTERPRETER, gradients, PACK,
        ("tl.where(there & (raw >= low) & (raw <= high), d_dt, 0.0)",
         "tl.where(there, d_dt, 0.0)"),
    ),
    "zeros_by_a_product": (
        INTERPRETER, gradients_of_a_pack, PACK,
        ("tl.where(row < end, d_out * y * activation_slope(z, \"silu\"), 0.0)",
         "d_out * y * activation_slope(z, \"silu\") * (row < end).to(tl.float32)"),
    ),
    "zero_where_there_is_no_part": (
        INTERPRETER, gradients_of_a_pack, PACK,
        ("tl.where(some, total, nothing)", "tl.where(some, total, 1.0)"),
    ),
}  # fmt: skip


@pytest.mark.mutants
@pytest.mark.parametrize(("engine", "check", "edits"), mutants(GRADIENT_MUTANTS))
def test_killed_gradients(engine, check, edits):
    SSD_BACKWARD.kill(engine, check, *edits)


@pytest.mark.parametrize("sizes", [(64, 128), (64, 64)])
@pytest.mark.parametrize("runner", [SSD, SSD_BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("target", TARGETS)
def test_code(target, runner, sizes):
    """No atomics, nothing fused, offsets of 64 bits, in every target."""
    code(runner, target, Case((130, 5), heads=(1, 2), sizes=sizes), ALLOWED)
