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

from dataclasses import dataclass

import numpy as np

from .machines import Machine

# Arrays with fewer lanes than this use NumPy's running maximum; wider ones a doubling scan.
_LANES = 48
_NEVER = np.int64(1) << 62
# Parts of a tick in which visits are put off when they are ordered by their turns.
SCALE = np.int64(1024)


def exact_for(machine: Machine) -> bool:
    """Whether the solved form above holds for this machine."""
    return machine.dq_stages == 1 or machine.reduce_ns <= min(machine.full_ns, machine.partial_ns)


@dataclass(frozen=True)
class Programs:
    """X lists of tickets, each N places long, in ticks; L visits with at least one of padding.

    row        int64 [N, L, X]   rows in visiting order, ``num_rows`` in the padding
    cost       [N, L, X]         c_i, 0 in the padding
    total      [N, L, X]         C_i above, tile_start included
    early      [N, L, X]         r - C_{j+s}, what turn_j is moved by; harmless in the padding
    visits     int64 [N, X]      how many are not padding
    num_rows   M * tiles
    tiles      visits that stay together: the query tiles of one block
    """

    row: np.ndarray
    cost: np.ndarray
    total: np.ndarray
    early: np.ndarray
    visits: np.ndarray
    num_rows: int
    tiles: int

    def pick(self, which: np.ndarray) -> Programs:
        """The programs ``which`` [X'], in that order."""
        parts = (self.row, self.cost, self.total, self.early)
        parts = (part[:, :, which] for part in parts)
        return Programs(*parts, self.visits[:, which], self.num_rows, self.tiles)

    def relaunch(self, order: np.ndarray, source: np.ndarray) -> Programs:
        """From programs by column: the launch orders [X', N] of the programs ``source`` [X']."""
        parts = (self.row, self.cost, self.total, self.early)
        parts = (part[order.T, :, source].transpose(0, 2, 1) for part in parts)
        return Programs(*parts, self.visits[order.T, source], self.num_rows, self.tiles)


