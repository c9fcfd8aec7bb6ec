"""SM90 kernels of the gated delta rule: bytes of the written order, schedules, memory, mutants."""

from __future__ import annotations

import functools

import pytest
import torch

import ptxsim
from cute_kernels.linear_attn import launch
from cute_kernels.linear_attn.tensors import DeltaGradients
from cute_kernels.linear_attn.triton import delta, delta_backward
from ptxsim.modes import QUICK_MODES, RACES, run_modes
from ptxsim.skips import requires_sim
from tests import on_gpu
from tests.contract import same_bytes
from tests.kernels.edited import kernels
from tests.old_memory import old_memory
from tests.triton_runner import SM90, device_guard  # noqa: F401  (a fixture)

from . import decoding
from . import simulated as system
from .delta_cases import BF16, FP32, Case, operands, upstream
from .launches import Forward, backward, forward

pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("linear_attn")]
HOPPER = {"wgmma_math": 2}

#: A tail, no row, a row, two chunks and a tail; rows behind, whole slots among them.
PACK = Case((70, 0, 1, 130), heads=(1, 2), sizes=(64, 64), behind=70)
CASES = {
    "pack": PACK,
    "K of 128": Case((3, 64), heads=(1, 1), sizes=(128, 64)),
    "batch": Case((100,), batch=2, heads=(2, 2), sizes=(64, 128), beta=FP32, initial=False),
    # More chunks than stages.
    "long": Case((390,), heads=(1, 1), sizes=(64, 64), behind=2),
}


def given(case: Case):
    """Operands with slow gates and NaN behind the pack, and gradients that come in."""
    o, slopes = operands(case), upstream(case)
    for t in (*o[:5], slopes[0]) if not case.batch else ():
        t[sum(case.lengths) :] = float("nan")
    return o._replace(g=o.g * 0.05), slopes


def both(of_launch, case: Case, lag: int = -1) -> tuple[Forward, DeltaGradients]:
    """Both passes by a launcher: a module, or those of a forward and a backward."""
    o, slopes = given(case)
    forth, back = of_launch if isinstance(of_launch, tuple) else (of_launch, of_launch)
    of = forward(forth, case, o, lag)
    slopes = slopes if case.initial else (slopes[0], None)
    return of, backward(back, case, o, of, slopes)


def flat(results: tuple[Forward, DeltaGradients]) -> list[torch.Tensor]:
    of, gradients = results
    return [of.out, of.final, *of.saved, *(t for t in gradients if t is not None)]


def written_order(kernel=None, name: str = "pack", lag: int = -1, **options: int) -> None:
    """All results and what is saved have the bytes of the Triton kernels."""
    case = CASES[name]
    with system.running(kernel, **HOPPER, **options) as sm90:
        want, got = both((delta, delta_backward), case, lag), both(sm90, case, lag)
        for a, b in zip(flat(want), flat(got), strict=True):
            assert same_bytes(a, b)


@pytest.mark.parametrize("lag", [-1, 5])
@pytest.mark.parametrize("name", CASES)
def test_written_order(name, lag):
    written_order(name=name, lag=lag)


#: Sizes of decoding, with betas of new rows: K, V.
STEP_CASES = {
    "narrow": decoding.CASE._replace(sizes=(64, 64)),
    "wide": decoding.CASE._replace(sizes=(128, 128), beta=FP32),
    "K of 128": decoding.CASE._replace(sizes=(128, 64), heads=(2, 2)),
    "V of 128": decoding.CASE._replace(sizes=(64, 128)),
}


def steps(kernel=None, name: str = "narrow", drafts: int = decoding.DRAFTS, **options) -> None:
    """Steps have the bytes of Triton's one pass, whatever drafts come between."""
    running = functools.partial(system.running, kernel, **HOPPER, **options)
    decoding.steps(SM90, given=STEP_CASES[name], drafts=drafts, running=running, **HOPPER)


#: Sizes by day; each is a kernel to compile.
STEPS_BY_DAY = ("narrow", "wide")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in STEPS_BY_DAY else pytest.mark.nightly) for n in STEP_CASES],
)
def test_steps(name):
    steps(name=name)


def test_steps_with_drafts_over_chunks():
    """S' of chunks that may be dropped again is another's than the slot's."""
    steps(drafts=70)


