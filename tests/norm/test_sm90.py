"""The SM90 kernels of norm in the simulator: values, the battery, schedules, addresses, mutants."""

from __future__ import annotations

import pytest
import torch

import ptxsim
from cute_kernels.norm import launch
from cute_kernels.norm.config import SumConfig, part_rows
from ptxsim.modes import MODES, QUICK_MODES, RACES, run_modes
from ptxsim.skips import requires_sim
from tests import contract
from tests.kernels.edited import changed, kernels
from tests.norm import cases
from tests.norm import simulated as system
from tests.norm.cases import BF16, FP32, Case, Rule
from tests.norm.simulated import simulated
from tests.old_memory import old_memory
from verify import sass
from verify.certificate import check_a

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_values test_no_schedule_shows test_no_row_shows test_parts_are_added_one_by_one "
    "test_a_sum_that_begins_before_its_parts_are_complete_is_refused test_mutants_are_killed"
)
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("norm", often=EACH_COMMIT)]

LAYER = Rule(cases.LAYER, 1e-5)
#: Rows of one warp, of several, and of a whole CTA; parts with rows missing.
NARROW = Case(37, 72, LAYER, bias=True, residual=True)
MIDDLE = Case(67, 520, residual=True)
WIDE = Case(3, 4104, LAYER, bias=True, residual=True)


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that torch and plans hand out is full of NaN."""
    with old_memory():
        yield


def results(case: Case, given: cases.Inputs, sms: int = 3, **options) -> cases.Results:
    with simulated(sms, **options):
        return cases.run(launch, case, given)


@pytest.mark.parametrize("case", [*cases.kinds(), *cases.widths()], ids=str)
def test_values(case):
    inputs = cases.inputs_of(case)
    assert cases.check(results(case, inputs), case, inputs) > 0.01


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1 << i for i in range(5, 17)])
@pytest.mark.parametrize("case", cases.kinds(), ids=str)
def test_values_of_every_width(case, width):
    case = case._replace(m=3, width=width)
    inputs = cases.inputs_of(case)
    cases.check(results(case, inputs), case, inputs)


def in_every_mode(case: Case, given: cases.Inputs, modes, sms: int = 2, kernel=None) -> list:
    """The results, which every timing of the simulator gave, without a race."""

    def run():
        with simulated(sms, **({} if kernel is None else {"kernel": kernel})):
            return [t for t in cases.run(launch, case, given) if t is not None]

    return next(iter(run_modes(run, modes).values()))


@pytest.mark.parametrize("case", [NARROW, MIDDLE, WIDE], ids=str)
def test_no_schedule_shows(case):
    inputs = cases.inputs_of(case)
    want = results(case, inputs)
    for sms in (1, 2, 132):
        cases.same(results(case, inputs, sms), want)
    out = in_every_mode(case, inputs, QUICK_MODES)
    assert all(map(contract.same_bytes, out, [t for t in want if t is not None]))


@pytest.mark.nightly
@pytest.mark.parametrize("sms", [1, 7])
@pytest.mark.parametrize("case", [NARROW, MIDDLE, WIDE], ids=str)
def test_no_schedule_of_all_shows(case, sms):
    in_every_mode(case, cases.inputs_of(case), MODES, sms)


@pytest.mark.parametrize("case", [MIDDLE, WIDE, Case(40, 100, dtype=FP32, weight=FP32)], ids=str)
def test_no_row_shows(case):
    with simulated():
        cases.few_rows(launch, case)


def test_no_address_and_no_part_shows():
    """Rows that begin anywhere, with anything behind them; the second part alone."""
    with simulated():
        cases.no_address_shows(launch, MIDDLE, ((1, 1), (8, 1)))
        cases.a_part_is_the_same_anywhere(launch, Case(2 * part_rows(520), 520), always=True)


def a_loop(parts: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    total = state.clone()
    for part in parts:
        total += part
    return total


def test_parts_are_added_one_by_one():
    """dweight into an fp32 state: the bytes of one shot, wherever a stream is cut between parts."""
    g = torch.Generator().manual_seed(3)
    parts, state = torch.randn(150, 40, generator=g), torch.randn(40, generator=g)
    for cut in (150, 1, 16, 128):
        got = state.clone()
        with simulated():
            for piece in parts.split(cut):
                assert launch.add_parts([piece], [got], [got]) == [None]
        assert contract.same_bytes(got, a_loop(parts, state))


@pytest.mark.parametrize("count", [150, 3 * 256 + 9])
def test_more_parts_than_are_copied_ahead(count):
    """Three rounds and a tail, in two halves of shared memory."""
    parts = torch.randn(count, 40, generator=torch.Generator().manual_seed(5))
    with simulated():
        (out,) = launch.add_parts([parts], [None], [torch.empty(40, dtype=BF16)])
    assert contract.same_bytes(out, a_loop(parts, torch.zeros(40)).bfloat16())


@pytest.mark.parametrize("kinds", ["added, made", "made, added", "both added", "both made"])
def test_two_sums_have_the_bytes_of_one_each(kinds):
    """In one launch, where both are of one kind, and in two."""
    g = torch.Generator().manual_seed(4)
    parts = [torch.randn(150, 40, generator=g) for _ in range(2)]
    states = [torch.randn(40, generator=g) for _ in range(2)]
    named = kinds.removeprefix("both ").split(", ")
    added = [named[0] == "added", named[-1] == "added"]

    def sums(which: list[int]) -> list[torch.Tensor]:
        into = [states[i].clone() if added[i] else None for i in which]
        like = [torch.empty(40, dtype=BF16) for _ in which]
        with simulated():
            out = launch.add_parts([parts[i] for i in which], into, like)
        return [old if new is None else new for old, new in zip(into, out, strict=True)]

    assert all(map(contract.same_bytes, sums([0, 1]), sums([0]) + sums([1])))
    assert not contract.same_bytes(sums([0])[0], sums([1])[0])


@pytest.mark.parametrize("wait", ["", "        cute.arch.griddepcontrol_wait()  # as it is\n"])
def test_a_sum_that_begins_before_its_parts_are_complete_is_refused(tmp_path, wait):
    """The simulator runs one kernel after the other; rule R3 of the certificates sees this."""
    text = "        cute.arch.griddepcontrol_wait()\n"
    module = changed(tmp_path, "norm.kernel_sums_sm90", text, wait)
    kernel_config = SumConfig("bf16", pair=True)
    (entry,) = (e for e in launch.catalogue() if e.kernel == launch.entry(kernel_config))
    out = sass.artefacts(lambda: module.build(kernel_config))
    rules = {finding.rule for finding in check_a(out, entry.expect)}
    assert rules == (set() if wait else {"R3"})


# ---- mutants -------------------------------------------------------------------------------------

FORWARD, BACKWARD, SUMS = "kernel_fwd_sm90", "kernel_bwd_sm90", "kernel_sums_sm90"
ROWS, AHEAD, BULK = "device.rows", "device.ahead", "device.bulk"
REWIDENED = "        rH = self.rewidened(raw, rH)\n        self.scale"


def wrong_values(case: Case):
    """The oracle's bounds are exceeded."""

    def check(kernel):
        inputs = cases.inputs_of(case)
        with simulated(kernel=kernel):
            cases.check(cases.run(launch, case, inputs), case, inputs)

    return check


