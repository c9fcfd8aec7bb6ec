"""Time of a schedule on a machine, by a discrete-event model.

The machine has ``slots``; a free slot takes the next ticket, in order.  A ticket's visits go
through a pipeline of two: compute fills one of ``dq_stages`` dQ buffers, then the reduction waits
for its turn (the writer one rank lower has landed, and ``handoff_ns`` has passed) and empties it.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cute_kernels.errors import ScheduleError, expected

from ..order.kinds import launch
from ..order.safety import Safety, check
from ..order.schedule import Schedule
from .lockstep import Clock, Tape
from .machines import Machine, resolve
from .programs import exact_for, programs, time_dtype


@dataclass(frozen=True, eq=False)
class Simulation:
    """Simulated times in ns.  Tickets in launch order; visits ticket by ticket, one per query tile.

    makespan_ns, unordered_ns   with the write order; the same launch order without any
    slot, start_ns, end_ns      int64 [T], of each ticket
    alone_ns                    int64 [T], what the ticket takes when it never waits for a turn
    visits                      int64 [T], how many visits the ticket has
    compute_ns                  int64 [V], compute time of each visit
    computed_ns, landed_ns      int64 [V], when its compute and its reduction are done
    """

    machine: Machine
    safety: Safety
    order: np.ndarray
    makespan_ns: int
    unordered_ns: int
    slot: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    alone_ns: np.ndarray
    visits: np.ndarray
    compute_ns: np.ndarray
    computed_ns: np.ndarray
    landed_ns: np.ndarray

    @property
    def ratio(self) -> float:
        """Ratio of the makespan to that of the same launch order without a write order."""
        return self.makespan_ns / self.unordered_ns if self.unordered_ns else 1.0

    @cached_property
    def stall_ns(self) -> np.ndarray:
        """Time that each slot's tickets waited for turns, int64 [slots]."""
        stall = np.zeros(self.machine.slots, np.int64)
        np.add.at(stall, self.slot, self.end_ns - self.start_ns - self.alone_ns)
        return stall

    @property
    def stall_share(self) -> float:
        """Share of waits in slots * makespan."""
        return int(self.stall_ns.sum()) / max(1, self.machine.slots * self.makespan_ns)

    def waits(self) -> list[tuple[int, int, int]]:
        """Return ``(slot, from_ns, to_ns)`` of each wait, sorted: for a free dQ buffer, and for the
        turn of a ticket's last reduction."""
        ticket = np.repeat(np.arange(len(self.visits)), self.visits)
        position = np.arange(len(ticket)) - (np.cumsum(self.visits) - self.visits)[ticket]
        floor = self.machine.reduce_ns if self.machine.dq_stages == 1 else 0
        ready = np.roll(self.computed_ns, 1) + np.maximum(self.compute_ns, floor)
        turn = self.landed_ns - self.machine.reduce_ns
        inner = position > 0
        last = position == self.visits[ticket] - 1
        waits = []
        for is_wait, begin, end in (
            (inner, ready, self.computed_ns),
            (last, self.computed_ns, turn),
        ):
            waiting = is_wait & (end > begin)
            waits += zip(
                self.slot[ticket[waiting]].tolist(),
                begin[waiting].tolist(),
                end[waiting].tolist(),
                strict=True,
            )
        return sorted(waits)