def step_schedules(kernel=None, modes=QUICK_MODES) -> None:
    """Steps that start, cross and close a chunk in each timing of the simulator, without races."""
    given = STEP_CASES["narrow"]
    o = decoding.slow(0, given)

    def run():
        kept = decoding.record(given)
        decoding.at_chunk(kept, o, 62, SM90, HOPPER)
        with system.running(kernel) as sm90:
            outs = [
                decoding.step(sm90, kept, [decoding.part(o, row, row + 4)] * 2) for row in (62, 66)
            ]
        rings = [t[:-1][: 2 * kept.rows] for t in (*kept.tensors[1:], *kept.derived)]
        return *outs, kept.tensors[0][:2], kept.rounded[:2], *(t[60:70] for t in rings)

    run_modes(run, modes)


def test_steps_have_no_races():
    step_schedules(modes=RACES)


@pytest.mark.nightly
def test_step_schedules():
    step_schedules()


def test_steps_of_a_pack():
    """Sequences of other lengths by offsets of 32 bits, one of them empty, in slots by place."""
    given = STEP_CASES["narrow"]
    o = decoding.slow(0, given)
    with decoding.DELTA.running(SM90, **HOPPER) as launch_of_triton:
        whole = forward(launch_of_triton, given, o).out
    kept = decoding.record(given)
    decoding.at_chunk(kept, o, 62, SM90, HOPPER)
    pieces = decoding.part(o, 62, 63), decoding.part(o, 62, 65), decoding.part(o, 0, 3)
    rows = [torch.cat(each) for each in zip(*pieces, strict=True)]
    out = torch.zeros_like(rows[2])
    with system.running(**HOPPER) as sm90:
        offsets = torch.tensor([0, 1, 1, 4], dtype=torch.int32)
        slots = torch.tensor([0, 2, 1], dtype=torch.int32)
        operands_of = decoding.DeltaRule(*rows, None)
        kept.tensors[0][2] = 0
        sm90.delta_step(operands_of, 7, offsets, slots, Case.options, out, kept)
    assert same_bytes(out[:1], whole[62:63]) and same_bytes(out[1:4], whole[62:65])
    assert not out[4:].any() and kept.length.tolist() == [63, 65, 0]


def test_the_rounded_state_is_made_where_it_is_not_there():
    """Steps behind a prefill, and behind steps of Triton's kernel, which keeps none."""
    given = STEP_CASES["narrow"]
    o = decoding.slow(0, given)
    kept = decoding.record(given)
    decoding.at_chunk(kept, o, 68, SM90, HOPPER)
    rows = [decoding.part(o, 68, 69)]
    with system.running(**HOPPER) as sm90:
        assert kept.rounded_at.tolist() == [0, 0, 0]
        decoding.step(sm90, kept, rows)
        assert kept.rounded_at.tolist() == [65, 0, 0]
        state = kept.tensors[0][0].to(BF16)
        assert same_bytes(kept.rounded[0].flatten().sort()[0], state.flatten().sort()[0])
    with decoding.DELTA_STEP.running(SM90, **HOPPER) as triton:
        decoding.step(triton, kept, [decoding.part(o, 69, 70)])
    assert kept.rounded_at.tolist() == [0, 0, 0]


