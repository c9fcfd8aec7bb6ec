"""The model's clock for one list at a time: a section of one head, under one candidate.

The same recurrence as ``lockstep``'s, with the arrays of one ticket: masks by head on long
sequences have sections of one head, thousands of them, whose tickets have nothing beside them.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from .programs import Programs, Slots


def section(clock: Slots, lists: Programs, by_turns: bool) -> np.ndarray:
    """Time one section of one head; lists: one program.

    Returns blocks int64 [N, L', 1] in visiting order, those of all query heads of a group.

    by_turns: visit each list's blocks in the order in which their turns come, those whose turn has
    come in the order of the list; for one query head.
    """
    tiles = lists.tiles
    blocks = lists.row[:, :-1:tiles, 0] // tiles
    costs = _Costs(clock, lists)
    turns = _blocks(np.zeros(lists.num_rows, clock.free.dtype), tiles)
    free, after, fixed = clock.free[0].tolist(), int(clock.after), clock.fixed
    heapq.heapify(free)
    counts = lists.visits[:, 0].tolist()
    soonest = (lists.cost[:, 0, 0] + clock.begin).tolist()
    for place, count in enumerate(counts):
        start = free[0]
        if not count:
            heapq.heapreplace(free, start + fixed)
            continue
        views, listed = costs.views(count), blocks[place, : count // tiles]
        # All indices are valid; mode="clip" avoids the buffer that NumPy needs to raise.
        turns.take(listed, None, views.items, "clip")
        turn = views.turn
        if by_turns:
            order = _by_turn(views, start + soonest[place])
            views.items.take(order, None, views.sorted_items, "clip")
            turn = views.sorted
            listed[:] = listed.take(order)
            costs.reorder(place, count, order)
        landed = costs.landed(place, count, start, turn)
        turns[listed] = views.landed_items
        heapq.heapreplace(free, landed.item(count - 1) + after)
    clock.free[0] = sorted(free)
    return blocks[..., None]


def _blocks(rows: np.ndarray, tiles: int) -> np.ndarray:
    """View the tiles of each block as one item."""
    return rows.view(f"V{rows.itemsize * tiles}")


class _Views(NamedTuple):
    """Buffers of a ticket of C visits.

    turn, sorted, landed   [C]; items, sorted_items and landed_items: their blocks, the same memory
    tiles                  the turns of each block's first tile, of its second one, ..
    key, soonest           [C / tiles] and []: a block's turn, and the first one that is waited for
    begin                  [s]: when computing may begin, the first s of ``computed``
    sums                   [2, C]: turns, moved to where their running maxima are wanted
    total, past            [C]: what is added to the first of them, and to the greater of both
    moved                  [2, C]: what turns are moved by; it and ``total`` where costs are uniform
    running                [2, s + C]: those maxima; ``computed`` and ``waited``, [C], are parts
    """

    turn: np.ndarray
    items: np.ndarray
    tiles: list[np.ndarray]
    key: np.ndarray
    soonest: np.ndarray
    sorted: np.ndarray
    sorted_items: np.ndarray
    landed: np.ndarray
    landed_items: np.ndarray
    begin: np.ndarray
    sums: np.ndarray
    running: np.ndarray
    computed: np.ndarray
    waited: np.ndarray
    past: np.ndarray
    moved: np.ndarray
    total: np.ndarray


def _by_turn(views: _Views, soonest: int) -> np.ndarray:
    """Return a list's blocks by the turns of their tiles: a block's is that of its last one."""
    key, first = views.key, views.tiles[0]
    views.soonest[()] = soonest
    np.maximum(first, views.soonest, out=key)
    for turn in views.tiles[1:]:
        np.maximum(key, turn, out=key)
    return key.argsort(kind="stable")


class _Costs:
    """Sums of the costs of one list's tickets, and their landings."""

    def __init__(self, clock: Slots, lists: Programs):
        self.clock, self.lists = clock, lists
        self.stages = stages = clock.machine.dq_stages
        length, dtype = lists.row.shape[1], clock.free.dtype
        # Landings are at least a reduction apart; with one buffer, so are computations.
        apart = clock.reduce if stages > 1 else 0
        self.apart = (np.arange(length) * apart).astype(dtype)
        self.past = self.apart + clock.passing
        self.buffers, self.soonest = np.empty((4, length), dtype), np.zeros((), dtype)
        self.running = np.full((2, stages + length), np.iinfo(dtype).min, dtype)
        self.known: dict[int, _Views] = {}
        self.uniform = lists.uniform is not None
        cost = lists.cost[:, :, 0]
        if self.uniform:
            cost = np.full_like(cost[:1], lists.uniform)
        #: [N or 1, L], less ``apart``, and [N or 1, 2, L]: what turns are moved by.
        self.total, early = self._sums(cost)
        self.moved = np.zeros((len(cost), 2, length), dtype)
        self.moved[:, 0, : early.shape[1]] = early
        self.moved[:, 1] = -self.apart

    def _sums(self, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total, early = self.clock.sums(cost[..., None])
        return total[..., 0] - self.apart[: total.shape[-2]], early[..., 0]

    def views(self, count: int) -> _Views:
        """Return the buffers of a ticket of ``count`` visits."""
        if count not in self.known:
            tiles, stages = self.lists.tiles, self.stages
            turn, ordered, landed, key = self.buffers[:, :count]
            running = self.running[:, : stages + count]
            self.known[count] = _Views(
                turn,
                _blocks(turn, tiles),
                [turn[tile::tiles] for tile in range(tiles)],
                key[: count // tiles],
                self.soonest,
                ordered,
                _blocks(ordered, tiles),
                landed,
                _blocks(landed, tiles),
                running[0, :stages],
                running[:, stages:],
                running,
                running[0, :count],
                running[1, stages:],
                self.past[:count],
                *self._sums_of(0, count),
            )
        return self.known[count]

    def _sums_of(self, place: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self.moved[place, :, :count], self.total[place, :count]

    def reorder(self, place: int, count: int, order: np.ndarray) -> None:
        """Put the costs of a list's blocks into another order."""
        if not self.uniform:
            cost = self.lists.cost[place, :count, 0].reshape(-1, self.lists.tiles).take(order, 0)
            total, early = self._sums(cost.reshape(-1))
            self.total[place, :count], self.moved[place, 0, : len(early)] = total, early

    def landed(self, place: int, count: int, start: int, turn: np.ndarray) -> np.ndarray:
        """Return when each visit's row is free for its next writer, of turns [count].

        Both running maxima of ``lockstep`` are taken at once; with s = 1 the second adds nothing.
        """
        views = self.views(count)
        uniform = views.moved, views.total
        moved, total = uniform if self.uniform else self._sums_of(place, count)
        np.add(turn, moved, views.sums)
        views.begin.fill(start)
        np.maximum.accumulate(views.running, 1, None, views.running)
        landed = views.landed
        np.add(views.computed, total, landed)
        np.maximum(landed, views.waited, out=landed)
        landed += views.past
        return landed