def simulate(
    schedule: Schedule, machine: Machine | str = "h200_d128", *, group: int = 1
) -> Simulation:
    """Time a schedule, after a check; raise ScheduleError if it cannot progress.

    Costs are those of the machine for blocks of ``schedule.block_size`` (of the machine's tile if
    that is None); a ticket walks its list for each of ``group`` query heads, one after another.
    Exact: whole nanoseconds, the same on every host.

    Example:
        >>> schedule = ck.schedulers.spt(ck.BlockMask.causal(1024, 1024), heads=2)
        >>> ck.schedulers.simulate(schedule).makespan_ns > 0
        True
    """
    safety = check(schedule, group=group)
    machine, tiles = resolve(machine).for_blocks(schedule.block_size)
    if safety.residents > machine.slots:
        want = f"at least {safety.residents}, which schedule {schedule.name!r} needs"
        raise ScheduleError(expected("machine.slots", want, machine.slots))
    work = _work(schedule, machine, tiles, group)
    sections = _sections(schedule) if safety.any_residency and exact_for(machine) else None
    if sections:
        times = _lockstep(schedule, machine, tiles, sections, group)
    else:
        times = _event_loop(work, machine)
    alone = _alone(work, machine)
    return Simulation(
        machine,
        safety,
        schedule.order,
        makespan_ns=int(times["end"].max(initial=0)),
        unordered_ns=_unordered(alone.tolist(), machine.slots),
        slot=times["slot"],
        start_ns=times["start"],
        end_ns=times["end"],
        alone_ns=alone,
        visits=work.visits,
        compute_ns=work.cost,
        computed_ns=times["computed"],
        landed_ns=times["landed"],
    )


@dataclass(frozen=True)
class _Work:
    """Visits, ticket by ticket: lock (query head * rows + row) and rank, and compute time."""

    visits: np.ndarray
    lock: np.ndarray
    rank: np.ndarray
    cost: np.ndarray


def _work(schedule: Schedule, machine: Machine, tiles: int, group: int = 1) -> _Work:
    """Repeat each ticket's list for its first query head, then for the next, ``group`` times."""
    lists = np.repeat(schedule.list_of_ticket, group)
    start, count = schedule.offset[lists], np.diff(schedule.offset)[lists].astype(np.int64)
    first = np.cumsum(count) - count
    entry = np.repeat(start - first, count) + np.arange(count.sum())
    row = schedule.q_block[entry].astype(np.int64)
    heads = schedule.order[:, :1].astype(np.int64) * group + np.arange(group)
    head = np.repeat(heads.reshape(-1), count)
    count = count.reshape(-1, group).sum(1)
    lock = (head * schedule.num_q_blocks + row)[:, None] * tiles + np.arange(tiles)
    cost = np.where(schedule.partial[entry], machine.partial_ns, machine.full_ns)
    each = (np.repeat(part, tiles) for part in (schedule.rank[entry], cost))
    return _Work(count * tiles, lock.reshape(-1), *each)


def _sections(schedule: Schedule) -> list[int] | None:
    """Return the heads of each section, if the launch goes by sections in the order of heads."""
    head, columns = schedule.order[:, 0], schedule.num_kv_blocks
    sections, start = [], 0
    while start < len(head):
        repeats = np.flatnonzero(head[start + 1 :] == head[start])
        sections.append(int(repeats[0]) + 1 if len(repeats) else len(head) - start)
        start += sections[-1] * columns
    launched = launch(np.zeros((1, columns), np.int32), sections)[:, 0]
    return sections if np.array_equal(launched, head) else None


def _lockstep(
    schedule: Schedule, machine: Machine, tiles: int, sections: list[int], group: int = 1
) -> dict[str, np.ndarray]:
    """Time section by section with ``Clock``; the schedule's ranks follow its launch order."""
    columns = schedule.num_kv_blocks
    _, cases, case_of_head = schedule.launches()
    entry, valid = schedule.padded(cases[:, :1] * columns + cases[:, 1:])
    rows, full = np.where(valid, schedule.q_block[entry], -1), ~schedule.partial[entry]
    steps = rows.shape[2] * tiles * group
    dtype = time_dtype(columns, steps, machine, schedule.heads)
    lists = programs(rows, full, schedule.num_q_blocks, machine, tiles, dtype, group)

    tape = Tape(machine.slots)
    clock = Clock(machine, 1, dtype, tape)
    for begin, size in zip(np.cumsum(sections) - sections, sections, strict=True):
        section = case_of_head[begin : begin + size]
        clock.section(
            lists.pick(section[:1] if (section == section[0]).all() else section), len(section)
        )
    times = tape.arrays()
    return {name: a if name == "slot" else a * clock.tick for name, a in times.items()}