def schedules(kernel=None, modes=QUICK_MODES, name: str = "long") -> None:
    """Each timing of the simulator gives the same bytes, and none finds a race."""

    def run():
        with system.running(kernel) as sm90:
            return tuple(flat(both(sm90, CASES[name]))[:2])

    run_modes(run, modes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_schedules(name):
    schedules(name=name)


@pytest.mark.parametrize("name", ["pack", "long"])
def test_no_races(name):
    schedules(modes=RACES, name=name)


def test_rows_that_tma_cannot_address_are_copied():
    o, _ = given(PACK)
    wide = torch.zeros(PACK.rows, PACK.heads[0], 65, dtype=o.k.dtype)
    wide[..., 1:] = o.k
    with system.running() as sm90, old_memory():
        want = forward(sm90, PACK, o)
        got = forward(sm90, PACK, o._replace(k=wide[..., 1:]))
    assert not launch._is_addressable(wide[..., 1:]) and same_bytes(got.out, want.out)


def test_states_that_lie_anywhere_are_copied():
    o, (d_out, d_final) = given(PACK)

    def shifted(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    with system.running() as sm90, old_memory():
        of = forward(sm90, PACK, o)
        want = backward(sm90, PACK, o, of, (d_out, d_final))
        moved = o._replace(initial=shifted(o.initial))
        assert moved.initial.data_ptr() % 16 and same_bytes(forward(sm90, PACK, moved).out, of.out)
        got = backward(sm90, PACK, moved, of, (d_out, shifted(d_final)))
    assert same_bytes(got.q, want.q) and same_bytes(got.initial, want.initial)


FORWARD, BACK, STEP = "kernel_delta_sm90", "kernel_delta_bwd_sm90", "kernel_delta_step_sm90"
#: Name -> (source, its text, the bug in its place, who notices).
MUTANTS = {
    "neighbours_keys": (FORWARD, 'self.clear_rows((tiles["sK"],), stage, count, lane)', "pass",
                        written_order),
    "u_rounded_before_its_weight": (
        FORWARD, "self.weigh(tRrR, weight, count, acc, rW)",
        "self.weigh(cute.make_tensor(rR.iterator, acc.rows), weight, count, acc, rW)",
        written_order),
    "the_update_on_the_state": (
        FORWARD, "tSrS[i] = cute.math.fma(whole, tSrS[i], tSrD[i])",
        "tSrS[i] = whole * tSrS[i] + 0.0 + tSrD[i]", written_order),
    "behind_whole_chunks": (FORWARD, "kept // ROWS * ROWS", "kept",
                            lambda kernel: written_order(kernel, lag=5)),
    "slots_left": (FORWARD, "until = tensors.mStates.shape[0]", "pass", written_order),
    "tile_of_S_not_awaited": (FORWARD, "handover.await_full(STATE, n)", "pass", schedules),
    "tile_of_u_overwritten": (FORWARD, "handover.await_empty(ROWS_OF_U, n)", "pass", schedules),
    "neighbours_queries": (BACK, '(tiles["sQ"], tiles["sK"], tiles["sA"])',
                           '(tiles["sK"], tiles["sA"])', written_order),
    "the_inverse_itself": (
        BACK, 'tRrA = self.fragment_b(acc.by_rows, tiles["sAt"])',
        'tRrA = self.fragment_b(acc.by_keys, tiles["sA"])',
        "self.multiply(acc.by_rows, tRrR, rU", "self.multiply(acc.by_keys, tRrR, rU",
        written_order,
    ),
    "first_chunk_first": (BACK, "return place.chunks - 1 - n", "return n", written_order),
    "a_chain_of_gates": (STEP, "before + left", "before + left + 0.25", steps),
    "drafts_are_for_good": (STEP, "cutlass.max(total - scalars.drafts, 0) //", "total //", steps),
    "rounded_state_stays": (
        STEP, "            self.keep_rounded(self.as_operand(step, acc), following.rounded, part)",
        "            pass", steps,
    ),
    "scratch_is_the_slots": (
        STEP, 'if start + ROWS > shared.sPlace[PLACE.index("whole")]:', "if start + ROWS > total:",
        steps,
    ),
    "rows_made_again_are_old": (STEP, "cutlass.min(cutlass.max(counters.mMade[slot] - grid, 0), "
                                "opened)", "cutlass.max(counters.mMade[slot] - grid, 0)", steps),
    "a_block_without_those_before": (STEP, "acc[e] = unit - acc[e]", "acc[e] = unit", steps),
    "u_of_its_block_alone": (STEP, "self.multiply(step, accU, rR[s], rA)", "pass", steps),
    "rows_of_k_not_awaited": (
        STEP, "        cute.arch.cp_async_wait_group(0)\n        cute.arch.sync_threads()\n\n"
        "        accR", "        cute.arch.sync_threads()\n\n        accR", step_schedules,
    ),
    "T_not_awaited": (
        STEP, "self.keep(step.record.mR, ownR, step, b)\n        cute.arch.sync_threads()\n",
        "self.keep(step.record.mR, ownR, step, b)\n", step_schedules,
    ),
    "a_whole_chunk_not_awaited": (STEP, "        cute.arch.cp_async_commit_group()  # of a chunk "
                                  "without new rows\n        cute.arch.cp_async_wait_group(0)\n",
                                  "", step_schedules),
    "stages_filled_in_use": (
        FORWARD, "            self.release(shared, stage, lane)\n            for i in",
        "            self.release(shared, stage, lane)\n"
        "            self.release(shared, stage, lane)\n            for i in", schedules,
    ),
}  # fmt: skip
BY_DAY = ("neighbours_keys", "the_inverse_itself", "drafts_are_for_good", "T_not_awaited")


@pytest.mark.mutants
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in MUTANTS],
)
def test_killed(tmp_path, name):
    *edit, check = MUTANTS[name]
    with pytest.raises((AssertionError, ptxsim.PtxsimError)):
        check(kernels(system, tmp_path, *edit))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_card(name):
    there = [on_gpu.launcher(module) for module in (launch, delta, delta_backward)]
    got, want = both(there[0], CASES[name]), both((there[1], there[2]), CASES[name])
    assert all(map(same_bytes, flat(got), flat(want)))
