"""Triton kernels of the gated delta rule: sm_90 code in ptxsim, source in the interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.cpu import elementary
from cute_kernels.linear_attn import cpu_delta, op_delta
from cute_kernels.linear_attn.tensors import DeltaGradients, DeltaRule, Last
from ptxsim.skips import requires_core
from tests.contract import same_bytes
from tests.oracles import delta_chunks
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

from .delta_cases import BF16, FP32, Case, operands, upstream
from .delta_launches import ALLOWED, SCALE, Forward, batched, forward, slow
from .triton_engine import DELTA, DELTA_BACKWARD

pytestmark = pytest.mark.simulates("linear_attn.triton")

#: Two chunks and a tail, one row, no row; rows behind the last sequence.
PACK = Case((70, 0, 1, 130), heads=(1, 2), sizes=(32, 32), behind=3)
BATCH = Case((67,), batch=2, heads=(2, 2), sizes=(16, 64), beta=FP32, initial=False)


def wide(given: Case) -> Case:
    """The case with sizes that the public function takes on a GPU."""
    return given._replace(sizes=(128, 64 if given is PACK else 128))


def backward(launch, given: Case, o: DeltaRule, of: Forward, slopes=None) -> DeltaGradients:
    d_out, d_final = upstream(given) if slopes is None else slopes
    into = (None if t is None else torch.full_like(t, float("nan")) for t in o)
    gradients = DeltaGradients(*into)
    launch.delta_rule_backward(d_out, d_final, o, given.sequences, SCALE, of.saved, gradients)
    return gradients


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the 2-norm."""
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def values(launch, given: Case) -> None:
    """o and states against the CPU backend, which test_delta.py holds to float64."""
    o = slow(given)
    got, want = forward(launch, given, o), forward(cpu_delta, given, o)
    assert error(got.out, want.out) < 6e-3 and error(got.final, want.final) < 6e-3
    behind = got.out[sum(given.lengths) * max(given.batch, 1) :]
    assert not behind.view(torch.int16).any()


def predicted(launch, given: Case = PACK) -> None:
    """o and states have the bytes of the written order; decays are powers of two, so exact."""
    o = operands(given)
    ties = o.initial.to(BF16).float().view(torch.int32) + 0x8000
    ln2 = 1 / torch.tensor(elementary.LOG2E_FP32[0], dtype=FP32)
    steps = drawn(*o.g.shape, seed=20, dtype=FP32).clamp(1.5, 3.4).round() - 2
    o = o._replace(g=-steps * ln2, initial=ties.view(FP32), k=o.k + o.k[:1])
    whole = o.g * elementary.LOG2E_FP32[0]
    assert same_bytes(whole, whole.round()) and len(whole.unique()) == 2
    got = forward(launch, given, o)
    for s, (first, end) in enumerate(given.sequences.bounds()):
        for head in range(given.heads[1] if end > first else 0):
            rows = (t[first:end, 0] for t in (o.q, o.k))
            own = (t[first:end, head] for t in (o.v, o.g, o.beta))
            out, final = delta_chunks.delta_rule(*rows, *own, o.initial[s, head], SCALE)
            assert same_bytes(got.out[first:end, head], out)
            assert same_bytes(got.final[s, head], final)


def pack_is_alone(launch, given: Case = PACK) -> None:
    """A sequence has the bytes that it has alone; NaN behind the pack reaches nothing."""
    o = operands(given)
    behind = slice(sum(given.lengths), None)
    for t in o[:5]:
        t[behind] = float("nan")
    got = forward(launch, given, o)
    for s, (first, end) in enumerate(given.sequences.bounds()):
        part = DeltaRule(*(t[first:end] for t in o[:5]), o.initial[s : s + 1])
        if end == first:
            assert same_bytes(got.final[s], o.initial[s])
            continue
        alone = forward(launch, given._replace(lengths=(end - first,), batch=1, behind=0), part)
        assert same_bytes(alone.out, got.out[first:end])
        assert same_bytes(alone.final[0], got.final[s])
    assert not got.out[behind].view(torch.int16).any()


