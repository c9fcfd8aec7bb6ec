"""Schedules executed step by step, knowing nothing of how ``check`` reasons.

The rules of the machine: tickets start in order, each on a slot of its own; a ticket makes its
visits in order; a visit may be made when the row's counter equals its rank, and then raises the
counter by one; a ticket that has made all its visits gives its slot back.  With ``group`` query
heads a ticket makes its visits once for each of them, on rows of that head's own.
"""

from __future__ import annotations

import itertools

import numpy as np

WORD = np.uint64(0xFFFFFFFFFFFFFFFF)
LOW = [
    np.uint64(pattern)
    for pattern in (
        0xAAAAAAAAAAAAAAAA,
        0xCCCCCCCCCCCCCCCC,
        0xF0F0F0F0F0F0F0F0,
        0xFF00FF00FF00FF00,
        0xFFFF0000FFFF0000,
        0xFFFFFFFF00000000,
    )
]


def stuck(schedule, slots: int, seed: int | None = None, group: int = 1) -> list[int]:
    """The tickets that never end with ``slots`` slots; a random interleaving if a seed is given."""
    tickets = [
        [((head, member, row), rank) for member in range(group) for row, _, rank in visits]
        for head, _, visits in schedule.tickets()
    ]
    random = None if seed is None else np.random.default_rng(seed)
    counter, visit = {}, [0] * len(tickets)
    resident, started, ended = [], 0, set()
    while True:
        moved = False
        while len(resident) < slots and started < len(tickets):
            resident.append(started)
            started += 1
            moved = True
        if random is not None:
            random.shuffle(resident)
        for ticket in list(resident):
            visits = tickets[ticket]
            # One visit at a time in a random run, as many as possible otherwise.
            while visit[ticket] < len(visits):
                row, rank = visits[visit[ticket]]
                if counter.get(row, 0) != rank:
                    break
                counter[row] = rank + 1
                visit[ticket] += 1
                moved = True
                if random is not None:
                    break
            if visit[ticket] == len(visits):
                resident.remove(ticket)
                ended.add(ticket)
                moved = True
        if not moved:
            return [ticket for ticket in range(len(tickets)) if ticket not in ended]


def all_masks(rows: int, columns: int) -> np.ndarray:
    """uint8 [2 ** (rows * columns), rows, columns]: every mask; bit row * columns + column."""
    index = np.arange(1 << (rows * columns), dtype=np.int64)
    bits = (index[:, None] >> np.arange(rows * columns)) & 1
    return bits.astype(np.uint8).reshape(-1, rows, columns)


def deadlocks(rows, columns, launch, writers, walk, slots: int, group: int = 1) -> np.ndarray:
    """bool [2 ** (rows * columns)]: which of all masks hang, 64 masks to a machine word.

    launch: columns from first to last; writers: the same for each row; walk: rows for each column.
    """
    passed = [~_plane(bit, rows * columns) for bit in range(rows * columns)] * group
    changed = True
    while changed:
        changed = False
        running = _resident(passed, rows * group, columns, launch, slots)
        for position, column in enumerate(launch):
            so_far = running[position]
            for member, row in itertools.product(range(group), walk[column]):
                first = (member * rows + row) * columns
                bit, turn = first + column, so_far
                for earlier in writers[row][: writers[row].index(column)]:
                    turn = turn & passed[first + earlier]
                now = passed[bit] | turn
                if (now != passed[bit]).any():
                    passed[bit] = now
                    changed = True
                so_far = so_far & now
    hangs = ~np.bitwise_and.reduce(passed)
    bits = np.unpackbits(hangs.view(np.uint8), bitorder="little")
    return bits[: 1 << (rows * columns)].astype(bool)


def _plane(bit: int, bits: int) -> np.ndarray:
    """uint64 [words]: one bit of the numbers 0..2 ** bits - 1, 64 numbers to a word."""
    words = max(1, (1 << bits) // 64)
    if bit < 6:
        return np.full(words, LOW[bit])
    return np.where((np.arange(words) >> (bit - 6)) & 1, WORD, np.uint64(0))


def _resident(passed, rows, columns, launch, slots: int) -> list[np.ndarray]:
    """Per place in the launch: the masks in which fewer than ``slots`` earlier tickets are open."""
    words = np.full(len(passed[0]), WORD)
    at_least = [words] + [np.zeros_like(words) for _ in range(slots)]
    running = []
    for column in launch:
        running.append(~at_least[slots])
        is_open = ~np.bitwise_and.reduce([passed[row * columns + column] for row in range(rows)])
        for count in range(slots, 0, -1):
            at_least[count] = at_least[count] | (at_least[count - 1] & is_open)
    return running
