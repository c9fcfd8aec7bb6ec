"""``select``: the fastest schedule that the model finds, with a table of all trials.

Only schedules that progress with any number of resident CTAs are tried.  In order: the named kinds
with several walks; the best of them with another kind in the last section (a short tail); and, if
that is still far from the bound, visits in the order in which turns come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock

import numpy as np

from ..order.kinds import even
from ..order.ranks import BlockGrid, block_grid, integer, mask_key
from ..order.safety import check
from ..order.schedule import Schedule
from .bounds import Bound, lower_bound
from .candidates import Case, Plan, Race, compose, named_plans
from .machines import Machine, resolve
from .programs import exact_for
from .simulation import simulate

# Ratios over the bound above which tails, and visits by turns, are tried.
NEAR, CLOSE = 1.003, 1.01
# Rows that resident tickets of more heads may touch, over those of whole heads that stay in L2.
ROWS = 4 / 3
# Ratio to the time with fewer heads in flight below which more are taken.
GAIN = 0.99
# Plans tried at the end in a second and third size of tail.
TAILS = 3
# Ratio to the best time up to which a plan may still win with a shorter tail.
TAIL = 1.08
CACHED = 128
_cache: OrderedDict[tuple, Selection] = OrderedDict()
_lock = Lock()


@dataclass(frozen=True)
class Trial:
    """One row of the table of trials; predicted_ns is None if abandoned as slower than the best.

    memory_ns: what tiles that leave L2 are reckoned to add, where that was asked; the sum decides.
    """

    kind: str
    walk: str
    heads_in_flight: int
    predicted_ns: int | None
    memory_ns: int | None = None


@dataclass(frozen=True, eq=False)
class Selection:
    """Chosen ``schedule`` (any_residency), its time by the model, and all trials."""

    schedule: Schedule
    predicted_ns: int
    bound: Bound
    trials: tuple[Trial, ...]

    @property
    def over_bound(self) -> float:
        """Predicted time over the greatest lower bound."""
        return self.predicted_ns / max(1, self.bound.lower_ns)

    def __str__(self) -> str:
        lines = [f"{'kind':<30} {'walk':<12} {'flight':>6} {'us':>10} {'over bound':>10}"]
        floor = max(1, self.bound.lower_ns)
        for trial in self.trials:
            name = f"{trial.kind:<30} {trial.walk:<12} {trial.heads_in_flight:>6}"
            time = trial.predicted_ns
            time_text = "slower" if time is None else f"{time / 1e3:>10.1f} {time / floor:>10.3f}"
            fetched = trial.memory_ns
            time_text = f"{time_text:>10}" + (
                f" + {fetched / 1e3:.1f} memory" if fetched is not None else ""
            )
            marker = " <-" if time is not None and time == self.predicted_ns else ""
            lines.append(f"{name} {time_text}{marker}")
        lines.append(f"bound {floor / 1e3:.1f} us ({self.bound.binding()})")
        return "\n".join(lines)


# The walks of the named kinds.
WALKS = ("ascending", "descending", "by_rank")


def select(
    block_mask,
    *,
    heads: int | None = None,
    machine: Machine | str = "h200_d128",
    group: int = 1,
) -> Selection:
    """Select the schedule with the least predicted time of all trials, deterministically.

    Arguments as for the kinds; group: query heads to a ticket (of one key/value head).  Cached by
    mask, heads, machine and group (``CACHED`` entries).

    Example:
        >>> selection = ck.schedulers.select(ck.BlockMask.causal(1024, 1024), heads=2)
        >>> selection.schedule.heads
        2
    """
    machine = resolve(machine)
    key = (mask_key(block_mask), heads, machine, integer("group", group))
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    selection = _select(block_grid(block_mask, heads), machine, group)
    with _lock:
        selection = _cache.setdefault(key, selection)
        if len(_cache) > CACHED:
            _cache.popitem(last=False)
    return selection


def _select(grid: BlockGrid, machine: Machine, group: int) -> Selection:
    scaled, tiles = machine.for_blocks(grid.block_size)
    floor = lower_bound(grid, scaled, tiles, group)
    most = machine.most_heads(grid.num_q_blocks, grid.block_size)
    case = Case(grid, scaled, tiles, min(most, grid.heads), group)
    if grid.blocks.numel() == 0 or not exact_for(scaled):
        return _one_by_one(case, floor, lambda each: simulate(each, machine, group=group))
    if group > 1 and machine.l2_tiles:
        best = _in_l2(case, floor)
    else:
        best = _fastest(case, floor)
        for wider in _wider(case, machine):
            if best.over() <= CLOSE:
                break
            other = _fastest(wider, floor)
            trials = best.trials + other.trials
            best = other if other.time_ns < GAIN * best.time_ns else best
            best.trials = trials
    schedule = compose(best.case, *best.make(), best.name)
    check(schedule)
    return Selection(schedule, best.time_ns, floor, tuple(best.trials))


def _fastest(case: Case, floor: Bound) -> _Best:
    """Choose the fastest schedule of a launch with as many heads in flight as the case has."""
    best = _Best(case, floor)
    plans = named_plans(case.grid, WALKS, shortest=case.group > 1 or case.machine.l2_tiles > 0)
    if not _turns_alone(best, plans):
        race = _try_named(best, plans)
        _tails(best, plans, race, min(race.spent, key=race.spent.get))
        if best.over() > CLOSE:
            ahead_ns = None
            if len(case.sections) > 1:
                ahead_ns = min(int(mark.sum()) for mark in race.marks[1].values())
                ahead_ns *= case.machine.tick()
            _by_turns(best, plans, ahead_ns)
    return best


def _wider(case: Case, machine: Machine) -> Iterator[Case]:
    """Yield launches of twice as many heads in flight, and so on, while the rows that resident
    tickets touch stay few: documents and windows touch a part of each head's rows."""
    flight = 2 * case.flight
    while machine.l2_rows and flight <= min(machine.max_heads_in_flight, case.grid.heads):
        if case.rows_touched(flight) > ROWS * machine.l2_rows:
            return
        yield replace(case, flight=flight)
        flight *= 2


