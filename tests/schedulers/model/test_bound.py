"""Lower bounds of a schedule's time."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers.model.bounds import bound
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.simulation import simulate
from cute_kernels.schedulers.order import kinds
from tests.schedulers.usual import full

TOLD = machine(slots=2, full_ns=10, partial_ns=14, reduce_ns=3, handoff_ns=5, tile_start_ns=2)


def drawn(seed: int, largest: int) -> tuple[np.ndarray, int]:
    """A drawn mask with something in it, and a number of slots."""
    random = np.random.default_rng(seed)
    rows, columns = random.integers(1, largest + 1, 2)
    present = random.random((rows, columns)) < random.uniform(0.2, 1)
    present[random.integers(rows), random.integers(columns)] = True
    return (present * random.integers(1, 3, present.shape)).astype(np.uint8), int(
        random.integers(1, 9)
    )


@pytest.mark.parametrize(
    ("group", "work", "packing", "longest"), [(1, 38, 50, 25), (2, 68, 90, 45)]
)
def test_each_bound_by_hand(group, work, packing, longest):
    """Three full columns of two rows, two slots: a ticket alone takes 2 + 20 g + 3; one slot gets
    two tickets; another query head's rows are come to after 20."""
    lower_bound = bound(full(2, 3), machine=TOLD, group=group)
    assert lower_bound.work_ns == work and lower_bound.packing_ns == packing
    assert lower_bound.longest_ns == longest
    assert lower_bound.chain_ns == 2 + 20 * (group - 1) + 10 + 3 * 3 + 2 * 5
    assert lower_bound.launch_ns == longest + 2 * (3 + 5)
    assert (lower_bound.lower_ns, lower_bound.binding()) == (packing, "packing_ns")


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


@pytest.mark.parametrize("seed", range(40))
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
