"""Checks of every schedule before a launch: it is complete, and cannot deadlock.

Whole: every ticket once, every writer of a row with its own rank, ranks 0 to count - 1.

Deadlock: tickets are taken in order, a CTA keeps its slot until its list is done, and visit e waits
for the visit before it in its list and for the visit of the same row one rank lower.  Let
``reach(t)`` be the latest ticket among all that ticket t waits for, directly or not.  With the
tickets 0..k taken and no more, exactly those with reach(t) <= k can finish; so ticket k + 1 gets a
slot if and only if P exceeds the number of t <= k with reach(t) > k.  The schedule therefore
progresses with P resident CTAs if and only if there is no cycle and

    P >= 1 + max over k of |{t <= k < reach(t)}|.

The verdict does not depend on timing: what can finish only grows as work is done.

With ``group`` query heads to a ticket, its list is walked once for each of them, on rows of that
head's own.  So a visit for the second head waits for all that the ticket's visits for the first
waited for, and those that wait for it do too: reach grows from head to head until nothing is added.
Where every wait is for an earlier ticket it does not: any_residency holds for every group or none.
"""

from __future__ import annotations

import graphlib
from dataclasses import dataclass

import numpy as np

from cute_kernels.errors import ScheduleError, expected

from .ranks import block_grid, integer
from .schedule import Schedule

#: Flags for each value at most, to see repeats without sorting.
_DENSE = 32


@dataclass(frozen=True)
class Safety:
    """Safety of a schedule: ``residents``, the fewest resident CTAs with which it progresses."""

    residents: int

    @property
    def any_residency(self) -> bool:
        """Whether any number of resident CTAs progresses: each waits on earlier tickets only."""
        return self.residents == 1

    def __str__(self) -> str:
        return "any_residency" if self.any_residency else f"needs({self.residents})"