def _in_l2(case: Case, floor: Bound) -> _Best:
    """Choose, for a GQA group and a known L2, the heads in flight, plan and tail with the least
    time and memory together.

    The group makes CTAs drift apart, so that neither the heads in flight nor the walk alone say
    what stays in L2.  Walks by turns are not tried: they fit the model's times
    to the nanosecond, and what they win is less than those times are wrong.
    """
    most = min(case.machine.max_heads_in_flight, case.grid.heads)
    plans, least, best_in_l2, trials = named_plans(case.grid, WALKS, shortest=True), None, None, []
    for step in reversed(range(most.bit_length())):
        best = _Best(replace(case, flight=1 << step), floor)
        race = best.case.race(plans, None if least is None else int(least * TAIL))
        index, memory = _with_memory(best, plans, race)
        if index is not None:
            _tails(best, plans, race, index)
            if least is None or best.time_ns + memory < least:
                least, best_in_l2 = best.time_ns + memory, best
        trials += best.trials
        if least <= CLOSE * floor.lower_ns:
            break
    best_in_l2.trials = trials
    return best_in_l2


def _with_memory(best: _Best, plans: list[Plan], race: Race) -> tuple[int | None, int]:
    """Return the plan of a race with the least time and memory, and its memory; record it."""
    index, least, memory = None, None, 0
    for plan, time in sorted(race.times.items(), key=lambda item: (item[1] is None, item[1])):
        fetched = None
        if time is not None and (least is None or time < least):
            fetched = best.case.memory_ns(plans, plan, time)
            if least is None or time + fetched < least:
                index, least, memory = plan, time + fetched, fetched
        kind, walk = plans[plan].kind, plans[plan].walk
        best.trials.append(Trial(kind, walk, best.case.flight, time, fetched))
    if index is not None:
        best.time_ns, best.name = race.times[index], f"{plans[index].kind} ({plans[index].walk})"
        best.make = partial(_heads, best.case, plans[index])
    return index, memory


class _Best:
    """Fastest candidate so far, its factory, and the table of trials."""

    def __init__(self, case: Case, floor: Bound):
        self.case, self.floor = case, floor
        self.trials: list[Trial] = []
        self.time_ns, self.name, self.make = None, "", None

    def over(self) -> float:
        return self.time_ns / max(1, self.floor.lower_ns)

    def offer(self, kind: str, walk: str, time_ns: int | None, make) -> None:
        """Record a trial; ``make()`` gives the sections and each head's order and visits."""
        self.trials.append(Trial(kind, walk, self.case.flight, time_ns))
        if time_ns is not None and (self.time_ns is None or time_ns < self.time_ns):
            self.time_ns, self.name, self.make = time_ns, f"{kind} ({walk})", make


