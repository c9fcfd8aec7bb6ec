"""Triton kernels of the gated delta rule and of Kimi delta attention, which has gates by channel.

sm_90 code in ptxsim, source in the interpreter.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.cpu import elementary
from cute_kernels.linear_attn import cpu_delta
from cute_kernels.linear_attn.tensors import DeltaRule, Last
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
from .delta_launches import ALLOWED, SCALE, Forward, backward, forward, saved_of, slow
from .triton_engine import DELTA, DELTA_BACKWARD, KDA, KDA_BACKWARD

pytestmark = pytest.mark.simulates("linear_attn.triton")

#: Two chunks and a tail, one row, no row; rows behind the last sequence.
PACK = Case((70, 0, 1, 130), heads=(1, 2), sizes=(32, 32), behind=3)
BATCH = Case((67,), batch=2, heads=(2, 2), sizes=(16, 64), beta=FP32, initial=False)
KDA_PACK, KDA_BATCH = (given._replace(channels=True) for given in (PACK, BATCH))
TWO_PARTS = Case((67,), batch=2, heads=(1, 2), sizes=(128, 16), channels=True)
#: By whether gates are by channel.
FORWARD, BACKWARD = (DELTA, KDA), (DELTA_BACKWARD, KDA_BACKWARD)


def wide(given: Case) -> Case:
    """The case with sizes that the public function takes on a GPU."""
    return given._replace(sizes=(128, 128 if given.batch else 64))


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


def parts(launch, size: int = 16, channels: bool = False) -> None:
    """Rows computed with those of the open chunk again, from the state before it, as caches do."""
    given = Case((150,), heads=(1, 1), sizes=(size, size), channels=channels)
    o = slow(given)
    whole = forward(launch, given, o)
    for cut, lag in ((1, 0), (64, 0), (70, 0), (100, 0), (130, 0), (131, 5), (66, 5), (129, 1)):
        first = forward(launch, given._replace(lengths=(cut,)), _rows(o, 0, cut), lag)
        grid = max(cut - lag, 0) // 64 * 64
        rest = _rows(o, grid, 150)._replace(initial=first.final)
        rest = forward(launch, given._replace(lengths=(150 - grid,)), rest)
        assert same_bytes(first.out, whole.out[:cut]), cut
        assert same_bytes(rest.out, whole.out[grid:]) and same_bytes(rest.final, whole.final), cut


def sums_of_gates(launch) -> None:
    """G of a chunk is a chain of its rows, in log2 units."""
    given = KDA_PACK
    o = operands(given)
    decay = forward(launch, given, o).saved.decay
    steps = o.g * torch.tensor(elementary.LOG2E_FP32[0], dtype=FP32)
    for first, end in given.sequences.bounds():
        for start in range(first, end, 64):
            rows = slice(start, min(start + 64, end))
            assert same_bytes(decay[rows], delta_chunks.running_sums(steps[rows]))
    assert not decay[sum(given.lengths) :].view(torch.int32).any()


def steep(launch, given: Case) -> None:
    """Gates of -20 in all rows overflow nothing, in chunks of any length."""
    o = operands(given)
    o = o._replace(g=torch.full_like(o.g, -20.0))
    got, want = forward(launch, given, o), forward(cpu_delta, given, o)
    assert error(got.out, want.out) < 6e-3 and error(got.final, want.final) < 6e-3


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
    case(INTERPRETER, steep, PACK),
    case(SM90, predicted, **HOPPER),
    case(SM90, pack_is_alone, **LATE),
]
CHECKS_OF_KDA = [
    *(case(e, values, given) for e in (SM90, INTERPRETER) for given in (KDA_PACK, KDA_BATCH)),
    *(case(e, check, 16, True) for e in (SM90, INTERPRETER) for check in (parts,)),
    *(case(CARD, c, wide(KDA_PACK)) for c in (values, predicted, pack_is_alone, steep)),
    case(CARD, values, wide(KDA_BATCH)),
    case(CARD, parts, 64, True),
    *(case(INTERPRETER, check, KDA_PACK) for check in (pack_is_alone, steep)),
    case(INTERPRETER, sums_of_gates),
    case(SM90, predicted, KDA_PACK, **HOPPER),
    case(SM90, predicted, TWO_PARTS, **HOPPER),
    case(SM90, pack_is_alone, KDA_PACK, **LATE),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_forward(engine, check, options):
    with DELTA.running(engine, **options) as launch:
        check(launch)


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS_OF_KDA)
def test_forward_of_kda(engine, check, options):
    with KDA.running(engine, **options) as launch:
        check(launch)


#: Each changes a byte of the written order, or reads what is not there.
MUTANTS = {
    "ties_away": (
        predicted,
        ("s_hat = s.to(tl.bfloat16)",
         "s_hat = ((s.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)"
         ".to(tl.bfloat16)"),
    ),
    "the_update_on_the_state": (
        predicted,
        ("update = product(tl.trans(k), weighted, tl.zeros(s.shape, tl.float32), UPCAST)",
         "update = product(tl.trans(k), weighted, s * tl.exp2(whole), UPCAST)"),
        ("return tl.fma(tl.broadcast_to(tl.exp2(whole), s.shape), s, update)", "return update"),
    ),
    "two_blocks_alone": (predicted, ("for b in tl.static_range(1, _BLOCKS)",
                                     "for b in tl.static_range(1, 2)")),
    "earlier_blocks_of_T": (
        predicted,
        ("rest = unit - product(lower, a, zero", "rest = unit - product(lower, t, zero"),
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


MUTANTS_OF_KDA = {
    "the_reference_in_the_middle": (
        parts, 16, True,
        ("<< (LEVELS - 1 - level)) - 1\n", "<< (LEVELS - 1 - level)) + (16 >> level)\n"),
    ),
    "no_reference": (
        steep, KDA_PACK,
        ("factor = tl.exp2(tl.where(second[:, None], decay - e, e - decay))",
         "factor = tl.exp2(tl.where(second[:, None], decay, -decay))"),
    ),
    "levels_of_one_reference": (
        predicted, KDA_PACK,
        ("reference = (((block >> 1) * 2 + 1) << (LEVELS - 1 - level)) - 1",
         "reference = block * 0 + 31"),
    ),
    "another_order_of_gates": (
        sums_of_gates, ("total += rows[i] * factor", "total += rows[_AHEAD - 1 - i] * factor"),
    ),
    "one_product_of_both_parts": (
        predicted, TWO_PARTS,
        ("kk_part, qk_part = zero, product(q, tl.trans(k), zero, UPCAST)",
         "kk_part, qk_part = zero, product(q, tl.trans(k), qk, UPCAST) - qk"),
    ),
    "decays_behind": (
        pack_is_alone, KDA_PACK,
        ("(tl.minimum(row, last)[:, None] * HV + head) * K",
         "(tl.maximum(row, last)[:, None] * HV + head) * K"),
    ),
    "the_state_decays_by_a_channel": (
        values, KDA_PACK,
        ("* K + tl.arange(0, K)))[:, None]", "* K + 0 * tl.arange(0, K)))[:, None]"),
    ),
}  # fmt: skip


@pytest.mark.mutants
@requires_core
@pytest.mark.sim
@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name):
    check, *edits = MUTANTS[name]
    DELTA.kill(SM90, check, *edits, **HOPPER)


@pytest.mark.mutants
@requires_core
@pytest.mark.sim
@pytest.mark.parametrize("name", MUTANTS_OF_KDA)
def test_killed_of_kda(name):
    check, *rest = MUTANTS_OF_KDA[name]
    edits = [t for t in rest if isinstance(t, tuple) and not isinstance(t, Case)]
    arguments = [t for t in rest if t not in edits]
    KDA.kill(SM90, lambda launch: check(launch, *arguments), *edits, **HOPPER)


def gradients(launch, given: Case = PACK, steep: bool = False) -> None:
    """Gradients against the CPU backend's; steep: of gates of -20, whose gradients are about 0."""
    o = slow(given)
    if steep:
        o = o._replace(g=torch.full_like(o.g, -20.0))
    with FORWARD[given.channels].running(INTERPRETER) as before:
        of = forward(before, given, o)
    got = backward(launch, given, o, of)
    want = backward(cpu_delta, given, o, forward(cpu_delta, given, o))
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None) == (b is None)
        if steep and name == "g":
            assert a.abs().max() < 0.1
        else:
            assert a is None or error(a, b) < 1e-2, (name, error(a, b))