def check(schedule: Schedule, block_mask: object = None, *, group: int = 1) -> Safety:
    """Return the ``Safety`` of a schedule; a ScheduleError names head, row, rank and tickets.

    block_mask: if given, the lists are compared with it too: every block of the mask is visited,
    and no other, partial where the mask says so.
    group: query heads to a ticket.  More of them may need more residents; a schedule that is
    any_residency is so for every group.

    Example:
        >>> schedule = ck.schedulers.spt(ck.BlockMask.causal(1024, 1024), heads=2)
        >>> ck.schedulers.check(schedule).residents > 0
        True
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(expected("schedule", "a Schedule", type(schedule).__name__))
    integer("group", group)
    _check_launches(schedule)
    _check_rows(schedule)
    if block_mask is not None:
        _check_visits(schedule, block_mask)
    _check_ranks(schedule)
    return Safety(_residents(schedule, group))


def admit(
    schedule: Schedule,
    block_mask: object = None,
    *,
    group: int = 1,
    allow_residency: int | None = None,
) -> Safety:
    """Run ``check``; raise ScheduleError unless the schedule is any_residency or needs no more than
    ``allow_residency`` CTAs, which the caller promises to be resident at once."""
    if allow_residency is not None:
        integer("allow_residency", allow_residency)
    safety = check(schedule, block_mask, group=group)
    if not safety.any_residency and (allow_residency or 1) < safety.residents:
        want = f"at least {safety.residents}, which schedule {schedule.name!r} needs"
        raise ScheduleError(expected("allow_residency", want, allow_residency))
    return safety


def _check_launches(schedule: Schedule) -> None:
    heads, columns = schedule.heads, schedule.num_kv_blocks
    order = schedule.order.astype(np.int64)
    inside = (order >= 0).all(1) & (order < (heads, columns)).all(1)
    if not inside.all():
        ticket = int(np.argmin(inside))
        want = f"head in [0, {heads}) and kv block in [0, {columns})"
        raise ScheduleError(expected(f"ticket {ticket}", want, order[ticket].tolist()))
    flat = order[:, 0] * columns + order[:, 1]
    times = np.bincount(flat, minlength=heads * columns)
    if (times == 1).all():
        return
    if (times > 1).any():
        pair = int(np.argmax(times > 1))
        tickets = np.flatnonzero(flat == pair)[:2].tolist()
        fault = f"head {pair // columns} kv block {pair % columns} in tickets {tickets}"
    else:
        pair = int(np.argmin(times))
        fault = f"head {pair // columns} kv block {pair % columns} in none"
    raise ScheduleError(expected("order", "every (head, kv block) in one ticket", fault))


def _entry_lists(schedule: Schedule) -> np.ndarray:
    """Return the list of each entry, int64 [E]."""
    return np.repeat(np.arange(len(schedule.offset) - 1), np.diff(schedule.offset))


def _check_rows(schedule: Schedule) -> None:
    rows = schedule.num_q_blocks
    wrong = (schedule.q_block < 0) | (schedule.q_block >= rows)
    lists_of_entry = _entry_lists(schedule)
    if wrong.any():
        entry = int(np.argmax(wrong))
        fault = f"row {schedule.q_block[entry]}, {_describe_list(schedule, lists_of_entry[entry])}"
        raise ScheduleError(expected("q_block", f"rows in [0, {rows})", fault))
    visit = lists_of_entry * np.int64(max(1, rows)) + schedule.q_block
    if (repeated := _repeated(visit, (len(schedule.offset) - 1) * max(1, rows))) is not None:
        fault = f"row {repeated % rows} twice, {_describe_list(schedule, repeated // rows)}"
        raise ScheduleError(expected("q_block", "each row once in a ticket", fault))


def _check_visits(schedule: Schedule, block_mask: object) -> None:
    grid = block_grid(block_mask, schedule.heads)
    shape = (grid.num_q_blocks, grid.num_kv_blocks)
    shape_of_schedule = (schedule.num_q_blocks, schedule.num_kv_blocks)
    if shape != shape_of_schedule:
        raise ScheduleError(
            expected("schedule", f"{shape} blocks like the mask", shape_of_schedule)
        )
    lists_of_entry = _entry_lists(schedule)
    blocks = np.zeros((schedule.num_lists, *shape), np.uint8)
    coord = (
        lists_of_entry // max(1, shape[1]),
        schedule.q_block,
        lists_of_entry % max(1, shape[1]),
    )
    blocks[coord] = np.where(schedule.partial, 1, 2)
    pairs = np.unique(np.stack((schedule.list_of_head, grid.mask_of), axis=1), axis=0)
    for lists, group in pairs.tolist():
        differs = np.argwhere(blocks[lists] != grid.host[group])
        if len(differs):
            row, column = differs[0].tolist()
            kind_names = ("empty", "partial", "full")
            want = f"{kind_names[grid.host[group, row, column]]} as in the mask"
            place_text = _describe_list(schedule, lists * shape[1] + column, grid.mask_of == group)
            kind = kind_names[blocks[lists, row, column]]
            verb = " (a contributor that never visits)" if kind == "empty" else ""
            raise ScheduleError(expected(f"row {row}, {place_text}", want, kind + verb))


def _check_ranks(schedule: Schedule) -> None:
    """Check that ranks within (lists, row) are 0 to count - 1, each once."""
    rows, columns = max(1, schedule.num_q_blocks), max(1, schedule.num_kv_blocks)
    lists_of_entry, rank = _entry_lists(schedule), schedule.rank.astype(np.int64)
    row = lists_of_entry // columns * rows + schedule.q_block
    count = np.bincount(row, minlength=1)[row]
    wrong = (rank < 0) | (rank >= count)
    if wrong.any():
        entry = int(np.argmax(wrong))
        list_text = _describe_list(schedule, lists_of_entry[entry])
        place_text = f"rank of row {schedule.q_block[entry]}, {list_text}"
        want = f"in [0, {count[entry]}), as that many visit (is a contributor missing?)"
        raise ScheduleError(expected(place_text, want, int(rank[entry])))
    keys = row * np.int64(columns + 1) + rank
    if (key := _repeated(keys, schedule.num_lists * rows * (columns + 1))) is not None:
        both = np.flatnonzero(keys == key)[:2]
        place_text = " and ".join(_describe_list(schedule, lists_of_entry[entry]) for entry in both)
        fault = f"rank {key % (columns + 1)} twice: {place_text}"
        raise ScheduleError(expected(f"ranks of row {schedule.q_block[both[0]]}", "unique", fault))


def _repeated(values: np.ndarray, size: int) -> int | None:
    """Return the least of ``values``, in [0, size), that occurs twice, None if there is none."""
    if size <= _DENSE * len(values):
        seen = np.zeros(size, bool)
        seen[values] = True
        if np.count_nonzero(seen) == len(values):
            return None
    values = np.sort(values)
    repeats = values[1:] == values[:-1]
    return int(values[np.argmax(repeats)]) if repeats.any() else None


def _describe_list(schedule: Schedule, list_index: int, among: np.ndarray | bool = True) -> str:
    """Describe a list: its first head (of ``among``, bool [heads]), column and ticket."""
    lists, column = divmod(int(list_index), max(1, schedule.num_kv_blocks))
    heads = np.flatnonzero((schedule.list_of_head == lists) & among)
    if not len(heads):
        return f"lists {lists} kv block {column} (no head)"
    ticket = np.flatnonzero((schedule.order == (heads[0], column)).all(1))
    ticket_name = int(ticket[0]) if len(ticket) else "none"
    return f"head {heads[0]} kv block {column} (ticket {ticket_name})"


def _residents(schedule: Schedule, group: int) -> int:
    """Return P of the module's docstring; raise ScheduleError if the waits form a cycle."""
    if schedule.num_tickets == 0:
        return 1
    ticket, cases, case_of_head = schedule.launches()
    entry, valid = schedule.padded(cases[:, :1] * schedule.num_kv_blocks + cases[:, 1:])
    parts = schedule.q_block, schedule.rank
    rows, ranks = (np.where(valid, part[entry], -1) for part in parts)
    reach, acyclic = reached(rows, ranks, schedule.num_q_blocks, group)
    if not acyclic.all():
        case = int(np.argmin(acyclic))
        head = int(np.argmax(case_of_head == case))
        _name_a_cycle(schedule, head, cases[case, 1:], ticket[head])
    tickets = np.sort(ticket, axis=1)
    last = np.take_along_axis(tickets, reach[case_of_head], axis=1)
    return int(residents(tickets.reshape(1, -1), last.reshape(1, -1))[0])


