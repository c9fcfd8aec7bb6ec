"""Time of a launch whose dQ is added in the order of arrival, beside its time in turns.

Turns keep the tickets of a head together.  Without them those of a group of query heads drift
apart, and the rows that they want at a time may not fit into L2: the unordered launch is slower
then.  Both times are the model's with its memory, of the first tickets of a launch.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from ..order.schedule import Schedule
from .machines import Machine, resolve
from .simulation import simulate, work_of
from .traffic import Gaps, memory_ns

#: Tickets of each slot that are timed.
_TICKETS = 8


@dataclass(frozen=True)
class Comparison:
    """Times in ns, with what the memory adds: in turns, and in the order of arrival."""

    ordered_ns: int
    unordered_ns: int


def compare(schedule: Schedule, machine: Machine | str, *, group: int = 1) -> Comparison:
    """Time the first tickets of a schedule in turns and without; arguments as for ``simulate``."""
    machine = resolve(machine)
    part = first_heads(schedule, _TICKETS * machine.slots)
    scaled, _ = machine.for_blocks(schedule.block_size)
    in_turns = simulate(part, machine, group=group)
    work = work_of(part, machine, group)
    landed, makespan_ns = arrivals(in_turns.alone_ns, work.visits, work.cost, scaled)
    times = []
    for when, total_ns in ((in_turns.landed_ns, in_turns.makespan_ns), (landed, makespan_ns)):
        share = fetched(work.lock, when, scaled, total_ns)
        times.append(total_ns + memory_ns(scaled, round(share * len(when)), total_ns))
    return Comparison(*times)


def first_heads(schedule: Schedule, tickets: int) -> Schedule:
    """Return the schedule of the first heads with at least so many tickets, those launched before
    all others; of all heads if there are no such."""
    columns, launched = schedule.num_kv_blocks, schedule.order[:, 0]
    if not columns or len(launched) <= tickets:
        return schedule
    # Heads up to h come first where the greatest head so far is h and all their tickets are taken.
    most = np.maximum.accumulate(launched)
    whole = np.flatnonzero((most + 1) * columns == np.arange(1, len(launched) + 1))
    stop = int(whole[np.searchsorted(whole, tickets - 1)]) + 1
    heads = stop // columns
    lists = schedule.list_of_head[:heads]
    return replace(schedule, heads=heads, order=schedule.order[:stop], list_of_head=lists)


def arrivals(
    alone_ns: np.ndarray, visits: np.ndarray, cost_ns: np.ndarray, machine: Machine
) -> tuple[np.ndarray, int]:
    """Return (when each visit ends if none waits, int64 [V], the makespan)."""
    free, start = [0] * machine.slots, np.zeros(len(alone_ns), np.int64)
    for ticket, duration in enumerate(alone_ns.tolist()):
        start[ticket] = free[0]
        heapq.heapreplace(free, free[0] + duration)
    total, stop = np.cumsum(cost_ns), np.cumsum(visits)
    before = np.concatenate(([0], total))[stop - visits]
    begin = start + machine.tile_start_ns - before
    return total + np.repeat(begin, visits), max(free)


def fetched(lock: np.ndarray, when: np.ndarray, machine: Machine, total_ns: int) -> float:
    """Return the share of visits whose tile has left L2 since its last one; lock: int64 [V]."""
    if not len(lock) or not machine.l2_tiles:
        return 0.0
    order = np.lexsort((when, lock))
    lock, when = lock[order], when[order]
    gap = np.diff(when, prepend=0)
    gap[np.diff(lock, prepend=-1) != 0] = np.iinfo(np.int64).max // 4
    gaps = Gaps()
    gaps.gaps.append(gap)
    return gaps.fetched(machine.l2_tiles, total_ns)