def _heads(case: Case, plan: Plan, tail: Plan | None = None, size: int = 0):
    """Return sections, orders and visits of heads: a plan, and ``tail`` for the last ``size``."""
    tail, turn = tail or plan, case.grid.heads - size
    sections = even(turn, case.flight) + [size] * (size > 0)
    lists = []
    for body, end in ((plan.order, tail.order), (plan.rows, tail.rows)):
        parts = list(body), list(end)
        lists.append([parts[head >= turn][mask] for head, mask in enumerate(case.grid.mask_of)])
    return sections, *lists


def _try_named(best: _Best, plans: list[Plan]) -> Race:
    """Time the named kinds; in a short launch the first one alone, to rule out others."""
    first = plans[:1] if len(best.case.sections) <= 2 else plans
    race = best.case.race(first)
    _note(best, plans, race)
    if len(first) < len(plans) and best.over() > 1:
        remaining = best.case.race(plans, best.time_ns, start=1)
        race.join(remaining)
        _note(best, plans, remaining)
    return race


def _note(best: _Best, plans: list[Plan], race: Race) -> None:
    for index, time in race.times.items():
        plan = plans[index]
        best.offer(plan.kind, plan.walk, time, partial(_heads, best.case, plan))


def _tails(best: _Best, plans: list[Plan], race: Race, least: int) -> None:
    """Try other plans for the last heads after the plan that waits least: a short tail."""
    case, flight = best.case, best.case.flight
    tails = np.arange(len(plans))
    for size in (flight, flight // 2, flight // 4)[: 1 if len(case.sections) > 2 else 3]:
        if not 0 < size < case.grid.heads or best.over() <= NEAR:
            continue
        full_sections = (case.grid.heads - size) // flight
        heads_left = case.grid.heads - full_sections * flight
        mark = race.marks[full_sections][least]
        times = case.finish(plans, least, mark, heads_left, size, tails)
        for tail, time in zip(tails.tolist(), times.tolist(), strict=True):
            kind = f"{plans[least].kind}, last {size} {plans[tail].kind}"
            walk = f"{plans[least].walk}, {plans[tail].walk}"
            make = partial(_heads, case, plans[least], plans[tail], size)
            best.offer(kind, walk, time, make)
        tails = tails[np.argsort(times, kind="stable")[:TAILS]]


def _turns_alone(best: _Best, plans: list[Plan]) -> bool:
    """Try visits by turns first, for masks by head with too many visits to time plans together.

    Returns whether they win for certain, as no named plan comes near: the choice is the one that
    it would be after all of those.
    """
    case, floor = best.case, best.floor.lower_ns
    masks, sections = len(case.grid.blocks), len(case.sections)
    if masks == 1 or sections < 3 or case.at_once() > 1:
        return False
    clock = case.after_first(plans)
    spent = clock.spent_ns()
    least = int(spent.min()) + int(case.alone_ns[case.sections[0] :].sum())
    # As much again in each section: do named plans come near?
    if (least / case.machine.slots - floor) * sections < (CLOSE - 1) * floor:
        return False
    turns = _Best(case, best.floor)
    _by_turns(turns, plans, int(spent.min()))
    if turns.make is None:
        return False
    limit = max(turns.time_ns, int(CLOSE * floor) + 1)
    if not case.outrun(plans, limit, clock):
        return False
    best.trials += [Trial(plan.kind, plan.walk, case.flight, None) for plan in plans]
    best.trials += turns.trials
    best.time_ns, best.name, best.make = turns.time_ns, turns.name, turns.make
    return True


def _by_turns(best: _Best, plans: list[Plan], ahead_ns: int | None) -> None:
    """Time the plans' launch orders with visits by turns, and record the best of them."""
    case = best.case
    orders = {plan.kind: replace(plan, walk="ascending") for plan in plans}
    best_turns = case.by_turns(list(orders.values()), ahead_ns)
    if best_turns is None:
        best.trials += [Trial(kind, "as turns come", case.flight, None) for kind in orders]
        return
    index, time, rows = best_turns
    kind, plan = list(orders.items())[index]

    def make():
        return case.sections, list(plan.order[case.grid.mask_of]), rows

    best.offer(kind, "as turns come", time, make)


def _one_by_one(case: Case, floor: Bound, timed) -> Selection:
    """Try the named kinds one by one, for empty masks and machines without an exact clock."""
    best = _Best(case, floor)
    for plan in named_plans(case.grid, WALKS):
        schedule = compose(case, *_heads(case, plan), f"{plan.kind} ({plan.walk})")
        time = timed(schedule).makespan_ns
        best.offer(plan.kind, plan.walk, time, lambda schedule=schedule: schedule)
    return Selection(best.make(), best.time_ns, floor, tuple(best.trials))