def parts(launch, size: int = 16) -> None:
    """Rows computed with those of the open chunk again, from the state before it, as caches do."""
    given = Case((150,), heads=(1, 1), sizes=(size, size))
    o = slow(given)
    whole = forward(launch, given, o)
    for cut, lag in ((1, 0), (64, 0), (70, 0), (130, 0), (131, 5), (66, 5), (129, 1)):
        first = forward(launch, given._replace(lengths=(cut,)), _rows(o, 0, cut), lag)
        grid = max(cut - lag, 0) // 64 * 64
        rest = _rows(o, grid, 150)._replace(initial=first.final)
        rest = forward(launch, given._replace(lengths=(150 - grid,)), rest)
        assert same_bytes(first.out, whole.out[:cut]), cut
        assert same_bytes(rest.out, whole.out[grid:]) and same_bytes(rest.final, whole.final), cut


def _rows(o: DeltaRule, first: int, end: int) -> DeltaRule:
    return DeltaRule(*(t[first:end] for t in o[:5]), o.initial)


CHECKS = [
    *(case(engine, values, given) for engine in (SM90, INTERPRETER) for given in (PACK, BATCH)),
    *(case(engine, parts) for engine in (SM90, INTERPRETER)),
    *(
        case(CARD, check, wide(given))
        for given in (PACK, BATCH)
        for check in (values, *((predicted, pack_is_alone) if given is PACK else ()))
    ),
    case(CARD, parts, 64),
    case(INTERPRETER, pack_is_alone),
    case(SM90, predicted, **HOPPER),
    case(SM90, pack_is_alone, **LATE),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_forward(engine, check, options):
    with DELTA.running(engine, **options) as launch:
        check(launch)


#: Each changes a byte of the written order, or reads what is not there.
MUTANTS = {
    "ties_to_even": (
        predicted,
        ("return ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)",
         "return s.to(tl.bfloat16)"),
    ),
    "the_update_on_the_state": (
        predicted,
        ("update = product(tl.trans(weighted), u, tl.zeros(s.shape, tl.float32), UPCAST) + 0.0",
         "update = product(tl.trans(weighted), u, s * tl.exp2(whole), UPCAST)"),
        ("return tl.fma(tl.broadcast_to(tl.exp2(whole), s.shape), s, update)", "return update"),
    ),
    "one_term": (
        predicted,
        ("    acc = product(a_low, b_high, acc, UPCAST)\n"
         "    acc = product(a_high, b_low, acc, UPCAST)\n", ""),
    ),
    "pairs_of_blocks_alone": (
        predicted, ("    t = _merged(t, lower, 2 * BLOCK, UPCAST)\n", ""),
    ),
    "rows_behind": (
        pack_is_alone,
        ("return tl.load(ptr + offset, mask=inside[:, None], other=0.0)",
         "return tl.load(ptr + offset)"),
    ),
    "another_decay": (
        predicted, ("i[None, :] <= i[:, None], (g *", "i[None, :] < i[:, None], (g *"),
    ),
    "the_open_chunk_counts": (parts, ("tl.maximum(end - first - LAG, 0) //", "(end - first) //")),
}  # fmt: skip


@pytest.mark.mutants
@requires_core
@pytest.mark.sim
@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name):
    check, *edits = MUTANTS[name]
    DELTA.kill(SM90, check, *edits, **HOPPER)


def gradients(launch, given: Case = PACK) -> None:
    """Gradients against the CPU backend's."""
    o = slow(given)
    with DELTA.running(INTERPRETER) as before:
        of = forward(before, given, o)
    got = backward(launch, given, o, of)
    want = backward(cpu_delta, given, o, forward(cpu_delta, given, o))
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, b) < 1e-2, (name, error(a, b))


