"""Broken schedules and broken checkers, each of which a test must catch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cute_kernels.schedulers.order import safety as check_module
from cute_kernels.schedulers.order.schedule import Schedule


def put(schedule: Schedule, name: str, index, value) -> Schedule:
    """The schedule with another value at one place of an array."""
    array = getattr(schedule, name).copy()
    array[index] = value
    return replace(schedule, **{name: array})


def first(condition: np.ndarray) -> int:
    return int(np.flatnonzero(condition)[0])


def without_entry(schedule: Schedule, entry: int) -> Schedule:
    """The schedule less one visit, all other ranks as they are."""
    offset = schedule.offset - (schedule.offset > entry).astype(np.int32)
    names = ("q_block", "partial", "rank")
    kept = {name: np.delete(getattr(schedule, name), entry) for name in names}
    return replace(schedule, offset=offset.astype(np.int32), **kept)


def spt_flag_ignored(schedule: Schedule) -> Schedule:
    """Launched right to left, ranked as if from left to right (and the other way round)."""
    turned = schedule.num_kv_blocks - 1 - schedule.order[:, 1]
    return put(schedule, "order", (slice(None), 1), turned)


def contributor_never_visits(schedule: Schedule) -> Schedule:
    """The first writer of some row skips its visit, the others keep their ranks."""
    row = schedule.q_block[schedule.rank > 0][0]
    return without_entry(schedule, first((schedule.q_block == row) & (schedule.rank == 0)))


def rank_given_twice(schedule: Schedule) -> Schedule:
    """Two writers of one row with the same rank."""
    index = first(schedule.rank > 0)
    return put(schedule, "rank", index, schedule.rank[index] - 1)


def row_visited_twice(schedule: Schedule) -> Schedule:
    """A list of two visits or more makes its first one again in place of its second."""
    start = schedule.offset[first(np.diff(schedule.offset) > 1)]
    return put(schedule, "q_block", start + 1, schedule.q_block[start])


def last_block_forgotten(schedule: Schedule) -> Schedule:
    """Off by one: the last list stops a visit early (only the mask can tell)."""
    return without_entry(schedule, len(schedule.q_block) - 1)


#: Those that need residents, those that only the mask tells, and those that are always refused.
SCHEDULES = {
    "launched_against_its_ranks": lambda s: replace(s, order=s.order[::-1].copy()),
    "spt_flag_ignored": spt_flag_ignored,
    "last_block_forgotten": last_block_forgotten,
    "mask_not_applied": lambda s: put(s, "partial", first(s.partial), False),
    "contributor_never_visits": contributor_never_visits,
    "last_rank_one_too_high": lambda s: put(s, "rank", -1, s.rank[-1] + 1),
    "rank_given_twice": rank_given_twice,
    "rank_below_zero": lambda s: replace(s, rank=s.rank - 1),
    "ticket_taken_twice": lambda s: put(s, "order", -1, s.order[0]),
    "ticket_forgotten": lambda s: replace(s, order=s.order[:-1].copy()),
    "row_visited_twice": row_visited_twice,
    "row_past_the_last": lambda s: put(s, "q_block", -1, s.num_q_blocks),
    "column_past_the_last": lambda s: put(s, "order", (-1, 1), s.num_kv_blocks),
}


def own_places(rows):
    return np.broadcast_to(np.arange(rows.shape[1])[:, None], rows.shape)


def waits_of(rows, ranks, num_rows):
    """The ticket that each visit waits for: the one of the rank below."""
    return own_places(rows).reshape(-1).take(check_module._one_rank_lower(rows, ranks, num_rows))


def ranks_not_looked_at(rows, ranks, num_rows):
    """A checker that takes the launch order for the write order."""
    return np.tile(np.arange(rows.shape[1]), (len(rows), 1)), np.ones(len(rows), bool)


def visits_not_in_order(rows, ranks, num_rows):
    """A checker that forgets that a ticket makes its visits one after another."""
    waits = np.maximum(own_places(rows), waits_of(rows, ranks, num_rows))
    return waits.max(axis=2, initial=0), np.ones(len(rows), bool)


def one_step_of_waiting(rows, ranks, num_rows):
    """A checker that does not follow chains of waits."""
    waits = np.maximum(own_places(rows), waits_of(rows, ranks, num_rows))
    reach = np.maximum.accumulate(waits, axis=2)
    return reach[:, :, -1], check_module.reached(rows, ranks, num_rows)[1]


def cycles_not_looked_for(rows, ranks, num_rows):
    """A checker that believes that every schedule ends."""
    return check_module.reached(rows, ranks, num_rows)[0], np.ones(len(rows), bool)


def one_resident_too_few(rows, ranks, num_rows):
    """A checker that counts one waiting ticket less."""
    reach, acyclic = check_module.reached(rows, ranks, num_rows)
    place = np.arange(reach.shape[1])
    waits = reach > place
    return np.where(waits & (np.cumsum(waits, axis=1) == 1), place, reach), acyclic


CHECKERS = (
    ranks_not_looked_at,
    visits_not_in_order,
    one_step_of_waiting,
    cycles_not_looked_for,
    one_resident_too_few,
)
