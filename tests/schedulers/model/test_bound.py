"""Lower bounds, and ``select`` against the optimum that CP-SAT proves."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers.model.bounds import MAX_VISITS, bound
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.selection import select
from cute_kernels.schedulers.model.simulation import simulate
from cute_kernels.schedulers.order import kinds
from tests.hang import HANG_SECONDS

TOLD = machine(slots=2, full_ns=10, partial_ns=14, reduce_ns=3, handoff_ns=5, tile_start_ns=2)


def full(rows: int, columns: int) -> np.ndarray:
    return np.full((rows, columns), 2, np.uint8)


def drawn(seed: int, largest: int) -> tuple[np.ndarray, int]:
    """A drawn mask with something in it, and a number of slots."""
    random = np.random.default_rng(seed)
    rows, columns = random.integers(1, largest + 1, 2)
    present = random.random((rows, columns)) < random.uniform(0.2, 1)
    present[random.integers(rows), random.integers(columns)] = True
    return (present * random.integers(1, 3, present.shape)).astype(np.uint8), int(
        random.integers(1, 9)
    )


def test_each_bound_by_hand():
    """Three full columns of two rows, two slots: a ticket alone takes 2 + 20 + 3 = 25."""
    lower_bound = bound(full(2, 3), machine=TOLD)
    assert lower_bound.work_ns == 38  # 75 over 2 slots
    assert lower_bound.packing_ns == 50  # one slot gets two tickets
    assert lower_bound.longest_ns == 25
    assert lower_bound.chain_ns == 2 + 10 + 3 * 3 + 2 * 5
    assert lower_bound.launch_ns == 25 + 2 * (3 + 5)
    assert (lower_bound.lower_ns, lower_bound.binding()) == (50, "packing_ns")


def test_each_bound_by_hand_with_two_query_heads():
    """A ticket alone takes 2 + 40 + 3 = 45; the second head's rows are come to after 20."""
    lower_bound = bound(full(2, 3), machine=TOLD, group=2)
    assert (
        lower_bound.work_ns == 68 and lower_bound.packing_ns == 90 and lower_bound.longest_ns == 45
    )
    assert lower_bound.chain_ns == 2 + 20 + 10 + 3 * 3 + 2 * 5
    assert lower_bound.launch_ns == 45 + 2 * (3 + 5)


def test_the_launch_bound_is_met_by_a_full_mask_with_room():
    """The last row that the first ticket visits is written by all others after it."""
    gpu = machine(slots=8)
    lower_bound = bound(full(6, 5), machine=gpu)
    assert lower_bound.binding() == "launch_ns"
    assert simulate(kinds.left_to_right(full(6, 5)), gpu).makespan_ns == lower_bound.lower_ns
    shift = simulate(kinds.shift(full(6, 5)), machine(slots=8, handoff_ns=0))
    assert shift.makespan_ns >= bound(full(6, 5), machine=machine(slots=8, handoff_ns=0)).work_ns


def test_an_empty_mask():
    assert bound(np.zeros((3, 4), np.uint8), heads=2).lower_ns == 0
    assert bound(np.zeros((3, 0), np.uint8)).lower_ns == 0
    assert bound(np.zeros((0, 3), np.uint8)).lower_ns == 0


@pytest.mark.parametrize("seed", range(80))
def test_no_schedule_beats_its_bound(seed):
    random = np.random.default_rng(seed)
    blocks, slots = drawn(seed, 12)
    gpu = machine(
        slots=slots,
        partial_ns=int(random.choice([2200, 900])),
        handoff_ns=int(random.choice([0, 2000])),
        tile_start_ns=int(random.choice([0, 700])),
        dq_stages=int(random.integers(1, 3)),
        reduce_ns=int(random.choice([800, 3000])),
    )
    heads, flight, group = int(random.integers(1, 5)), int(random.integers(1, 4)), 1 + seed % 3
    lower_bound = bound(blocks, heads=heads, machine=gpu, group=group)
    for kind in kinds.KINDS:
        schedule = kinds.KINDS[kind](blocks, heads=heads, heads_in_flight=flight)
        try:
            simulated = simulate(schedule, gpu, group=group)
        except ScheduleError:
            continue
        assert simulated.makespan_ns >= lower_bound.any_order_ns
        if simulated.safety.any_residency:
            assert simulated.makespan_ns >= lower_bound.lower_ns


@pytest.fixture
def counted(monkeypatch):
    """The solver's limit is its own count of work, in units of about two seconds, not a clock."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")

    class Counted(cp_model.CpSolver):
        def solve(self, model):
            self.parameters.max_deterministic_time = self.parameters.max_time_in_seconds
            self.parameters.max_time_in_seconds = HANG_SECONDS
            return super().solve(model)

    monkeypatch.setattr(cp_model, "CpSolver", Counted)


def within_five_percent(seed: int, largest: int, work: float) -> bool:
    """Selects and solves one drawn mask; says whether the solver proved its optimum."""
    blocks, slots = drawn(seed, largest)
    gpu = machine(slots=slots)
    lower_bound = bound(blocks, machine=gpu, solve_s=work)
    simulated = simulate(lower_bound.schedule, gpu)
    assert simulated.safety.any_residency
    assert lower_bound.lower_ns <= simulated.makespan_ns <= lower_bound.best_ns
    if lower_bound.proven:
        assert simulated.makespan_ns == lower_bound.best_ns
    selection = select(blocks, heads=1, machine=gpu)
    assert selection.predicted_ns <= 1.05 * lower_bound.best_ns, (seed, blocks.shape, slots)
    assert selection.predicted_ns >= lower_bound.lower_ns
    return lower_bound.proven


def test_select_is_within_five_percent_of_the_optimum(counted):
    proven = sum(within_five_percent(seed, 6, 4) for seed in range(40))
    assert proven >= 38


@pytest.mark.nightly
def test_select_is_within_five_percent_of_the_optimum_to_8_by_8(counted):
    proven = sum(within_five_percent(seed, 8, 5) for seed in range(1000, 1200))
    assert proven >= 180


@pytest.mark.parametrize("seed", range(6))
def test_the_solvers_model_is_the_simulators(seed):
    """Partial costs, tile costs and several heads: what it proves is what its schedule takes."""
    pytest.importorskip("ortools")
    blocks, slots = drawn(seed + 50, 4)
    gpu = machine(slots=min(slots, 3), partial_ns=3000, tile_start_ns=400, tile_end_ns=600)
    lower_bound = bound(blocks, heads=2, machine=gpu, solve_s=8)
    simulated = simulate(lower_bound.schedule, gpu)
    assert simulated.makespan_ns <= lower_bound.best_ns
    assert (
        not lower_bound.proven
        or simulated.makespan_ns == lower_bound.best_ns == lower_bound.lower_ns
    )


@pytest.mark.parametrize(
    ("blocks", "options", "got"),
    [
        (full(12, 12), {}, "144 visits"),
        (full(3, 3), {"dq_stages": 2}, "2 stages"),
        (np.zeros((3, 3), np.uint8), {}, "0 visits"),
        (full(3, 3), {"group": 2}, "2 steps, 18 visits"),
    ],
)
def test_what_the_solver_is_not_asked(blocks, options, got):
    pytest.importorskip("ortools")
    want = rf"bound with solve_s: expected .* 1 to {MAX_VISITS} visits, got .*{got}"
    options = dict(options)
    group = options.pop("group", 1)
    with pytest.raises(ScheduleError, match=want):
        bound(blocks, machine=machine(**options), group=group, solve_s=1)
