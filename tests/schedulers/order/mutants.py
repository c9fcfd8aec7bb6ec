"""Broken schedules and broken checkers, each of which a test must catch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cute_kernels.schedulers.order import safety as check_module
from cute_kernels.schedulers.order.schedule import Schedule


def launched_against_its_ranks(schedule: Schedule) -> Schedule:
    """The launch order turned round; the ranks stay."""
    return replace(schedule, order=schedule.order[::-1].copy())


def spt_flag_ignored(schedule: Schedule) -> Schedule:
    """Launched right to left, ranked as if from left to right (and the other way round)."""
    order = schedule.order.copy()
    order[:, 1] = schedule.num_kv_blocks - 1 - order[:, 1]
    return replace(schedule, order=order)


def contributor_never_visits(schedule: Schedule) -> Schedule:
    """The first writer of some row skips its visit, the others keep their ranks."""
    row = schedule.q_block[schedule.rank > 0][0]
    entry = np.flatnonzero((schedule.q_block == row) & (schedule.rank == 0))[0]
    return without_entry(schedule, int(entry))


def last_block_forgotten(schedule: Schedule) -> Schedule:
    """Off by one: the last list stops a visit early."""
    return without_entry(schedule, len(schedule.q_block) - 1)


def last_rank_one_too_high(schedule: Schedule) -> Schedule:
    """Off by one at the last block: its rank is the count of writers."""
    rank = schedule.rank.copy()
    rank[-1] += 1
    return replace(schedule, rank=rank)


def rank_given_twice(schedule: Schedule) -> Schedule:
    """Two writers of one row with the same rank."""
    rank = schedule.rank.copy()
    rank[np.flatnonzero(rank > 0)[0]] -= 1
    return replace(schedule, rank=rank)


def rank_below_zero(schedule: Schedule) -> Schedule:
    """All ranks of the schedule one too low."""
    return replace(schedule, rank=schedule.rank - 1)


def ticket_taken_twice(schedule: Schedule) -> Schedule:
    """The last ticket is the first one again."""
    order = schedule.order.copy()
    order[-1] = order[0]
    return replace(schedule, order=order)


def ticket_forgotten(schedule: Schedule) -> Schedule:
    """One ticket less."""
    return replace(schedule, order=schedule.order[:-1].copy())


def row_visited_twice(schedule: Schedule) -> Schedule:
    """A list of two visits or more makes its first one again in place of its second."""
    start = schedule.offset[np.flatnonzero(np.diff(schedule.offset) > 1)[0]]
    q_block = schedule.q_block.copy()
    q_block[start + 1] = q_block[start]
    return replace(schedule, q_block=q_block)


def row_past_the_last(schedule: Schedule) -> Schedule:
    """The last visit is of a row that does not exist."""
    q_block = schedule.q_block.copy()
    q_block[-1] = schedule.num_q_blocks
    return replace(schedule, q_block=q_block)


def column_past_the_last(schedule: Schedule) -> Schedule:
    """The last ticket's key block does not exist."""
    order = schedule.order.copy()
    order[-1, 1] = schedule.num_kv_blocks
    return replace(schedule, order=order)


def mask_not_applied(schedule: Schedule) -> Schedule:
    """A partial block taken as full (only the mask can tell)."""
    partial = schedule.partial.copy()
    partial[np.flatnonzero(partial)[0]] = False
    return replace(schedule, partial=partial)


def without_entry(schedule: Schedule, entry: int) -> Schedule:
    """The schedule less one visit, all other ranks as they are."""
    offset = schedule.offset - (schedule.offset > entry).astype(np.int32)
    names = ("q_block", "partial", "rank")
    kept = {name: np.delete(getattr(schedule, name), entry) for name in names}
    return replace(schedule, offset=offset.astype(np.int32), **kept)


SCHEDULES = {
    function.__name__: function
    for function in (
        launched_against_its_ranks,
        spt_flag_ignored,
        contributor_never_visits,
        last_block_forgotten,
        last_rank_one_too_high,
        rank_given_twice,
        rank_below_zero,
        ticket_taken_twice,
        ticket_forgotten,
        row_visited_twice,
        row_past_the_last,
        column_past_the_last,
    )
}


def ranks_not_looked_at(rows, ranks, num_rows):
    """A checker that takes the launch order for the write order."""
    cases, columns, _ = rows.shape
    return np.tile(np.arange(columns), (cases, 1)), np.ones(cases, bool)


def visits_not_in_order(rows, ranks, num_rows):
    """A checker that forgets that a ticket makes its visits one after another: each waits only
    on the visit one rank lower."""
    own = np.broadcast_to(np.arange(rows.shape[1])[:, None], rows.shape)
    before = check_module._one_rank_lower(rows, ranks, num_rows)
    waits = own.reshape(-1).take(before)
    return np.maximum(own, waits).max(axis=2, initial=0), np.ones(len(rows), bool)


def one_step_of_waiting(rows, ranks, num_rows):
    """A checker that does not follow chains of waits."""
    own = np.broadcast_to(np.arange(rows.shape[1])[:, None], rows.shape)
    before = check_module._one_rank_lower(rows, ranks, num_rows)
    waits = own.reshape(-1).take(before)
    reach = np.maximum.accumulate(np.maximum(own, waits), axis=2)
    return reach[:, :, -1], check_module.reached(rows, ranks, num_rows)[1]


def cycles_not_looked_for(rows, ranks, num_rows):
    """A checker that believes that every schedule ends."""
    return check_module.reached(rows, ranks, num_rows)[0], np.ones(len(rows), bool)


def one_resident_too_few(rows, ranks, num_rows):
    """A checker that counts one waiting ticket less."""
    reach, acyclic = check_module.reached(rows, ranks, num_rows)
    place = np.arange(reach.shape[1])
    waits = reach > place
    first = waits & (np.cumsum(waits, axis=1) == 1)
    return np.where(first, place, reach), acyclic


CHECKERS = {
    function.__name__: function
    for function in (
        ranks_not_looked_at,
        visits_not_in_order,
        one_step_of_waiting,
        cycles_not_looked_for,
        one_resident_too_few,
    )
}
