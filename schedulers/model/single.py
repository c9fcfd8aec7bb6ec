"""The model's clock for one list at a time: a section of one head, under one candidate.

The same recurrence as ``lockstep``'s, with the arrays of one ticket: masks by head on long
sequences have sections of one head, thousands of them, whose tickets have nothing beside them.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .lockstep import Clock, Programs


def section(clock: Clock, lists: Programs, by_turns: bool) -> np.ndarray:
    """Time one section of one head; lists: one program.  Returns rows [N, L] in visiting order.

    by_turns: visit each list's blocks in the order in which their turns come, those whose turn has
    come in the order of the list; for one query head.
    """
    rows, tiles = lists.row[:, :, 0].copy(), lists.tiles
    costs = _Costs(clock, lists)
    turns = np.zeros(lists.num_rows, clock.free.dtype)
    free, after, fixed = clock.free[0].tolist(), int(clock.after), clock.fixed
    heapq.heapify(free)
    counts = lists.visits[:, 0].tolist()
    soonest = (lists.cost[:, 0, 0] + clock.begin).tolist()
    for place, count in enumerate(counts):
        start = free[0]
        if not count:
            heapq.heapreplace(free, start + fixed)
            continue
        row = rows[place, :count]
        turn = turns.take(row)
        if by_turns:
            order = _by_turn(turn, start + soonest[place], tiles)
            turn = turn.reshape(-1, tiles).take(order, 0).reshape(-1)
            blocks = row.reshape(-1, tiles)
            blocks[:] = blocks.take(order, 0)
            costs.reorder(place, count, order)
        turns[row] = landed = costs.landed(place, count, start, turn)
        heapq.heapreplace(free, int(landed[-1]) + after)
    clock.free[0] = sorted(free)
    return rows


def _by_turn(turn: np.ndarray, soonest: int, tiles: int) -> np.ndarray:
    """Return a list's blocks by the turns of their tiles: a block's is that of its last one."""
    key = turn[::tiles]
    for tile in range(1, tiles):
        key = np.maximum(key, turn[tile::tiles])
    return np.maximum(key, key.dtype.type(soonest)).argsort(kind="stable")


class _Costs:
    """Sums of the costs of one list's tickets, and their landings."""

    def __init__(self, clock: Clock, lists: Programs):
        self.clock, self.lists = clock, lists
        self.stages = clock.machine.dq_stages
        length = lists.row.shape[1]
        # Landings are at least a reduction apart; with one buffer, so are computations.
        apart = clock.reduce if self.stages > 1 else 0
        self.apart = (np.arange(length) * apart).astype(clock.free.dtype)
        self.past = self.apart + clock.passing
        self.computed = np.empty(length, clock.free.dtype)
        self.uniform = lists.uniform is not None
        cost = lists.cost[:, :, 0]
        if self.uniform:
            cost = np.full_like(cost[0], lists.uniform)
        self.total, self.early = self._sums(cost)

    def _sums(self, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total, early = self.clock.sums(cost[..., None])
        later = early.shape[-2]
        return total[..., 0] - self.apart[: total.shape[-2]], early[..., 0] + self.apart[:later]

    def reorder(self, place: int, count: int, order: np.ndarray) -> None:
        """Put the costs of a list's blocks into another order."""
        if not self.uniform:
            cost = self.lists.cost[place, :count, 0].reshape(-1, self.lists.tiles).take(order, 0)
            total, early = self._sums(cost.reshape(-1))
            self.total[place, :count], self.early[place, : len(early)] = total, early

    def landed(self, place: int, count: int, start: int, turn: np.ndarray) -> np.ndarray:
        """Return when each visit's row is free for its next writer, of turns [count]."""
        total, early, stages = self.total, self.early, self.stages
        if not self.uniform:
            total, early = total[place], early[place]
        turn -= self.apart[:count]
        computed, later = self.computed[:count], max(0, count - stages)
        computed[:stages] = start
        np.add(turn[:later], early[:later], computed[stages:])
        np.maximum.accumulate(computed, 0, None, computed)
        computed += total[:count]
        if stages > 1:
            np.maximum.accumulate(turn, 0, None, turn)
        np.maximum(computed, turn, out=turn)
        turn += self.past[:count]
        return turn