def gradients_of_a_pack(launch, given: Case = PACK) -> None:
    """Gradients of a sequence have the bytes that they have alone; those behind the pack are 0."""
    o, behind = operands(given), slice(sum(given.lengths), None)
    d_out, d_final = upstream(given)
    for t in (*o[:5], d_out):
        t[behind] = float("nan")
    with DELTA.running(INTERPRETER) as before:
        of = forward(before, given, o)
    got = backward(launch, given, o, of, (d_out, d_final))
    for s, (first, end) in enumerate(given.sequences.bounds()):
        if end == first:
            assert same_bytes(got.initial[s], d_final[s])
            continue
        alone = given._replace(lengths=(end - first,), batch=1, behind=0)
        part = DeltaRule(*(t[first:end] for t in o[:5]), o.initial[s : s + 1])
        with DELTA.running(INTERPRETER) as before:
            of_part = forward(before, alone, part)
        slopes = d_out[first:end], d_final[s : s + 1]
        own = backward(launch, alone, part, of_part, slopes)
        assert same_bytes(own.initial[0], got.initial[s])
        for name in got._fields[:5]:
            assert same_bytes(getattr(own, name), getattr(got, name)[first:end]), name
    for t in got[:5]:
        assert not t[behind].abs().sum()


GRADIENTS = [
    *(case(engine, gradients, given) for engine in (SM90, INTERPRETER) for given in (PACK, BATCH)),
    *(case(CARD, gradients, wide(given)) for given in (PACK, BATCH)),
    case(CARD, gradients_of_a_pack, wide(PACK)),
    case(INTERPRETER, gradients_of_a_pack),
    case(SM90, gradients_of_a_pack, **LATE),
]


@pytest.mark.parametrize(("engine", "check", "options"), GRADIENTS)
def test_backward(engine, check, options):
    with DELTA_BACKWARD.running(engine, **options) as launch:
        check(launch)


GRADIENT_MUTANTS = {
    "the_first_v_head": (
        gradients,
        ("s = _some_rows_of(states_ptr, slot, head, d, is_chunk, HV, K, V)\n        dq =",
         "s = _some_rows_of(states_ptr, slot, of_k * GROUP, d, is_chunk, HV, K, V)\n        dq ="),
    ),
    "no_read_of_the_key": (
        gradients, ("at_last = _total(of_u, CHUNK) + _total", "at_last = _total"),
    ),
    "the_inverse_itself": (gradients, ("product(tl.trans(inner), du", "product(inner, du")),
    "rows_behind": (
        gradients_of_a_pack,
        ("    there = inside & (sequence < SEQUENCES)\n    d, columns = tl.arange(0, K), tl.arange("
         "0, V)\n    square",
         "    there = inside\n    d, columns = tl.arange(0, K), tl.arange(0, V)\n    square"),
    ),
}  # fmt: skip


@pytest.mark.mutants
@pytest.mark.parametrize("name", GRADIENT_MUTANTS)
def test_killed_gradients(name):
    check, *edits = GRADIENT_MUTANTS[name]
    DELTA_BACKWARD.kill(INTERPRETER, check, *edits)


def everything(given: Case):
    """A call of all kernels; only launched, not run."""
    o = operands(given)

    def call(launch) -> None:
        rows = batched(given, *(t.unflatten(0, (1, -1)) for t in (o.k, o.v)))
        saved = op_delta._saved(*rows, given.offsets, on_cpu=False)
        final = torch.empty(given.count, given.heads[1], *given.sizes)
        if hasattr(launch, "delta_rule_backward"):
            of = Forward(o.v, final, saved)
            backward(launch, given, o, of)
        else:
            launch.delta_rule(o, given.sequences, SCALE, o.v, Last(final), saved)

    return call


@pytest.mark.parametrize("sizes", [(128, 128), (64, 64)])
@pytest.mark.parametrize("runner", [DELTA, DELTA_BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("target", TARGETS)
def test_code(target, runner, sizes):
    """No atomics, nothing fused, offsets of 64 bits, in every target."""
    given = Case((130, 5), heads=(1, 2), sizes=sizes)
    kernels = runner.compiled(target, lambda: everything(given)(runner.launch))
    assert len(kernels) == len(runner.written)
    assert {kernel.name: set(complaints(kernel)) - ALLOWED for kernel in kernels} == {
        kernel.name: set() for kernel in kernels
    }