def gradients_of_a_pack(launch, given: Case = PACK) -> None:
    """Gradients of a sequence have the bytes that they have alone; those behind the pack are 0."""
    o, behind = operands(given), slice(sum(given.lengths), None)
    d_out, d_final = upstream(given)
    for t in (*o[:5], d_out):
        t[behind] = float("nan")
    with FORWARD[given.channels].running(INTERPRETER) as before:
        of = forward(before, given, o)
    got = backward(launch, given, o, of, (d_out, d_final))
    for s, (first, end) in enumerate(given.sequences.bounds()):
        if end == first:
            assert same_bytes(got.initial[s], d_final[s])
            continue
        alone = given._replace(lengths=(end - first,), batch=1, behind=0)
        part = DeltaRule(*(t[first:end] for t in o[:5]), o.initial[s : s + 1])
        with FORWARD[given.channels].running(INTERPRETER) as before:
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
    case(INTERPRETER, gradients, PACK, True),
    case(SM90, gradients_of_a_pack, **LATE),
]
GRADIENTS_OF_KDA = [
    *(case(e, gradients, given) for e in (SM90, INTERPRETER) for given in (KDA_PACK, KDA_BATCH)),
    case(INTERPRETER, gradients, TWO_PARTS),
    *(case(CARD, gradients, wide(given)) for given in (KDA_PACK, KDA_BATCH)),
    case(CARD, gradients_of_a_pack, wide(KDA_PACK)),
    case(INTERPRETER, gradients_of_a_pack, KDA_PACK),
    case(INTERPRETER, gradients, KDA_PACK, True),
    case(SM90, gradients_of_a_pack, KDA_PACK, **LATE),
]


