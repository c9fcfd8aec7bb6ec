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
    free = clock.free[0].tolist()
    heapq.heapify(free)
    for place, (count, soonest) in enumerate(
        zip(lists.visits[:, 0].tolist(), (lists.cost[:, 0, 0] + clock.begin).tolist(), strict=True)
    ):
        start = free[0]
        if not count:
            heapq.heapreplace(free, start + clock.fixed)
            continue
        row = rows[place, :count]
        turn = turns.take(row)
        if by_turns:
            # A block's turn has come when that of its last tile has.
            key = np.maximum(turn, start + soonest)
            for tile in range(1, tiles):
                key[::tiles] = np.maximum(key[::tiles], key[tile::tiles])
            order = key[::tiles].argsort(kind="stable")
            blocks = row.reshape(-1, tiles)
            blocks[:] = blocks.take(order, 0)
            turn = turns.take(row)
            costs.reorder(place, count, order)
        turns[row] = landed = costs.landed(place, count, start, turn)
        heapq.heapreplace(free, int(landed[-1]) + int(clock.after))
    clock.free[0] = sorted(free)
    return rows


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
        cost = (
            lists.cost[:, :, 0]
            if lists.uniform is None
            else np.full_like(lists.cost[:1, :, 0], lists.uniform)
        )
        self.total, self.early = self._sums(cost)

    def _sums(self, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total, early = self.clock.sums(cost[..., None])
        later = early.shape[-2]
        return total[..., 0] - self.apart[: total.shape[-2]], early[..., 0] + self.apart[:later]

    def reorder(self, place: int, count: int, order: np.ndarray) -> None:
        """Put the costs of a list's blocks into another order."""
        if self.lists.uniform is None:
            cost = self.lists.cost[place, :count, 0].reshape(-1, self.lists.tiles).take(order, 0)
            total, early = self._sums(cost.reshape(-1))
            self.total[place, :count], self.early[place, : len(early)] = total, early

    def landed(self, place: int, count: int, start: int, turn: np.ndarray) -> np.ndarray:
        """Return when each visit's row is free for its next writer, of turns [count]."""
        index = place if self.lists.uniform is None else 0
        turn -= self.apart[:count]
        computed, later = np.empty_like(turn), max(0, count - self.stages)
        computed[: self.stages] = start
        np.add(turn[:later], self.early[index, :later], out=computed[self.stages :])
        np.maximum.accumulate(computed, out=computed)
        computed += self.total[index, :count]
        if self.stages > 1:
            np.maximum.accumulate(turn, out=turn)
        np.maximum(computed, turn, out=turn)
        turn += self.past[:count]
        return turn