def reached(
    rows: np.ndarray, ranks: np.ndarray, num_rows: int, group: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return (reach int64 [B, N], acyclic bool [B]) of B independent problems.

    rows, ranks: int [B, N, L], the lists of N columns in launch order, -1 past each end; ranks
    are places already.  Each list is walked ``group`` times, on rows of the time's own.
    reach[b, p]: the last launch place that column p waits for, its own or later, through any chain
    of waits.
    """
    cases, columns, longest = rows.shape
    reach = np.tile(np.arange(columns), (cases, 1))
    if longest == 0:
        return reach, np.ones(cases, bool)
    before = _one_rank_lower(rows, ranks, num_rows)
    # The column of a flat entry is entry // longest.
    if (before % (columns * longest) // longest <= reach[:, :, None]).all():
        return reach, np.ones(cases, bool)
    for _ in range(group):
        # In each round all visits of a list wait for what the list waited for in the last one.
        last, reach = reach, _farthest(np.broadcast_to(reach[..., None], rows.shape), before)
        if (reach == last).all():
            break
    return reach, _can_all_be_done(before)


def _one_rank_lower(rows: np.ndarray, ranks: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the flat entry with the same row and the rank below, int64 [B, N, L]; itself if there
    is none."""
    cases, columns = rows.shape[:2]
    none = cases * num_rows * columns
    # Small numbers in half of the bytes: what is read at random here is as large as the masks.
    dtype = np.int32 if max(none, rows.size) < 2**31 else np.int64
    entry = np.arange(rows.size, dtype=dtype).reshape(rows.shape)
    first = np.arange(cases, dtype=dtype)[:, None, None] * dtype(num_rows)
    slot_index = (first + rows.astype(dtype, copy=False)) * dtype(columns)
    slot_index += ranks.astype(dtype, copy=False)
    np.copyto(slot_index, dtype(none), where=rows < 0)
    holder = np.zeros(none + 1, dtype)
    holder[slot_index] = entry
    return np.where(ranks > 0, holder.take(slot_index - 1), entry)


def _farthest(values: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the greatest of ``values`` [B, N, L] among all that each list's last visit waits for,
    int64 [B, N]."""
    reach, farther = None, values
    while reach is None or (farther != reach).any():
        reach = farther
        farther = np.maximum(reach, reach.reshape(-1).take(before))
        np.maximum.accumulate(farther, axis=2, out=farther)
    return reach[:, :, -1]


def _can_all_be_done(before: np.ndarray) -> np.ndarray:
    """Return bool [B]: every visit gets its turn if all columns are resident; False if cyclic."""
    first = before == np.arange(before.size).reshape(before.shape)
    previous, current = None, np.zeros(before.shape, bool)
    while previous is None or (current != previous).any():
        previous = current
        current = first | previous.reshape(-1).take(before)
        np.logical_and.accumulate(current, axis=2, out=current)
    return previous.all(axis=(1, 2))


def residents(ticket: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return 1 + the most intervals [ticket, last) over one point, int64 [B]; both int64 [B, T]."""
    cases, tickets = ticket.shape
    first, size = np.arange(cases)[:, None] * (tickets + 1), cases * (tickets + 1)
    begun = np.bincount((first + ticket).reshape(-1), minlength=size)
    ended = np.bincount((first + last).reshape(-1), minlength=size)
    rise = (begun - ended).reshape(cases, tickets + 1)
    return 1 + np.cumsum(rise, axis=1).max(axis=1)


def _name_a_cycle(schedule: Schedule, head: int, launched: np.ndarray, ticket: np.ndarray) -> None:
    """Raise ScheduleError with one cycle of waits of a head that has one."""
    waits, facts, holder = {}, {}, {}
    first = int(schedule.list_of_head[head]) * schedule.num_kv_blocks
    for column in launched.tolist():
        span = range(*schedule.offset[first + column : first + column + 2].tolist())
        for entry in span:
            row, rank = int(schedule.q_block[entry]), int(schedule.rank[entry])
            facts[entry] = (row, rank, int(ticket[column]))
            holder[row, rank] = entry
            waits[entry] = [entry - 1] if entry > span.start else []
    for entry, (row, rank, _) in facts.items():
        if rank:
            waits[entry].append(holder[row, rank - 1])
    try:
        graphlib.TopologicalSorter(waits).prepare()
    except graphlib.CycleError as error:
        # In the list each waits for the one before it; its first is its last.
        steps = [facts[entry] for entry in error.args[1][:0:-1]]
        cycle = " <- ".join(f"row {row} rank {rank} (ticket {t})" for row, rank, t in steps)
        want = "waits without a cycle"
        raise ScheduleError(expected("schedule", want, f"head {head}: {cycle}")) from None
