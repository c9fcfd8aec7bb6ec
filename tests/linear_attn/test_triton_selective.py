"""Triton kernels of the selective scan: sm_90 code in ptxsim, source in the interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.cpu import elementary
from cute_kernels.linear_attn.triton.plan import SELECTIVE as PLAN
from tests.contract import same_bytes
from tests.runtime.cached_calls import drawn
from tests.triton_runner import (
    CARD,
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

from .launches import (
    backward,
    forward,
    gradients,
    gradients_of_a_pack,
    pack_is_alone,
    parts,
    saved_by,
    values,
)
from .ssd_cases import FP32, INF, SELECTIVE_CASES, Case, operands, upstream
from .triton_engine import SELECTIVE

pytestmark = pytest.mark.simulates("linear_attn.triton")

#: A chunk and a tail, one row, no row; rows behind the last sequence; two programs a group.
PACK = SELECTIVE_CASES["channels of a pack"]._replace(
    lengths=(5, 0, 35, 1), heads=(1, 40), dtype=FP32
)
BATCH = Case(
    (34,), batch=2, heads=(2, 6), sizes=(1, 16), dtype=FP32, dt=FP32, gate=False, bias=False,
    initial=False, softplus=False, limit=(-INF, INF), selective=True,
)  # fmt: skip
SEQUENCE = PACK._replace(lengths=(38,), batch=1, heads=(1, 4), behind=0)


def exact_decays(given: Case):
    """(Operands whose decays are powers of two, the powers), of steps that are whole numbers."""
    o = operands(given)
    ln2 = 1 / torch.tensor(elementary.LOG2E_FP32[0], dtype=FP32)
    powers = drawn(*o.A.shape, seed=21, dtype=FP32).round().abs()
    powers = torch.where(powers > 2, 2.0, powers)
    assert (ln2 * elementary.LOG2E_FP32[0] == 1) and len(powers.unique()) > 2
    dt = (drawn(*o.dt.shape, seed=20, dtype=FP32) * 0.8).round().abs()
    return o._replace(A=-ln2 * powers, dt=dt), powers


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).float()


def predicted(launch) -> None:
    """Rows and states have the bytes of the written order, n ascending."""
    given = SEQUENCE._replace(gate=False, bias=False, softplus=False)
    o, powers = exact_decays(given)
    got = forward(launch, given, o)
    s, rows = o.initial[0], []
    for x, dt, B, C in zip(o.x, o.dt, o.B[:, 0], o.C[:, 0], strict=True):
        s = fma((-powers * dt[:, None]).exp2(), s, (dt * x)[:, None] * B)
        y = torch.zeros_like(x)
        for n in range(s.shape[1]):
            y = fma(s[:, n], C[n], y)
        rows.append(fma(o.D.float(), x, y))
    assert same_bytes(got.final[0], s) and same_bytes(got.out, torch.stack(rows))


def predicted_sums(launch) -> None:
    """dC of a row: a program's channels in halves, programs ascending; dA is one multiply-add."""
    given = PACK._replace(lengths=(1,), batch=1, behind=0, gate=False, bias=False, softplus=False)
    o, powers = exact_decays(given)
    got, (d_out, d_final) = backward(launch, given, o, saved_by(given, o)), upstream(given)
    decay = (-powers * o.dt[0, :, None]).exp2()
    s = fma(decay, o.initial[0], (o.dt[0] * o.x[0])[:, None] * o.B[0])
    total = torch.zeros(given.sizes[1])
    for terms in (d_out[0, :, None] * s).split(PLAN.channels):
        terms = torch.nn.functional.pad(terms, (0, 0, 0, PLAN.channels - len(terms)))
        while len(terms) > 1:
            terms = terms[: len(terms) // 2] + terms[len(terms) // 2 :]
        total = total + terms[0]
    assert same_bytes(got.C[0, 0], total)
    g = fma(d_out[0, :, None], o.C[0], d_final[0])
    h = g * o.initial[0] * decay
    assert same_bytes(got.A, fma(o.dt[0, :, None], h, torch.zeros_like(h)))
    assert same_bytes(got.initial[0], decay * g)


CHECKS = [
    *(case(engine, values, given) for engine in ENGINES for given in (PACK, BATCH)),
    *(case(engine, check) for engine in (SM90, CARD) for check in (predicted, predicted_sums)),
    *(case(engine, pack_is_alone, PACK) for engine in ENGINES),
    *(case(engine, parts, SEQUENCE) for engine in ENGINES),
    *(case(engine, gradients, given) for engine in ENGINES for given in (PACK, BATCH)),
    *(case(engine, gradients_of_a_pack, PACK) for engine in (INTERPRETER, CARD)),
    case(SM90, gradients_of_a_pack, PACK._replace(dtype=torch.bfloat16), **LATE, night=True),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_values(engine, check, options):
    with SELECTIVE.running(engine, **options) as launch:
        check(launch)


#: Each changes a byte of the written order, or reads what is not there.
MUTANTS = {
    "n_descends": (
        SM90, predicted,
        ("c = _number(C_ptr, at + n, inside)\n        y = tl.fma(s[n],",
         "c = _number(C_ptr, at + (STATE - 1 - n), inside)\n        y = tl.fma(s[STATE - 1 - n],"),
    ),
    "y_of_the_state_before": (
        INTERPRETER, values, BATCH,
        ("y = _read(s, C_ptr, at,", "y = _read(was, C_ptr, at,"),
        ("inside = row + i < stop\n", "inside, was = row + i < stop, s\n"),
    ),
    "a_state_that_is_not_fused": (
        SM90, predicted,
        ("tl.fma(tl.exp2(A[n] * _LOG2E * step), s[n], added)",
         "tl.fma(update, _number(B_ptr, at + n, inside), tl.exp2(A[n] * _LOG2E * step) * s[n])"),
    ),
    "rows_beyond_the_end_decay": (
        INTERPRETER, parts, SEQUENCE,
        ("tl.where(inside, tl.fma(tl.exp2(A[n] * _LOG2E * step), s[n], added), s[n])",
         "tl.fma(tl.exp2(A[n] * _LOG2E * step), s[n], added)"),
    ),
    "the_last_state_of_all_rows": (
        INTERPRETER, parts, SEQUENCE, ("if row + i + 1 == behind:", "if row + i + 1 == end:"),
    ),
    "states_of_no_chunk": (
        INTERPRETER, pack_is_alone, PACK,
        ("for empty in range(slot, following):", "for empty in range(slot + 1, following):"),
    ),
    "the_first_group": (
        INTERPRETER, values, BATCH,
        ("at = (row + i) * B_row + group * B_group", "at = (row + i) * B_row"),
    ),
    "channels_of_the_next_group": (
        INTERPRETER, gradients, BATCH,
        ("tl.where(channel < each, group * each + channel, D)",
         "tl.minimum(group * each + channel, D)"),
    ),
    "no_gradient_of_later_chunks": (
        INTERPRETER, gradients, PACK,
        ("ds = _columns(d_states_ptr, at_slot,", "ds = _columns(None, at_slot,"),
    ),
    "states_of_the_first_row": (
        INTERPRETER, gradients, PACK,
        ("for row in range(start, top):", "for row in range(top, top):"),
    ),
    "the_state_behind_the_row": (
        INTERPRETER, gradients, BATCH, ("h = g * before[n] * decay", "h = g * s[n] * decay"),
    ),
    "gradients_of_no_row": (
        INTERPRETER, gradients, PACK,
        ("- back]\n            if row < stop:\n", "- back]\n            if row < top + ROWS:\n"),
    ),
    "channels_in_another_order": (
        SM90, predicted_sums,
        ("halves(tile, 1, CHANNELS, COUNT)",
         "halves(tl.sum(tl.reshape(tile, [CHANNELS // 2, 2, COUNT]), axis=1), 1, CHANNELS // 2,"
         " COUNT)"),
    ),
    "parts_of_no_sequence": (
        INTERPRETER, gradients_of_a_pack, PACK,
        ("tl.store(parts_ptr + lines + row * (GROUPS * STATE) + n, 0.0)", "pass"),
    ),
    "rows_of_no_sequence": (
        INTERPRETER, gradients_of_a_pack, PACK,
        ("        store_zeros(d_dt_ptr, start, stop, channel, D)\n", "        pass\n"),
    ),
}  # fmt: skip


@pytest.mark.mutants
@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
def test_killed(engine, check, edits):
    SELECTIVE.kill(engine, check, *edits)


@pytest.mark.parametrize("given", [PACK, BATCH], ids=["pack", "batch"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("target", TARGETS)
def test_code(target, passes, given):
    """No atomics, nothing fused, offsets of 64 bits, no spills, in every target."""
    o = operands(given)

    def call() -> None:
        of = forward(SELECTIVE.launch, given, o)
        if passes == 2:
            backward(SELECTIVE.launch, given, o, of)

    kernels = SELECTIVE.compiled(target, call)
    names = {kernel.name for kernel in kernels}
    assert names == set(SELECTIVE.written) if passes == 2 else names < set(SELECTIVE.written)
    assert {kernel.name: complaints(kernel) for kernel in kernels} == {name: [] for name in names}