def programs(
    rows: np.ndarray, full: np.ndarray, num_rows: int, machine: Machine, tiles: int, heads: int
) -> Programs:
    """``Programs`` from rows int [X, N, L] in launch and visiting order (-1 past the end) and
    full bool [X, N, L], for a launch of ``heads`` heads.  ``tiles``: query tiles per block, visited
    upwards one by one."""
    if tiles > 1:
        steps = np.arange(tiles)
        rows = np.where(rows[..., None] < 0, -1, rows[..., None] * tiles + steps)
        rows = rows.reshape(*rows.shape[:2], -1)
        full, num_rows = np.repeat(full, tiles, axis=2), num_rows * tiles
    room = ((0, 0), (0, 0), (0, 1))
    rows = np.pad(rows, room, constant_values=-1).transpose(1, 2, 0)
    full = np.pad(full, room).transpose(1, 2, 0)
    real = rows >= 0
    tick = machine.tick()
    cost = np.where(full, machine.full_ns // tick, machine.partial_ns // tick)
    cost = np.where(real, cost, 0).astype(_dtype(rows.shape, machine, heads))
    visits = real.sum(1)
    row = np.where(real, rows, num_rows).astype(np.int64)
    return Programs(row, cost, *_sums(cost, visits, machine), visits, num_rows, tiles)


def _sums(cost: np.ndarray, visits: np.ndarray, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    """``(total, early)`` of costs [.., L, X] with visits [.., X]."""
    length, tick = cost.shape[-2], machine.tick()
    reduce = machine.reduce_ns // tick
    place = np.arange(length)[:, None]
    step = cost.copy()
    if machine.dq_stages == 1:
        later = (place > 0) & (place < visits[..., None, :])
        np.maximum(step, reduce, out=step, where=later)
    # The first padding is the last visit's reduction, so that the last one tells the end.
    step[(place == visits[..., None, :]) & (place > 0)] = reduce
    total = np.cumsum(step, axis=-2, dtype=cost.dtype) + cost.dtype.type(
        machine.tile_start_ns // tick
    )
    ahead = np.minimum(np.arange(length) + machine.dq_stages, length - 1)
    return total, np.minimum(reduce - total[..., ahead, :], 0).astype(cost.dtype)


def _dtype(shape: tuple[int, ...], machine: Machine, heads: int):
    """int32 if even every visit of the launch after the other fits."""
    step = machine.full_ns + machine.partial_ns + machine.reduce_ns + machine.handoff_ns
    fixed = machine.tile_start_ns + machine.tile_end_ns
    worst = heads * shape[0] * (shape[1] * step + fixed) // machine.tick()
    return np.int32 if worst < 2**31 else np.int64


class Clock:
    """K candidates side by side: when each of their slots is free, in ticks."""

    def __init__(self, machine: Machine, candidates: int, dtype, tape: Tape | None = None):
        self.machine = machine
        self.tick = tick = machine.tick()
        self.reduce = machine.reduce_ns // tick
        self.handoff = machine.handoff_ns // tick
        self.end = machine.tile_end_ns // tick
        self.instant = machine.tile_start_ns + machine.tile_end_ns == 0
        self.tape = tape
        self.free = np.zeros((candidates, machine.slots), dtype)

    def keep(self, which: np.ndarray) -> None:
        """Only the candidates ``which`` from here on (repeats allowed)."""
        self.free = self.free[which]

    def makespan_ns(self) -> np.ndarray:
        """int64 [K]: when each candidate's last slot is free."""
        return self.free.max(axis=1).astype(np.int64) * self.tick

    def spent_ns(self) -> np.ndarray:
        """int64 [K]: the slots' times so far, waits included, summed."""
        return self.free.sum(axis=1, dtype=np.int64) * self.tick

    def section(
        self, lists: Programs, heads: int, delay: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Times one section: place after place, ``heads`` tickets each.

        lists: [K] programs if the section's heads share a mask, else [heads * K], head first.
        delay: int64, broadcasts to [N, blocks, lists]; then each list's blocks are visited in the
        order in which their turns come (for its first head), block by block as if ``delay`` /
        ``SCALE`` ticks later; those whose turn has come in the order of the list.  Returns the
        rows in visiting order, int64 [N, L, lists], ``num_rows`` past the end; or None.
        """
        count = lists.row.shape[2]
        shared = count == len(self.free)
        # When a row's next writer may begin; one more row takes what the padding writes.
        turns = np.zeros(((lists.num_rows + 1) * count, heads if shared else 1), self.free.dtype)
        if delay is not None:
            first = lists.row[:, : -1 : lists.tiles]
            delay = np.where(first == lists.num_rows, _NEVER, delay)
        spots = lists.row * count + np.arange(count)
        totals, earlies = lists.total[..., None], lists.early[..., None]
        for place in range(len(spots)):
            spot, total, early = spots[place], totals[place], earlies[place]
            if delay is not None:
                spot, total, early = self._by_turn(lists, place, spot, turns, delay[place])
                spots[place] = spot
            what, low = (spot, total, early, lists.visits[place]), 0
            while low < heads:
                lanes = slice(low, min(heads, low + self.free.shape[1]))
                if shared:
                    low += self._tickets(what, turns, lanes)
                else:
                    low += self._tickets_apart(what, turns, lanes)
        return None if delay is None else spots // count

    def _tickets(self, what, turns, lanes: slice) -> int:
        """Times the tickets of heads ``lanes``, which share a mask; returns how many held.

        Those before the first that would end before a later one begins: that frees a slot.
        """
        spot, total, early, visits = what
        width, whole = lanes.stop - lanes.start, lanes.stop - lanes.start == turns.shape[1]
        begin, spot = self.free[:, :width], spot.reshape(-1)
        seen = turns if whole else turns[:, lanes]
        turn = seen.take(spot, axis=0).reshape(*what[0].shape, width)
        computed, passed, end = self._visits(total, early, visits, turn, begin)
        kept = width
        if (begin[:, 0] + (total[-1, :, 0] + self.end) <= begin[:, -1]).any():
            kept = _in_step(begin, end, visits > 0 if self.instant else None)
        if self.tape is not None:
            self.tape.write(self, begin, end, (computed, passed), visits, kept)
        passed = passed.reshape(len(spot), width)
        if whole and kept == width:
            turns[spot] = passed
        else:
            turns[spot, lanes.start : lanes.start + kept] = passed[:, :kept]
        self._done(turns, what[0].shape[1], end, kept)
        return kept

    def _tickets_apart(self, what, turns, lanes: slice) -> int:
        """As ``_tickets``, where each head has lists of its own."""
        candidates, width = len(self.free), lanes.stop - lanes.start
        lists = slice(lanes.start * candidates, lanes.stop * candidates)
        spot, total, early = (part[:, lists] for part in what[:3])
        begin, visits = self.free[:, :width], what[3][lists]
        turn = turns.take(spot, axis=0)
        computed, passed, end = self._visits(total, early, visits, turn, begin.T.reshape(-1, 1))
        end = end.reshape(width, candidates).T
        kept = _in_step(begin, end, None)
        if self.tape is not None:
            self.tape.write(self, begin, end, (computed, passed), visits, kept)
        held = kept * candidates
        turns[spot[:, :held]] = passed[:, :held]
        self._done(turns, what[0].shape[1], end, kept)
        return kept

    def _done(self, turns, count: int, end, kept: int) -> None:
        turns[-count:] = 0
        self.free[:, :kept] = end[:, :kept]
        if self.tape is None:
            self.free.sort(axis=1)
        else:
            self.tape.sort(self)

    def _visits(self, total, early, visits, turn, start) -> tuple[np.ndarray, ...]:
        """``(computed, passed, end)`` of a ticket per lane, solved as above; total and early are
        [L, J, 1], turn and the results [L, J, lanes].  passed: landed, and the handoff."""
        stages = self.machine.dq_stages
        waited = _running_max(turn + early)
        computed = np.empty_like(turn)
        computed[:stages] = start
        np.maximum(start, waited[:-stages], out=computed[stages:])
        computed += total
        if stages == 1:
            passed = np.maximum(computed, turn, out=waited)
            passed += self.reduce + self.handoff
            return computed, passed, computed[-1] + self.end
        place = np.arange(len(turn))[:, None]
        earlier = (np.minimum(place, visits) * self.reduce).astype(turn.dtype)[:, :, None]
        passed = np.maximum(computed, _running_max(turn - earlier) + earlier)
        passed += np.where(place < visits, self.reduce, 0).astype(turn.dtype)[:, :, None]
        passed += self.handoff
        return computed, passed, passed[-1] + (self.end - self.handoff)

    def _by_turn(self, lists, place, spot, turns, delay) -> tuple[np.ndarray, ...]:
        """Spots [L, J] in the order in which their turns come, and their total and early."""
        tiles, candidates, count = lists.tiles, len(self.free), spot.shape[1]
        each = np.arange(count)
        start = self.free[each % candidates, np.minimum(each // candidates, self.free.shape[1] - 1)]
        turn = np.maximum(turns[:, 0].take(spot[:-1]), start + lists.total[place, 0])
        if tiles > 1:
            turn = turn.reshape(-1, tiles, count).max(axis=1)
        order = np.argsort(turn * SCALE + delay, axis=0, kind="stable")
        if tiles > 1:
            order = (order[:, None] * tiles + np.arange(tiles)[:, None]).reshape(-1, count)
        order = order * count + each
        end = spot[-1:]
        spot = np.concatenate((spot[:-1].reshape(-1).take(order), end))
        if self.machine.full_ns == self.machine.partial_ns:
            return spot, lists.total[place, ..., None], lists.early[place, ..., None]
        cost = lists.cost[place]
        cost = np.concatenate((cost[:-1].reshape(-1).take(order), cost[-1:]))
        total, early = _sums(cost, lists.visits[place], self.machine)
        return spot, total[..., None], early[..., None]


def _in_step(begin: np.ndarray, end: np.ndarray, taken: np.ndarray | None) -> int:
    """How many lanes of [K, lanes], in order, begin before any lane to their left ends.

    taken: bool [K], False where tickets take no time at all and so change nothing.
    """
    late = np.minimum.accumulate(end, axis=1)[:, :-1] <= begin[:, 1:]
    if taken is not None:
        late &= taken[:, None]
    late = late.any(axis=0)
    return int(late.argmax()) + 1 if late.any() else end.shape[1]


class Tape:
    """What one candidate did, ticket by ticket in launch order, in ticks."""

    def __init__(self, slots: int):
        self.slot_at = np.arange(slots)
        self.slot, self.start, self.end, self.computed, self.landed = [], [], [], [], []

    def write(self, clock: Clock, begin, end, times, visits, kept: int) -> None:
        begin, end, slot = begin[0, :kept], end[0, :kept], self.slot_at[:kept]
        count = np.broadcast_to(visits, end.shape if len(visits) == 1 else visits.shape)[:kept]
        if clock.instant and len(visits) == 1 and visits[0] == 0:
            begin, end, slot = (np.repeat(a[:1], kept) for a in (begin, end, slot))
        for name, values in (("start", begin), ("end", end), ("slot", slot)):
            getattr(self, name).append(values.copy())
        done = np.arange(len(times[0])) < count[:, None]
        computed, passed = (time.reshape(len(time), -1)[:, :kept].T for time in times)
        self.computed.append(computed[done])
        self.landed.append(passed[done] - clock.handoff)

    def sort(self, clock: Clock) -> None:
        order = np.lexsort((self.slot_at, clock.free[0]))
        clock.free, self.slot_at = clock.free[:, order], self.slot_at[order]

    def arrays(self) -> dict[str, np.ndarray]:
        """int64 [T] slot, start, end; [visits] computed, landed."""
        names = ("slot", "start", "end", "computed", "landed")
        return {
            name: np.concatenate([*getattr(self, name), np.zeros(0)]).astype(np.int64)
            for name in names
        }


def _running_max(values: np.ndarray) -> np.ndarray:
    """The running maximum along axis 0; ``values`` may be overwritten."""
    height = len(values)
    if values[0].size < _LANES:
        return np.maximum.accumulate(values, axis=0, out=values)
    step, spare = 1, np.empty_like(values)
    while step < height:
        np.maximum(values[step:], values[:-step], out=spare[step:])
        spare[:step] = values[:step]
        values, spare = spare, values
        step *= 2
    return values