def _event_loop(work: _Work, machine: Machine) -> dict[str, np.ndarray]:
    """Time any schedule.  Each resident ticket runs until it must wait for a visit not yet timed.

    The next ticket goes to the earliest free slot.  No waiting ticket can free one sooner: what
    it waits for, in the end, is a ticket not yet taken.
    """
    lock, rank, cost = work.lock.tolist(), work.rank.tolist(), work.cost.tolist()
    stop = np.cumsum(work.visits).tolist()
    count = len(stop)
    slot, start, end = [0] * count, [0] * count, [0] * count
    computed, landed = [0] * len(lock), [0] * len(lock)
    next_visit = [b - v for b, v in zip(stop, work.visits.tolist(), strict=True)]
    first = list(next_visit)
    next_turn, landing, waiting = {}, {}, {}
    reduce, handoff, stages = machine.reduce_ns, machine.handoff_ns, machine.dq_stages
    free = [(0, index) for index in range(machine.slots)]

    for launched in range(count):
        if not free:
            raise ScheduleError(expected("schedule", "progress", f"deadlock at ticket {launched}"))
        start[launched], slot[launched] = heapq.heappop(free)
        ready = deque([launched])
        while ready:
            ticket = ready.popleft()
            begin, visit, past = first[ticket], next_visit[ticket], stop[ticket]
            while visit < past:
                row, turn = lock[visit], rank[visit]
                if next_turn.get(row, 0) != turn:
                    waiting[row, turn] = ticket
                    break
                idle = start[ticket] + machine.tile_start_ns
                finish = (computed[visit - 1] if visit > begin else idle) + cost[visit]
                if visit - stages >= begin:
                    finish = max(finish, landed[visit - stages])
                computed[visit] = finish
                if turn:
                    finish = max(finish, landing[row] + handoff)
                if visit > begin:
                    finish = max(finish, landed[visit - 1])
                landed[visit] = landing[row] = finish + reduce
                next_turn[row] = turn + 1
                if (row, turn + 1) in waiting:
                    ready.append(waiting.pop((row, turn + 1)))
                visit += 1
            next_visit[ticket] = visit
            if visit == past:
                finish = landed[past - 1] if past > begin else start[ticket] + machine.tile_start_ns
                end[ticket] = finish + machine.tile_end_ns
                heapq.heappush(free, (end[ticket], slot[ticket]))
    if next_visit != stop:
        ticket = next(t for t in range(count) if next_visit[t] != stop[t])
        raise ScheduleError(expected("schedule", "progress", f"ticket {ticket} never ends"))
    parts = {"slot": slot, "start": start, "end": end, "computed": computed, "landed": landed}
    return {name: np.array(values, np.int64) for name, values in parts.items()}


def _alone(work: _Work, machine: Machine) -> np.ndarray:
    """Return each ticket's time without waits, int64 [T]."""
    fixed = machine.tile_start_ns + machine.tile_end_ns
    total = np.concatenate(([0], np.cumsum(work.cost)))
    stop = np.cumsum(work.visits)
    if machine.reduce_ns <= min(machine.full_ns, machine.partial_ns):
        busy = total[stop] - total[stop - work.visits]
        return np.where(work.visits > 0, busy + machine.reduce_ns, 0) + fixed
    never = _Work(work.visits, np.arange(len(work.lock)), np.zeros_like(work.rank), work.cost)
    times = _event_loop(never, machine)
    return times["end"] - times["start"]


def _unordered(durations: list[int], slots: int) -> int:
    """Return the makespan of tickets taken in order by free slots."""
    free = [0] * slots
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)
