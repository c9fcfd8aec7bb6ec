"""The model's clock for schedules whose ranks follow the launch order, many candidates at once.

Such a ticket waits on earlier tickets only, so tickets can be timed one after another, each as one
running maximum over its visits; tickets of one place in a section (one per head) do not wait for
each other and are timed together.  Exactly what ``simulate``'s event loop computes: the tests
compare the two to the nanosecond.

With visits i = 1.. of one ticket, c its compute times, r the reduction, s = dq_stages, S its slot's
free time and turn_i the previous writer's landing plus the handoff (0 for the first writer):

    computed_i = max(computed_{i-1} + c_i, landed_{i-s})       computed_0 = S + tile_start
    landed_i   = max(computed_i, landed_{i-1}, turn_i) + r

Solved for s = 1, with C_i the sum of max(c_i, r) (c_1 alone for the first visit):

    computed_i = C_i + max(S, max_{j < i} turn_j + r - C_{j+1})
    landed_i   = max(computed_i, turn_i) + r

and, where r is at most every c, for any s with C_i the sum of c_i:

    computed_i = C_i + max(S, max_{j <= i-s} turn_j + r - C_{j+s})
    landed_i   = i r + max(computed_i - (i-1) r, max_{j <= i} turn_j - (j-1) r)
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np

from .machines import Machine
from .programs import Programs
from .traffic import Gaps

# Turn of a block that is padding.
_NEVER = np.int64(1) << 62
# Steps are as high as their longest ticket, rounded up to this, so that few shapes occur.
_ROUND = 8


class Clock:
    """Clock of K candidates side by side, in ticks: ``free`` [K, slots] is when each slot is."""

    def __init__(self, machine: Machine, candidates: int, dtype, tape: Tape | Gaps | None = None):
        self.machine = machine
        self.tick = tick = machine.tick()
        self.reduce = machine.reduce_ns // tick
        self.handoff = machine.handoff_ns // tick
        self.begin = machine.tile_start_ns // tick
        end = machine.tile_end_ns // tick
        self.passing = np.array(self.reduce + self.handoff, dtype)
        self.after = np.array(end - self.handoff, dtype)
        self.fixed = self.begin + end
        self.free = np.zeros((candidates, machine.slots), dtype)
        self.tape = tape
        self.board: _Board | None = None

    def keep(self, candidates: np.ndarray) -> None:
        """Keep these ``candidates`` (repeats allowed)."""
        self.free = self.free[candidates]

    def makespan_ns(self) -> np.ndarray:
        """Return when each candidate's last slot is free, int64 [K]."""
        return self.free.max(axis=1).astype(np.int64) * self.tick

    def spent_ns(self) -> np.ndarray:
        """Return the sum of the slots' times, waits included, int64 [K]."""
        return self.free.sum(axis=1, dtype=np.int64) * self.tick

    def sums(self, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sum costs [.., L, X] to ``(total, early)``: C_i with tile_start, and r - C_{j+s}, by
        which turn_j is moved, [.., L - s, X]."""
        stages = self.machine.dq_stages
        if stages == 1:
            cost = cost.copy()
            np.maximum(cost[..., 1:, :], self.reduce, out=cost[..., 1:, :])
        total = np.cumsum(cost, axis=-2, dtype=cost.dtype)
        total += cost.dtype.type(self.begin)
        return total, self.reduce - total[..., stages:, :]

    def section(self, lists: Programs, heads: int, by_turns: bool = False) -> np.ndarray | None:
        """Time one section: place after place, ``heads`` tickets each.

        lists: [K] programs if the section's heads share a mask, else [heads * K], head first.
        by_turns: visit each list's blocks in the order in which their turns come (for its first
        head, and of a group for the first query head), those whose turn has come in the order of
        the list.  Returns the query blocks in visiting order, int64 [N, blocks, lists], M past the
        end; or None.
        """
        board = self.board
        if board is None or not board.fits(lists, heads, self, by_turns):
            board = self.board = _Board(lists, heads, self, by_turns)
        board.begin()
        padding = lists.blocks(lists.row) == lists.num_rows // lists.steps if by_turns else None
        for place in range(len(board.heights)):
            if by_turns:
                self._by_turn(board, place, padding[place])
            low = 0
            while low < heads:
                high = min(heads, low + self.free.shape[1])
                low += self._tickets(board, board.step(place, low, high), low, high)
        return lists.blocks(board.spots // lists.row.shape[2]) if by_turns else None

    def _tickets(self, board: _Board, step: _Step, low: int, high: int) -> int:
        """Time the tickets of heads ``low`` to ``high``; return how many are valid.

        Those before the first that would end before a later one begins: that frees a slot.
        """
        candidates, width = len(self.free), high - low
        begin, flat, turns = self.free[:, :width], step.views.flat, board.turns
        if step.whole:
            # All indices are valid; mode="clip" avoids the buffer that NumPy needs to raise.
            turns.take(step.spot, axis=0, out=flat, mode="clip")
        else:
            flat[:] = turns[step.spot, step.lanes]
        if self.tape is not None:
            self.tape.read(step.views.turn)
        start = begin if board.shared else begin.T.reshape(-1, 1)
        computed = self._visits(step, start)
        end = flat.take(step.last, axis=0)
        end += self.after
        if step.hollow is not None:
            np.copyto(end, start + self.fixed, where=step.hollow)
        if not board.shared:
            end = end.reshape(width, candidates).T
        done_lanes = width
        # Usually every ticket ends after the last one begins.
        if np.count_nonzero(end <= begin[:, -1:]):
            done_lanes = _in_step(
                begin, end, step.visits > 0 if self.fixed == 0 and board.shared else None
            )
        if self.tape is not None:
            self.tape.write(self, begin, end, (computed, step.views.turn), step.visits, done_lanes)
        if step.whole and done_lanes == width:
            board.items[step.spot] = step.views.items
        elif board.shared:
            turns[step.spot, low : low + done_lanes] = flat[:, :done_lanes]
        else:
            columns, spot = done_lanes * candidates, step.spot.reshape(-1, len(step.visits))
            turns[spot[:, :columns]] = step.views.turn[:, :columns]
        self.free[:, :done_lanes] = end[:, :done_lanes]
        if self.tape is None:
            self.free.sort(axis=1)
        else:
            self.tape.sort(self)
        return done_lanes

    def _visits(self, step: _Step, start: np.ndarray) -> np.ndarray:
        """Solve computed_i of a ticket per lane, as above; the turns in ``step.views`` become
        landed_i and the handoff.  start: [lists, lanes]."""
        turn, computed, late = step.views.turn, step.views.computed, step.views.late
        stages = min(self.machine.dq_stages, len(turn))
        computed[:stages] = start
        np.add(turn[: len(turn) - stages], step.early, out=computed[stages:])
        np.maximum.accumulate(computed, axis=0, out=computed)
        computed += step.total
        if self.machine.dq_stages > 1:
            np.subtract(turn, step.landings, out=late)
            np.maximum.accumulate(late, axis=0, out=late)
            late += step.landings
            np.maximum(computed, late, out=turn)
        else:
            np.maximum(computed, turn, out=turn)
        turn += self.passing
        return computed

    def _by_turn(self, board: _Board, place: int, padding: np.ndarray) -> None:
        """Sort a place's spots and their costs by the order of their turns."""
        lists, tiles, height = board.lists, board.lists.tiles, board.heights[place]
        blocks = min(-(-height // lists.steps), len(padding))
        spot = board.spots[place, : blocks * tiles]
        count, begin = spot.shape[1], self.free[:, 0]
        if not board.shared:
            heads = np.minimum(np.arange(count // len(self.free)), self.free.shape[1] - 1)
            begin = self.free[:, heads].T.reshape(-1)
        turn = board.turns[:, 0].take(spot)
        np.maximum(turn, begin + board.soonest[place], out=turn)
        if tiles > 1:
            turn = reduce(np.maximum, turn.reshape(blocks, tiles, count).swapaxes(0, 1))
        key = np.where(padding[:blocks], _NEVER, turn)
        order = key.argsort(axis=0, kind="stable")
        if tiles > 1:
            order = (order[:, None] * tiles + np.arange(tiles)[:, None]).reshape(-1, count)
        order *= count
        order += board.each
        if lists.group == 1:
            spot[:] = spot.reshape(-1).take(order)
        else:
            order = _over_group(board, place, order)
        if not board.steady:
            cost = lists.cost[place].copy()
            cost[: len(order)] = cost.reshape(-1).take(order)
            for sums, part in zip(board.sums, self.sums(cost), strict=True):
                sums[place] = part


def _over_group(board: _Board, place: int, order: np.ndarray) -> np.ndarray:
    """Put a place's spots into ``order`` [blocks * tiles, lists], found for the first query head,
    for every query head.  Returns the order of all steps, as indices into [L, lists]."""
    lists, count = board.lists, order.shape[1]
    each = np.maximum(1, lists.visits[place] // lists.group)
    member, step = np.divmod(np.arange(len(order) * lists.group)[:, None], each)
    order = np.take_along_axis(order, step, 0)
    order += member * (each * count)
    past = member >= lists.group
    np.copyto(order, np.arange(order.size).reshape(order.shape), where=past)
    spot = board.spots[place, : len(order)]
    spot[:] = spot.reshape(-1).take(order)
    return order


class _Views(NamedTuple):
    """Parts of a board's buffers for tickets [lists, lanes] of up to H visits.

    turn      [H, lists, lanes]; flat [H * lists, lanes] and items [H * lists] are the same memory
    computed  [H, lists, lanes]
    late      [H, lists, lanes]: with s > 1, turns less a reduction for each visit before
    """

    turn: np.ndarray
    flat: np.ndarray
    items: np.ndarray
    computed: np.ndarray
    late: np.ndarray


class _Step(NamedTuple):
    """Tickets of some heads at one place.

    spot     int64 [H * lists]: the turns that they read and write, in ``lanes`` of each
    whole    whether these are all heads of the section
    total, early   as in ``Clock.sums``, [.., lists or 1, 1]
    landings       [H, 1, 1]: a reduction for each visit before
    visits, last   int64 [lists]: how many visits, and where the last is in ``spot``
    hollow   bool [lists, 1]: lists without visits; None if there are none
    """

    spot: np.ndarray
    lanes: slice
    whole: bool
    views: _Views
    total: np.ndarray
    early: np.ndarray
    landings: np.ndarray
    visits: np.ndarray
    last: np.ndarray
    hollow: np.ndarray | None


class _Board:
    """State of one section: when each row's next writer may begin, and the buffers of a step.

    turns    [(rows + 1) * lists, heads], or one lane where each head has lists of its own; the
             last row takes what the padding writes
    spots    int64 [N, L, lists]: which of ``turns`` a visit reads and writes
    heights  of each place, no less than the most visits
    sums     ``Clock.sums`` for [N, L, lists], or for [L, 1] where all visits cost the same
    """

    def __init__(self, lists: Programs, heads: int, clock: Clock, ordered: bool):
        places, length, count = lists.row.shape
        self.lists, self.machine, self.dtype = lists, clock.machine, clock.free.dtype
        self.heads, self.candidates, self.ordered = heads, len(clock.free), ordered
        self.shared = count == self.candidates
        lanes = heads if self.shared else 1
        self.turns = np.empty(((lists.num_rows + 1) * count, lanes), self.dtype)
        self.items = _items(self.turns)
        self.each = np.arange(count)
        # In C order, so that steps hold views.
        self.spots = np.empty(lists.row.shape, np.int64)
        self.last, self.hollow = _last(lists.visits), (lists.visits == 0).any(axis=1).tolist()
        self.soonest = lists.cost[:, 0] + self.dtype.type(clock.begin)
        step = max(_ROUND, length // 16)
        most = -(-lists.visits.max(axis=1, initial=1) // step) * step
        self.heights = np.minimum(most, length).tolist()
        self.steady = lists.uniform is not None
        cost = np.full((length, 1), lists.uniform, self.dtype) if self.steady else lists.cost
        self.sums = clock.sums(cost)
        self.buffers = np.empty((3, length * count * lanes), self.dtype)
        self.landings = (np.arange(length) * clock.reduce).astype(self.dtype)[:, None, None]
        self.views: dict[tuple[int, int, int], _Views] = {}
        self.steps: list[_Step | None] = [None] * places

    def fits(self, lists: Programs, heads: int, clock: Clock, ordered: bool) -> bool:
        own_shape = (self.heads, self.candidates, self.ordered)
        return self.lists is lists and own_shape == (heads, len(clock.free), ordered)

    def begin(self) -> None:
        """Reset: every row's first writer may begin, and visits are in the order of the lists."""
        self.turns.fill(0)
        np.multiply(self.lists.row, len(self.each), out=self.spots)
        self.spots += self.each

    def step(self, place: int, low: int, high: int) -> _Step:
        """Return the tickets of heads low to high, cached for all heads."""
        all_heads = high - low == self.heads
        if all_heads and self.steps[place] is not None:
            return self.steps[place]
        spot, visits = self.spots[place, : self.heights[place]], self.lists.visits[place]
        last, lanes = self.last[place], slice(low, high)
        lists = slice(None)
        if not self.shared:
            lists, lanes = slice(low * self.candidates, high * self.candidates), slice(0, 1)
        if not (all_heads or self.shared):
            spot, visits = spot[:, lists], visits[lists]
            last = _last(visits)
        shape = (*spot.shape, lanes.stop - lanes.start)
        if shape not in self.views:
            size = shape[0] * shape[1] * shape[2]
            turn, computed, late = (buffer[:size].reshape(shape) for buffer in self.buffers)
            flat = turn.reshape(-1, shape[2])
            self.views[shape] = _Views(turn, flat, _items(flat), computed, late)
        total, early = self.sums
        if not self.steady:
            total, early = total[place, :, lists], early[place, :, lists]
        later = max(0, shape[0] - self.machine.dq_stages)
        step = _Step(
            spot.reshape(-1),
            lanes,
            all_heads,
            self.views[shape],
            total[: shape[0], :, None],
            early[:later, :, None],
            self.landings[: shape[0]],
            visits,
            last,
            visits[:, None] == 0 if self.hollow[place] else None,
        )
        if all_heads:
            self.steps[place] = step
        return step


def _items(rows: np.ndarray) -> np.ndarray:
    """View rows as single items, which NumPy scatters faster."""
    return rows.view(f"V{rows.itemsize * rows.shape[1]}")[:, 0]


def _last(visits: np.ndarray) -> np.ndarray:
    """Return the index in [H * lists] of the last visit of each, of visits [.., lists]."""
    lists = visits.shape[-1]
    return np.maximum(visits - 1, 0) * lists + np.arange(lists)


def _in_step(begin: np.ndarray, end: np.ndarray, takes_time: np.ndarray | None) -> int:
    """Count the leading lanes of [K, lanes] that begin before any lane to their left ends.

    takes_time: bool [K], False where tickets take no time at all and so change nothing.
    """
    late = np.minimum.accumulate(end, axis=1)[:, :-1] <= begin[:, 1:]
    if takes_time is not None:
        late &= takes_time[:, None]
    late = late.any(axis=0)
    return int(late.argmax()) + 1 if late.any() else end.shape[1]


class Tape:
    """Record of one candidate, ticket by ticket in launch order, in ticks."""

    def __init__(self, slots: int):
        self.slot_at = np.arange(slots)
        self.slot, self.start, self.end, self.computed, self.landed = [], [], [], [], []

    def read(self, turn: np.ndarray) -> None:
        """Record the turns that the next tickets wait for."""

    def write(self, clock: Clock, begin, end, times, visits, lanes: int) -> None:
        begin, end, slot = begin[0, :lanes], end[0, :lanes], self.slot_at[:lanes]
        count = np.broadcast_to(visits, end.shape if len(visits) == 1 else visits.shape)[:lanes]
        if clock.fixed == 0 and len(visits) == 1 and visits[0] == 0:
            begin, end, slot = (np.repeat(a[:1], lanes) for a in (begin, end, slot))
        for name, values in (("start", begin), ("end", end), ("slot", slot)):
            getattr(self, name).append(values.copy())
        valid = np.arange(len(times[0])) < count[:, None]
        computed, passed = (time.reshape(len(time), -1)[:, :lanes].T for time in times)
        self.computed.append(computed[valid])
        self.landed.append(passed[valid] - clock.handoff)

    def sort(self, clock: Clock) -> None:
        order = np.lexsort((self.slot_at, clock.free[0]))
        clock.free, self.slot_at = clock.free[:, order], self.slot_at[order]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return int64 arrays: slot, start, end [T]; computed, landed [visits]."""
        names = ("slot", "start", "end", "computed", "landed")
        return {
            name: np.concatenate([*getattr(self, name), np.zeros(0)]).astype(np.int64)
            for name in names
        }