def races(case: Case):
    """Accesses of shared memory that nothing orders, in one timing."""

    def check(kernel):
        in_every_mode(case, cases.inputs_of(case), RACES, 1, kernel)

    return check


def other_bytes(case: Case):
    """Other bytes than those of the kernels as they are, or a race, in some timing."""

    def check(kernel):
        inputs = cases.inputs_of(case)
        want = [t for t in results(case, inputs) if t is not None]
        out = in_every_mode(case, inputs, QUICK_MODES, 1, kernel)
        assert all(map(contract.same_bytes, out, want))

    return check


def sums(count: int, modes=QUICK_MODES):
    """Other bytes than a loop's, or a race, in some timing."""

    def check(kernel):
        g = torch.Generator().manual_seed(count)
        parts, state = torch.randn(count, 40, generator=g), torch.randn(40, generator=g)
        # A sum that is -0 shows zeros that are added to it.
        parts[:, 3], state[3] = -0.0, -0.0
        want = a_loop(parts, state)

        def run():
            got = state.clone()
            with simulated(1, kernel=kernel):
                launch.add_parts([parts], [got], [got])
            return got

        assert contract.same_bytes(next(iter(run_modes(run, modes).values())), want)

    return check


#: Name -> (source, its text, the bug in its place, who notices).
MUTANTS = {
    "eps_outside_the_root": (FORWARD, "cute.math.sqrt(variance)",
        "(cute.math.sqrt(squares * scalars.inverse) + scalars.eps)",
        wrong_values(Case(5, 96, Rule(cases.RMS, 0.25)))),
    "mean_of_padded_row": (FORWARD, "exchange, 0) * scalars.inverse",
        "exchange, 0) / cutlass.Float32(self.group.threads * self.group.size)",
        wrong_values(NARROW)),
    "tail_counts_in_the_variance": (FORWARD,
        "            self.group.without_tail(rCentered, lane, width)\n", "",
        wrong_values(Case(5, 65, LAYER, bias=True))),
    "residual_forgotten": (FORWARD, "total.load() + rows.widened(raws[1]).load()",
        "total.load() + total.load()", wrong_values(MIDDLE)),
    "y_of_another_row_than_its_sum": (FORWARD, REWIDENED, REWIDENED.replace("raw,", "raws[0],"),
        wrong_values(MIDDLE)),
    "mean_forgotten_behind_the_sums": (FORWARD, "cute.math.fma(rH[i], rstd, -mean * rstd)",
        "rH[i] * rstd", wrong_values(Case(5, 1032, LAYER, bias=True))),
    "second_sum_in_the_slot_of_the_first": (FORWARD, "slot = 1 if self.layer else slot",
        "slot = slot", other_bytes(Case(3, 4104, LAYER, bias=True))),
    "offset_forgotten": (FORWARD, "weight[i] + offset", "weight[i]",
        wrong_values(Case(5, 96, Rule(cases.RMS, 1e-6, 1.0)))),
    "weight_applied_twice_in_dx": (BACKWARD, "row_stats[-1])\n",
        "row_stats[-1])\n                for i in cutlass.range_constexpr(self.group.size):\n"
        "                    rDy[i] = rDy[i] * scale.weight[i].to(cutlass.Float32)\n",
        wrong_values(Case(5, 96))),
    "mean_of_g_forgotten": (BACKWARD, "[-mean * rstd for mean in means[1:]]", "[]",
        wrong_values(NARROW)),
    "dh_forgotten": (BACKWARD, "[t[i] for t in upstream] + ", "", wrong_values(MIDDLE)),
    "rows_of_a_part_by_the_grid": (BACKWARD, "exchange.group * self.run + number",
        "(self.groups - 1 - exchange.group) * self.run + number", other_bytes(MIDDLE)),
    "groups_descending": (BACKWARD, "total = total + sSums[s, g, i, t, None]",
        "total = total + sSums[s, self.groups - g, i, t, None]", other_bytes(MIDDLE)),
    "last_row_dropped": (BACKWARD, "(part < count) & (index < m)",
        "(part < count) & (index < m - 1)", wrong_values(Case(5, 96))),
    "next_part_begins_late": (BACKWARD, "cutlass.Int32(0) if last else number",
        "cutlass.Int32(1) if last else number", wrong_values(Case(600, 520))),
    "missing_row_is_read": (AHEAD, "inside = valid & (", "inside = (",
        wrong_values(Case(67, 264, LAYER, bias=True))),
    "columns_behind_the_last_are_read": (AHEAD,
        "inside = valid & (self.group.column(v, lane) < columns)", "inside = valid",
        wrong_values(Case(5, 96, LAYER, dtype=FP32, weight=FP32))),
    "columns_behind_the_last_without_a_ring": (ROWS,
        "if valid & (self.column(v, lane) < columns):", "if valid:", wrong_values(Case(5, 96))),
    "row_is_not_awaited": (AHEAD, "cp_async_wait_group(self.stages - 1)",
        "cp_async_wait_group(self.stages)", other_bytes(Case(67, 264, residual=True))),
    "missing_row_is_copied": (BULK, "if row.valid & (", "if (",
        wrong_values(Case(67, 520, LAYER, bias=True))),
    "copied_row_is_not_awaited": (BULK,
        "            cute.arch.mbarrier_wait(full + stage, phase)\n", "", other_bytes(MIDDLE)),
    "row_is_there_before_its_numbers": (BULK, "_ARRIVALS = 2", "_ARRIVALS = 1",
        other_bytes(MIDDLE)),
    "columns_behind_the_last_are_what_was_there": (BULK,
        "        self.clear(sGroupRows, lane, columns)\n", "",
        wrong_values(Case(5, 520, LAYER, bias=True))),
    "barrier_of_another_phase": (BACKWARD, "phase = phase ^ 1 if last", "phase = phase if last",
        other_bytes(MIDDLE)),
    "stage_filled_while_it_is_read": (BACKWARD,
        "self.ring.fetch(ring, stage, inputs, stats, ahead)",
        "self.ring.fetch(ring, stages - 1 - stage, inputs, stats, ahead)", other_bytes(MIDDLE)),
    "groups_do_not_meet": (BACKWARD,
        "            cute.arch.sync_threads()\n            for c in", "            for c in",
        races(MIDDLE)),
    "part_given_while_another_is_read": (BACKWARD,
        "            cute.arch.sync_threads()\n            for s, total",
        "            for s, total", races(Case(129, 520))),
    "parts_of_dbias_are_those_of_dweight": (BACKWARD, "total = sSums[s, 0, i, t, None]",
        "total = sSums[0, 0, i, t, None]", wrong_values(Case(67, 520, LAYER, bias=True))),
    "warps_do_not_meet": (ROWS,
        "        cute.arch.barrier(barrier_id=group + 1, number_of_threads=self.threads)\n", "",
        other_bytes(WIDE)),
    "one_barrier_for_all_rows": (ROWS, "barrier_id=group + 1,", "barrier_id=1,",
        other_bytes(Case(67, 1032))),
    "both_of_a_pair_are_one": (SUMS, "mParts, mOtherParts, 16)",
        "mParts, mParts, 16)", wrong_values(Case(5, 1032, LAYER, bias=True))),
    "one_slot_for_both_sums": (ROWS, "self.over_warps(sPartials, slot + i,",
        "self.over_warps(sPartials, slot,",
        wrong_values(Case(5, 1032, LAYER, bias=True))),
    "neighbours_keep_one_number": (ROWS, "other = values[1] if even else values[0]",
        "other = values[0] if even else values[1]", wrong_values(Case(5, 1032, LAYER, bias=True))),
    "one_slot_for_every_sum": (BACKWARD, "slot = slot ^ 1", "slot = slot ^ 0", other_bytes(
        Case(67, 1032))),
    "warps_descending": (ROWS, "total = total + sPartials[slot, group, w]",
        "total = total + sPartials[slot, group, self.warps - w]", other_bytes(
            Case(3, 4104, dtype=FP32, weight=FP32))),
    "parts_descending": (SUMS, "total = total + rParts[a]", "total = total + rParts[AHEAD - 1 - a]",
        sums(300)),
    "last_parts_twice": (SUMS, "cutlass.range(whole, count, unroll=1)",
        "cutlass.range(whole - 1, count, unroll=1)", sums(300)),
    "absent_parts_added": (SUMS, "count = cutlass.min(parts - first, ROUND)",
        "count = cutlass.Int32(ROUND)", sums(300)),
    "columns_behind_the_parts_are_read": (SUMS,
        "        end = end if column < mParts.shape[1] else first\n", "", sums(300)),
    "parts_added_before_they_come": (SUMS, "cp_async_wait_group(ROUNDS - 1)",
        "cp_async_wait_group(ROUNDS)", sums(300)),
    "sums_do_not_meet": (SUMS, "have come.\n            cute.arch.sync_threads()\n",
        "have come.\n", sums(300, RACES)),
    "round_filled_while_it_is_added": (SUMS,
        "are added.\n            cute.arch.sync_threads()\n", "are added.\n", sums(600, RACES)),
}  # fmt: skip
BY_DAY = (
    "eps_outside_the_root",
    "weight_applied_twice_in_dx",
    "row_is_not_awaited",
    "copied_row_is_not_awaited",
    "warps_do_not_meet",
    "parts_descending",
    "groups_do_not_meet",
    "part_given_while_another_is_read",
    "sums_do_not_meet",
    "round_filled_while_it_is_added",
    "both_of_a_pair_are_one",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in MUTANTS],
)
def test_mutants_are_killed(tmp_path, name):
    *edit, check = MUTANTS[name]
    kernel = kernels(system, tmp_path, *edit)
    with pytest.raises((AssertionError, ptxsim.PtxsimError)):
        check(kernel)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [FORWARD, BACKWARD, SUMS, ROWS, AHEAD, BULK])
def test_an_unedited_copy_lives(tmp_path, name):
    kernel = kernels(system, tmp_path, name)
    for case in (NARROW, MIDDLE, WIDE):
        wrong_values(case)(kernel)
        other_bytes(case)(kernel)
        races(case)(kernel)
