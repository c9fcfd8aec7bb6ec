"""Triton kernels of the gated delta rule and of Kimi delta attention, which has gates by channel.

sm_90 code in ptxsim, source in the interpreter.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.cpu import elementary
from cute_kernels.linear_attn.tensors import DeltaRule
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
    device_guard,  # noqa: F401  (a fixture)
    mutants,
)

from .delta_cases import BF16, FP32, Case, operands
from .launches import (
    ALLOWED,
    code,
    forward,
    gradients,
    gradients_of_a_pack,
    pack_is_alone,
    parts,
    values,
)
from .triton_engine import DELTA, DELTA_BACKWARD, KDA, KDA_BACKWARD

pytestmark = pytest.mark.simulates("linear_attn.triton")

#: Two chunks and a tail, one row, no row; rows behind the last sequence.
PACK = Case((70, 0, 1, 130), heads=(1, 2), sizes=(32, 32), behind=3)
BATCH = Case((67,), batch=2, heads=(2, 2), sizes=(16, 64), beta=FP32, initial=False)
SEQUENCE = Case((150,), heads=(1, 1), sizes=(16, 16))
KDA_PACK, KDA_BATCH, KDA_SEQUENCE = (
    given._replace(channels=True) for given in (PACK, BATCH, SEQUENCE)
)
TWO_PARTS = Case((67,), batch=2, heads=(1, 2), sizes=(128, 16), channels=True)
#: By whether gates are by channel.
FORWARD, BACKWARD = (DELTA, KDA), (DELTA_BACKWARD, KDA_BACKWARD)


def wide(given: Case) -> Case:
    """The case with sizes that the public function takes on a GPU."""
    return given._replace(sizes=(128, 128 if given.batch else 64))


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
            out, final = delta_chunks.delta_rule(*rows, *own, o.initial[s, head], given.options)
            assert same_bytes(got.out[first:end, head], out)
            assert same_bytes(got.final[s, head], final)


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


def steep(given: Case) -> DeltaRule:
    """Operands whose gates are -20 in all rows."""
    o = operands(given)
    return o._replace(g=torch.full_like(o.g, -20.0))


def steep_values(launch, given: Case) -> None:
    """Gates of -20 overflow nothing, in chunks of any length."""
    values(launch, given, steep(given))


CHECKS = [
    *(case(engine, values, given) for engine in (SM90, INTERPRETER) for given in (PACK, BATCH)),
    *(case(engine, parts, SEQUENCE) for engine in (SM90, INTERPRETER)),
    *(
        case(CARD, check, wide(given))
        for given in (PACK, BATCH)
        for check in (values, *((predicted, pack_is_alone) if given is PACK else ()))
    ),
    case(CARD, parts, SEQUENCE._replace(sizes=(64, 64))),
    case(INTERPRETER, pack_is_alone, PACK),
    case(INTERPRETER, steep_values, PACK),
    case(SM90, predicted, **HOPPER),
    case(SM90, pack_is_alone, PACK, **LATE),
]
CHECKS_OF_KDA = [
    *(case(e, values, given) for e in (SM90, INTERPRETER) for given in (KDA_PACK, KDA_BATCH)),
    *(case(e, parts, KDA_SEQUENCE) for e in (SM90, INTERPRETER)),
    *(case(CARD, c, wide(KDA_PACK)) for c in (values, predicted, pack_is_alone, steep_values)),
    case(CARD, values, wide(KDA_BATCH)),
    case(CARD, parts, KDA_SEQUENCE._replace(sizes=(64, 64))),
    *(case(INTERPRETER, check, KDA_PACK) for check in (pack_is_alone, steep_values)),
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
        SM90, predicted, PACK,
        ("s_hat = s.to(tl.bfloat16)",
         "s_hat = ((s.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)"
         ".to(tl.bfloat16)"),
    ),
    "the_update_on_the_state": (
        SM90, predicted, PACK,
        ("update = product(tl.trans(k), u, tl.zeros(s.shape, tl.float32), UPCAST)",
         "update = product(tl.trans(k), u, s * tl.exp2(whole), UPCAST)"),
        ("return tl.fma(tl.broadcast_to(tl.exp2(whole), s.shape), s, update)", "return update"),
    ),
    "two_blocks_alone": (SM90, predicted, PACK, ("for b in tl.static_range(1, _BLOCKS)",
                                     "for b in tl.static_range(1, 2)")),
    "earlier_blocks_of_T": (
        SM90, predicted, PACK,
        ("rest = unit - product(lower, a, zero", "rest = unit - product(lower, t, zero"),
    ),
    "rows_behind": (
        SM90, pack_is_alone, PACK,
        ("return tl.load(ptr + offset, mask=inside[:, None], other=0.0)",
         "return tl.load(ptr + offset)"),
    ),
    "another_decay": (
        SM90, predicted, PACK, ("i[None, :] <= i[:, None], (g *", "i[None, :] < i[:, None], (g *"),
    ),
    "the_open_chunk_counts": (
        SM90, parts, SEQUENCE,
        ("tl.maximum(end - first - LAG, 0) //", "(end - first) //"),
    ),
}  # fmt: skip


MUTANTS_OF_KDA = {
    "the_reference_in_the_middle": (
        SM90, parts, KDA_SEQUENCE,
        ("<< (LEVELS - 1 - level)) - 1\n", "<< (LEVELS - 1 - level)) + (16 >> level)\n"),
    ),
    "no_reference": (
        SM90, steep_values, KDA_PACK,
        ("factor = tl.exp2(tl.where(second[:, None], decay - e, e - decay))",
         "factor = tl.exp2(tl.where(second[:, None], decay, -decay))"),
    ),
    "levels_of_one_reference": (
        SM90, steep_values, KDA_PACK,
        ("reference = (((block >> 1) * 2 + 1) << (LEVELS - 1 - level)) - 1",
         "reference = block * 0 + 31"),
    ),
    "another_order_of_gates": (
        SM90, sums_of_gates,
        ("total += rows[i] * factor", "total += rows[_AHEAD - 1 - i] * factor"),
    ),
    "one_product_of_both_parts": (
        SM90, predicted, TWO_PARTS,
        ("kk_part, qk_part = zero, product(q, tl.trans(k), zero, UPCAST)",
         "kk_part, qk_part = zero, product(q, tl.trans(k), qk, UPCAST) - qk"),
    ),
    "decays_behind": (
        SM90, pack_is_alone, KDA_PACK,
        ("(tl.minimum(row, last)[:, None] * HV + head) * K",
         "(tl.maximum(row, last)[:, None] * HV + head) * K"),
    ),
    "the_state_decays_by_a_channel": (
        SM90, values, KDA_PACK,
        ("* K + tl.arange(0, K)))[:, None]", "* K + 0 * tl.arange(0, K)))[:, None]"),
    ),
}  # fmt: skip


@pytest.mark.mutants
@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
def test_killed(engine, check, edits):
    DELTA.kill(engine, check, *edits, **HOPPER)


@pytest.mark.mutants
@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS_OF_KDA))
def test_killed_of_kda(engine, check, edits):
    KDA.kill(engine, check, *edits, **HOPPER)


def steep_gradients(launch, given: Case) -> None:
    """Those of gates of -20 are about 0."""
    assert gradients(launch, given, steep(given), but="g").g.abs().max() < 0.1


GRADIENTS = [
    *(case(engine, gradients, given) for engine in (SM90, INTERPRETER) for given in (PACK, BATCH)),
    *(case(CARD, gradients, wide(given)) for given in (PACK, BATCH)),
    case(CARD, gradients_of_a_pack, wide(PACK)),
    case(INTERPRETER, gradients_of_a_pack, PACK),
    case(INTERPRETER, steep_gradients, PACK),
    case(SM90, gradients_of_a_pack, PACK, **LATE),
]
GRADIENTS_OF_KDA = [
    *(case(e, gradients, given) for e in (SM90, INTERPRETER) for given in (KDA_PACK, KDA_BATCH)),
    case(INTERPRETER, gradients, TWO_PARTS),
    *(case(CARD, gradients, wide(given)) for given in (KDA_PACK, KDA_BATCH)),
    case(CARD, gradients_of_a_pack, wide(KDA_PACK)),
    case(INTERPRETER, gradients_of_a_pack, KDA_PACK),
    case(INTERPRETER, steep_gradients, KDA_PACK),
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
        INTERPRETER, gradients, PACK,
        ("s = some_rows_of(states_ptr, slot, head, d, is_chunk, HV, K, V)\n        dq =",
         "s = some_rows_of(states_ptr, slot, of_k * GROUP, d, is_chunk, HV, K, V)\n        dq ="),
    ),
    "no_read_of_the_key": (
        INTERPRETER, gradients, PACK,
        ("at_last = _total(of_u, CHUNK) + _total", "at_last = _total"),
    ),
    "the_inverse_itself": (
        INTERPRETER, gradients, PACK,
        ("product(tl.trans(inner), du", "product(inner, du"),
    ),
    "rows_behind": (
        INTERPRETER, gradients_of_a_pack, PACK,
        ("    there = inside & (sequence < SEQUENCES)\n    d, columns = tl.arange(0, K), tl.arange("
         "0, V)\n    square",
         "    there = inside\n    d, columns = tl.arange(0, K), tl.arange(0, V)\n    square"),
    ),
    # Rows behind the last one have its decay: 2^-G_j may overflow, and 0 · inf is NaN.
    "later_decays_of_a_partial_chunk": (
        INTERPRETER, steep_gradients, PACK,
        ("tl.load(decay_ptr + (tl.minimum(row, end - 1) * HV + head))",
         "gates_at(decay_ptr, row, head, HV, row < end)"),
    ),
}  # fmt: skip


GRADIENT_MUTANTS_OF_KDA = {
    "no_read_of_the_last_row": (
        INTERPRETER, gradients, KDA_PACK,
        ("at_last += of_states * tl.exp2(whole)", "at_last += 0.0"),
    ),
    "one_sign_of_k": (
        INTERPRETER, gradients, KDA_PACK,
        ("q32 * dq + k32 * (z - m)", "q32 * dq + k32 * (z + m)"),
    ),
    "beta_of_the_later_row": (
        INTERPRETER, gradients, KDA_PACK,
        ("d2 = dl + tl.trans(d2)", "d2 = dl + tl.trans(dl)"),
    ),
    "levels_of_one_half": (
        INTERPRETER, gradients, KDA_PACK,
        ("z += tl.where(second[:, None], both, 0.0)", "z += tl.where(second[:, None], 0.0, both)"),
    ),
    "the_first_row_first": (
        INTERPRETER, gradients, KDA_PACK,
        ("dg_ptr, dg_ptr, last, -1, last", "dg_ptr, dg_ptr, start, 1, last"),
    ),
    "rows_behind": (
        INTERPRETER, gradients_of_a_pack, KDA_PACK,
        ("running_sums(\n        dg_ptr, dg_ptr, last, -1, last - start + 1, head, sequence < SEQ",
         "running_sums(\n        dg_ptr, dg_ptr, last, -1, last - start, head, sequence < SEQ"),
    ),
}  # fmt: skip


@pytest.mark.mutants
@pytest.mark.parametrize(("engine", "check", "edits"), mutants(GRADIENT_MUTANTS))
def test_killed_gradients(engine, check, edits):
    DELTA_BACKWARD.kill(engine, check, *edits)


@pytest.mark.mutants
@pytest.mark.parametrize(("engine", "check", "edits"), mutants(GRADIENT_MUTANTS_OF_KDA))
def test_killed_gradients_of_kda(engine, check, edits):
    KDA_BACKWARD.kill(engine, check, *edits)


@pytest.mark.parametrize("sizes", [(128, 128), (64, 64)])
@pytest.mark.parametrize("channels", [False, True], ids=["delta", "kda"])
@pytest.mark.parametrize("runners", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("target", TARGETS)
def test_code(target, runners, channels, sizes):
    """No atomics, nothing fused, offsets of 64 bits, in every target."""
    given, runner = Case((130, 5), heads=(1, 2), sizes=sizes, channels=channels), runners[channels]
    allowed = ALLOWED
    if channels and target == "sm_90":  # two chunks of k and of k with decays, of Hopper's 227 KiB
        allowed = ALLOWED | {"shared memory"}
    kernels = code(runner, target, given, allowed)
    assert target != "sm_90" or all(kernel.metadata.shared <= 227 << 10 for kernel in kernels)
