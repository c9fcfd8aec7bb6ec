"""Times in turns and in the order of arrival: which tickets, which visits, what leaves L2."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.model import arrival
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.selection import select
from cute_kernels.schedulers.model.simulation import simulate, work_of
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.safety import check


@pytest.mark.parametrize("seed", range(20))
def test_visits_without_turns_are_what_plain_loops_say(seed):
    random = np.random.default_rng(seed)
    shape = (int(random.integers(1, 3)), *random.integers(1, 9, 2))
    blocks = ((random.random(shape) < 0.5) * random.integers(1, 3, shape)).astype(np.uint8)
    told = machine("cute_sm90_d128", slots=int(random.integers(1, 5)))
    group = int(random.integers(1, 4))
    schedule = kinds.shortest_first(blocks, heads=2 * shape[0], heads_in_flight=2)
    simulated = simulate(schedule, told, group=group)
    work = work_of(schedule, told, group)
    when, makespan = arrival.arrivals(simulated.alone_ns, work.visits, work.cost, told)
    free, want, first = [0] * told.slots, [], 0
    for alone, visits in zip(simulated.alone_ns.tolist(), work.visits.tolist(), strict=True):
        slot = free.index(min(free))
        time = free[slot] + told.tile_start_ns
        for cost in work.cost[first : first + visits].tolist():
            time += cost
            want.append(time)
        first, free[slot] = first + visits, free[slot] + alone
    assert when.tolist() == want
    assert makespan == max(free) == simulated.unordered_ns


def test_the_first_heads_are_those_launched_before_all_others():
    blocks = np.full((6, 5), 2, np.uint8)
    schedule = kinds.spt(blocks, heads=7, heads_in_flight=3)
    for tickets, heads in ((1, 3), (15, 3), (16, 6), (30, 6), (31, 7), (35, 7), (99, 7)):
        part = arrival.first_heads(schedule, tickets)
        assert part.heads == heads
        assert check(part).any_residency
        assert np.array_equal(part.order, schedule.order[: heads * 5])


def test_without_a_cache_the_times_are_the_simulators():
    blocks = BlockMask.causal(2048, 2048)
    schedule = kinds.spt(blocks, heads=4)
    simulated = simulate(schedule, "h200_d128")
    times = arrival.compare(schedule, "h200_d128")
    assert (times.ordered_ns, times.unordered_ns) == (
        simulated.makespan_ns,
        simulated.unordered_ns,
    )


def faster_in_turns(mask, heads: int, group: int) -> bool:
    schedule = select(mask, heads=heads, machine="cute_sm90_d128", group=group).schedule
    times = arrival.compare(schedule, "cute_sm90_d128", group=group)
    return times.ordered_ns < times.unordered_ns


def test_turns_keep_the_heads_of_a_group_together():
    """Causal 4096, 64 query heads, 8 KV heads, two sequences: unordered was 1.28 times as slow on
    an H100.  Random blocks, which wait, are faster without turns."""
    random = np.random.default_rng(1)
    blocks = ((random.random((32, 32)) < 0.25) * 2).astype(np.uint8)
    assert faster_in_turns(BlockMask.causal(4096, 4096), 16, 8)
    assert not faster_in_turns(np.repeat(np.repeat(blocks, 1, 0), 1, 1), 16, 4)


def test_a_comparison_without_memory_is_seen(monkeypatch):
    monkeypatch.setattr(arrival, "fetched", lambda *_: 0.0)
    assert not faster_in_turns(BlockMask.causal(4096, 4096), 16, 8)