@pytest.mark.parametrize(("engine", "check", "options"), GRADIENTS)
def test_backward(engine, check, options):
    with DELTA_BACKWARD.running(engine, **options) as launch:
        check(launch)


@pytest.mark.parametrize(("engine", "check", "options"), GRADIENTS_OF_KDA)
def test_backward_of_kda(engine, check, options):
    with KDA_BACKWARD.running(engine, **options) as launch:
        check(launch)


GRADIENT_MUTANTS = {
    "the_first_v_head": (
        gradients,
        ("s = some_rows_of(states_ptr, slot, head, d, is_chunk, HV, K, V)\n        dq =",
         "s = some_rows_of(states_ptr, slot, of_k * GROUP, d, is_chunk, HV, K, V)\n        dq ="),
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


GRADIENT_MUTANTS_OF_KDA = {
    "no_read_of_the_last_row": (
        gradients, ("at_last += _of_states(s, ds, PART, V) * tl.exp2(whole)", "at_last += 0.0"),
    ),
    "one_sign_of_k": (gradients, ("q32 * dq + k32 * (z - m)", "q32 * dq + k32 * (z + m)")),
    "beta_of_the_later_row": (gradients, ("d2 = dl + tl.trans(d2)", "d2 = dl + tl.trans(dl)")),
    "levels_of_one_half": (
        gradients,
        ("z += tl.where(second[:, None], both, 0.0)", "z += tl.where(second[:, None], 0.0, both)"),
    ),
    "the_first_row_first": (
        gradients, ("dg_ptr, dg_ptr, last, -1, last", "dg_ptr, dg_ptr, start, 1, last"),
    ),
    "rows_behind": (
        gradients_of_a_pack,
        ("running_sums(\n        dg_ptr, dg_ptr, last, -1, last - start + 1, head, sequence < SEQ",
         "running_sums(\n        dg_ptr, dg_ptr, last, -1, last - start, head, sequence < SEQ"),
    ),
}  # fmt: skip


@pytest.mark.mutants
@pytest.mark.parametrize("name", GRADIENT_MUTANTS | GRADIENT_MUTANTS_OF_KDA)
def test_killed_gradients(name):
    of_kda = name in GRADIENT_MUTANTS_OF_KDA
    check, *edits = (GRADIENT_MUTANTS_OF_KDA if of_kda else GRADIENT_MUTANTS)[name]
    given = KDA_PACK if of_kda else PACK
    BACKWARD[of_kda].kill(INTERPRETER, lambda launch: check(launch, given), *edits)


def test_later_decays_of_a_partial_chunk_are_killed():
    """Rows behind the last one have its decay: 2^-G_j may overflow, and 0 · inf is NaN."""
    edit = "tl.load(decay_ptr + (tl.minimum(row, end - 1) * HV + head))"
    edit = edit, "gates_at(decay_ptr, row, head, HV, row < end)"
    DELTA_BACKWARD.kill(INTERPRETER, lambda launch: gradients(launch, PACK, True), edit)


def everything(given: Case):
    """A call of all kernels; only launched, not run."""
    o = operands(given)

    def call(launch) -> None:
        saved = saved_of(given, o)
        final = torch.empty(given.count, given.heads[1], *given.sizes)
        if hasattr(launch, "delta_rule_backward"):
            of = Forward(o.v, final, saved)
            backward(launch, given, o, of)
        else:
            launch.delta_rule(o, given.sequences, SCALE, o.v, Last(final), saved)

    return call


@pytest.mark.parametrize("sizes", [(128, 128), (64, 64)])
@pytest.mark.parametrize("channels", [False, True], ids=["delta", "kda"])
@pytest.mark.parametrize("runners", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("target", TARGETS)
def test_code(target, runners, channels, sizes):
    """No atomics, nothing fused, offsets of 64 bits, in every target."""
    given, runner = Case((130, 5), heads=(1, 2), sizes=sizes, channels=channels), runners[channels]
    kernels = runner.compiled(target, lambda: everything(given)(runner.launch))
    assert len(kernels) == len(runner.written)
    allowed = ALLOWED
    if channels and target == "sm_90":  # two chunks of k and of k with decays, of Hopper's 227 KiB
        allowed = ALLOWED | {"shared memory"}
        assert all(kernel.metadata.shared <= 227 << 10 for kernel in kernels)
    assert {kernel.name: set(complaints(kernel)) - allowed for kernel in kernels} == {
        kernel.name: set() for kernel in kernels
    }
