"""Candidate schedules: plans, and their times by the model.

A ``Plan`` is a launch order and the visits of each column, for each distinct mask; ranks follow the
launch.  A ``Case`` times plans over all heads, section by section, several plans side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ..order.kinds import Entries, assemble, by_length, even, launch
from ..order.ranks import BlockGrid, ranks
from ..order.schedule import Schedule
from .lockstep import Clock
from .machines import Machine
from .programs import Programs, programs, time_dtype
from .traffic import Gaps, memory_ns

# Visits of all plans timed side by side; bounds the memory.
_BATCH = 1 << 22
# Number of plans that continue after the first section.
_CONTINUED = 3
# Tickets of each slot whose visits are used to estimate the tiles that leave L2.
_L2_TICKETS = 4


@dataclass(frozen=True, eq=False)
class Plan:
    """Plan: columns in launch order, int64 [G, N], and the walk of their visits."""

    kind: str
    walk: str
    order: np.ndarray
    entries: Entries

    @cached_property
    def rows(self) -> np.ndarray:
        """Visits by column, int32 [G, N, L]; -1 past the end."""
        return self.rows_of(np.arange(len(self.order)))

    def rows_of(self, masks: np.ndarray) -> np.ndarray:
        """Return the visits by column under some masks, int32 [masks, N, L]."""
        if "rows" in self.__dict__:
            return self.rows[masks]
        entries, place = self.entries.pick(masks), None
        if self.walk == "by_rank":
            blocks, order = (torch.from_numpy(x) for x in (entries.blocks, self.order[masks]))
            place = ranks(blocks, order).numpy()
        return entries.visits(self.walk, place)

    def equals(self, other: Plan) -> bool:
        """Return whether both are the same order of work."""
        masks = np.arange(len(self.order))[:, None]
        return np.array_equal(self.order, other.order) and all(
            np.array_equal(self.rows_of(mask), other.rows_of(mask)) for mask in masks
        )


def named_plans(grid: BlockGrid, walk_names: tuple[str, ...], shortest: bool = False) -> list[Plan]:
    """Return the plans right to left, left to right, longest first and, if ``shortest``, shortest
    first, each with the walks ``walk_names``, without repeats."""
    masks, columns = len(grid.blocks), grid.num_kv_blocks
    ascending = np.broadcast_to(np.arange(columns), (masks, columns))
    orders = {"spt": ascending[:, ::-1], "left_to_right": ascending, "lpt": by_length(grid, True)}
    orders |= {"shortest_first": by_length(grid, False)} if shortest else {}
    entries, plans = Entries.of(grid.host), []
    for walk in walk_names:
        for kind, order in orders.items():
            plan = Plan(kind, walk, np.ascontiguousarray(order), entries)
            if not any(plan.equals(earlier) for earlier in plans):
                plans.append(plan)
    return plans


@dataclass
class Race:
    """Plans timed side by side: times and slots' time spent in ns, by plan; None if given up.

    marks[i][plan]: when each slot is free before section i, in ticks.
    """

    times: dict[int, int | None]
    spent: dict[int, int]
    marks: list[dict[int, np.ndarray]]

    def join(self, other: Race) -> None:
        self.times |= other.times
        self.spent |= other.spent
        for mine, theirs in zip(self.marks, other.marks, strict=True):
            mine |= theirs


class Lists:
    """Programs of K candidates: of one mask all at once, of several those of a section."""

    def __init__(self, case: Case, plans: list[Plan]):
        self.case, self.plans = case, plans
        self.whole, self.last = None, (None, None)
        if len(case.grid.blocks) == 1:
            self.whole = case.planned(plans, np.arange(len(plans)), np.zeros(1, np.int64))

    def of(self, which: np.ndarray, start: int, size: int) -> Programs:
        """Return the lists of the heads start..start + size under the candidates ``which``: one
        for each if the heads share a mask, else for each of the heads, head first."""
        if self.whole is not None:
            return self.whole.pick(which)
        masks = self.case.grid.mask_of[start : start + size]
        if (masks == masks[0]).all():
            masks = masks[:1]
        key = which.tobytes(), masks.tobytes()
        if self.last[0] != key:
            self.last = key, self.case.planned(self.plans, which, masks)
        return self.last[1]


@dataclass(frozen=True, eq=False)
class Case:
    """One launch: a mask, a machine with costs per tile, and ``flight`` heads interleaved.

    tiles: query tiles of a block; group: query heads to a ticket.
    cached: the plans whose lists were asked for last, and those.
    """

    grid: BlockGrid
    machine: Machine
    tiles: int
    flight: int
    group: int = 1
    cached: list = field(default_factory=lambda: [[], None])

    @cached_property
    def sections(self) -> list[int]:
        return even(self.grid.heads, self.flight)

    @cached_property
    def alone_ns(self) -> np.ndarray:
        """Time of all tickets of each head without waits, one after another, int64 [heads]."""
        machine, count = self.machine, self.entries.count
        partial_count = np.count_nonzero(self.by_column == 1, axis=2)
        busy = partial_count * machine.partial_ns + (count - partial_count) * machine.full_ns
        busy *= self.tiles * self.group
        busy += np.where(busy > 0, machine.reduce_ns, 0)
        busy += machine.tile_start_ns + machine.tile_end_ns
        return busy.sum(axis=1)[self.grid.mask_of]

    @property
    def steps(self) -> int:
        """Number of visits of one block: its tiles, for each query head."""
        return self.tiles * self.group

    @cached_property
    def dtype(self) -> type:
        """Type of times."""
        count = self.entries.count
        length = int(count.max(initial=0)) * self.steps
        return time_dtype(count.shape[1], length, self.machine, self.grid.heads)

    @cached_property
    def by_column(self) -> np.ndarray:
        """Blocks of each column, uint8 [G, N, M]."""
        return np.ascontiguousarray(self.grid.host.transpose(0, 2, 1))

    @cached_property
    def entries(self) -> Entries:
        return Entries.of(self.grid.host)

    def rows_touched(self, flight: int) -> float:
        """Query rows of all heads that ``slots`` tickets touch with ``flight`` heads in flight: the
        average over a launch, of columns side by side or by length, whichever is more."""
        columns = self.by_column.shape[1]
        width = max(1, -(-self.machine.slots // flight))
        present, most = self.by_column != 0, 0
        shortest_first = by_length(self.grid, longest_first=False)
        for columns_of in (present, np.take_along_axis(present, shortest_first[..., None], 1)):
            parts = (columns_of[:, first : first + width] for first in range(0, columns, width))
            blocks = sum(np.count_nonzero(part.any(axis=1)) for part in parts)
            most = max(most, blocks)
        launches = max(1, len(present) * -(-columns // width))
        height = (self.grid.block_size or self.machine.tile)[0]
        return most / launches * height * flight

    def plan_lists(self, plans: list[Plan]) -> Lists:
        """Return the lists of ``plans``; those asked for last are cached."""
        if self.cached[0] != plans:
            self.cached[:] = [plans, Lists(self, plans)]
        return self.cached[1]

    def planned(self, plans: list[Plan], which: np.ndarray, masks: np.ndarray) -> Programs:
        """Return the programs of plans ``which`` under each of ``masks``, mask first."""
        rows, full, of_walk, each = [], [], {}, np.arange(len(masks))[:, None]
        for plan in (plans[index] for index in which):
            walk = id(plan.entries), plan.walk, plan.kind if plan.walk == "by_rank" else ""
            if walk not in of_walk:
                by_column = plan.rows_of(masks)
                of_walk[walk] = by_column, self._full(by_column, masks)
            for part, by_column in zip((rows, full), of_walk[walk], strict=True):
                part.append(by_column[each, plan.order[masks]])
        shape = (len(masks) * len(which), *rows[0].shape[1:])
        rows, full = (np.stack(part, 1).reshape(shape) for part in (rows, full))
        size = (self.grid.num_q_blocks, self.machine, self.tiles, self.dtype, self.group)
        return programs(rows, full, *size)

    def _full(self, rows: np.ndarray, masks: np.ndarray) -> np.ndarray:
        """Return whether visits are of full blocks: bool like rows [masks, N, L]."""
        any_full, any_partial = ((self.by_column == kind).any() for kind in (2, 1))
        if not (rows.size and any_full and any_partial):
            return np.full(rows.shape, any_full)
        return np.take_along_axis(self.by_column[masks], np.maximum(rows, 0), 2) == 2

    def at_once(self) -> int:
        """Number of plans that are timed side by side."""
        count = self.entries.count
        visits = count.size * int(count.max(initial=0)) * self.steps
        return max(1, _BATCH // max(1, visits))

    def after_first(self, plans: list[Plan]) -> Clock:
        """Return the plans' clock after the first section."""
        clock = Clock(self.machine, len(plans), self.dtype)
        size = self.sections[0]
        clock.section(self.plan_lists(plans).of(np.arange(len(plans)), 0, size), size)
        return clock

    def outrun(self, plans: list[Plan], limit_ns: int, clock: Clock) -> bool:
        """Return whether the slots' work and waits under each plan, before the last section and
        without waits in the rest, take ``limit_ns`` or more of every slot.

        clock: from ``after_first``; it goes on.
        """
        lists, alive = self.plan_lists(plans), np.arange(len(plans))
        start, remaining_ns = 0, self.alone_ns
        for size in self.sections[:-1]:
            if start:
                clock.section(lists.of(alive, start, size), size)
            start += size
            least_ns = clock.spent_ns() + int(remaining_ns[start:].sum())
            going = -(-least_ns // self.machine.slots) < limit_ns
            if not going.all():
                alive = alive[going]
                clock.keep(going)
            if not len(alive):
                return True
        return False

    def race(self, plans: list[Plan], best_ns: int | None = None, start: int = 0) -> Race:
        """Time plans[start:] over all heads, side by side.

        One that cannot beat ``best_ns`` any more is given up.  Of three or more sections, the
        first shows which ``_CONTINUED`` plans go on.
        """
        step = self.at_once()
        race = Race({}, {}, [{} for _ in self.sections])
        for first in range(start, len(plans), step):
            part = list(range(first, min(len(plans), first + step)))
            race.join(self._race(plans, np.array(part), best_ns))
            times = [race.times[plan] for plan in part if race.times[plan] is not None]
            best_ns = min([*times, best_ns] if best_ns is not None else times, default=None)
        return race

    def _race(self, plans: list[Plan], candidates: np.ndarray, best_ns: int | None) -> Race:
        lists = self.plan_lists([plans[plan] for plan in candidates])
        clock = Clock(self.machine, len(candidates), self.dtype)
        race = Race(dict.fromkeys(candidates.tolist()), {}, [])
        alive, start, remaining_ns = np.arange(len(candidates)), 0, int(self.alone_ns.sum())
        for index, size in enumerate(self.sections):
            race.marks.append(dict(zip(candidates[alive].tolist(), clock.free.copy(), strict=True)))
            clock.section(lists.of(alive, start, size), size)
            remaining_ns -= int(self.alone_ns[start : start + size].sum())
            start += size
            sure = -(-(clock.spent_ns() + remaining_ns) // self.machine.slots)
            sure = np.maximum(sure, clock.makespan_ns())
            alive_mask = sure < best_ns if best_ns is not None else np.ones(len(alive), bool)
            if index == 0 and len(self.sections) > 2:
                alive_mask &= np.isin(
                    np.arange(len(alive)), np.argsort(sure, kind="stable")[:_CONTINUED]
                )
            if not alive_mask.all():
                alive = alive[alive_mask]
                clock.keep(alive_mask)
            if not len(alive):
                race.marks += [{} for _ in self.sections[index + 1 :]]
                return race
        names = candidates[alive].tolist()
        race.times |= zip(names, clock.makespan_ns().tolist(), strict=True)
        race.spent |= zip(names, clock.spent_ns().tolist(), strict=True)
        return race

    def memory_ns(self, plans: list[Plan], plan: int, makespan_ns: int) -> int:
        """Return the time that tiles which leave L2 between their writers add to plans[plan]."""
        lists, gaps, plan_index = self.plan_lists(plans), Gaps(), np.array([plan])
        clock, start = Clock(self.machine, 1, self.dtype, gaps), 0
        for size in self.sections:
            clock.section(lists.of(plan_index, start, size), size)
            start += size
            if start * self.grid.num_kv_blocks >= _L2_TICKETS * self.machine.slots:
                break
        ticks = clock.spent_ns()[0] / clock.tick / self.machine.slots
        visits = int(np.count_nonzero(self.grid.host, axis=(1, 2))[self.grid.mask_of].sum())
        fetched = gaps.fetched(self.machine.l2_tiles, ticks) * visits * self.steps
        return memory_ns(self.machine, round(fetched), makespan_ns)

    def finish(
        self,
        plans: list[Plan],
        base: int,
        mark: np.ndarray,
        heads_left: int,
        tail: int,
        tails: np.ndarray,
    ) -> np.ndarray:
        """Return makespans, int64 [tails], of the last ``heads_left`` heads, with slots free at
        ``mark``: all but ``tail`` of them under plan ``base``, then those under each of the plans
        ``tails``."""
        lists = self.plan_lists(plans)
        clock = Clock(self.machine, 1, self.dtype)
        clock.free[:] = mark
        start, size = self.grid.heads - heads_left, heads_left - tail
        if size > 0:
            clock.section(lists.of(np.array([base]), start, size), size)
        clock.keep(np.zeros(len(tails), np.int64))
        clock.section(lists.of(tails, self.grid.heads - tail, tail), tail)
        return clock.makespan_ns()

    def by_turns(
        self, plans: list[Plan], ahead_ns: int | None = None
    ) -> tuple[int, int, list[np.ndarray]] | None:
        """Time the launch orders of plans with ascending visits, visited as their turns come.

        ``(plan, makespan, visits)`` of the one that has spent least after a section; None if
        that is no less than ``ahead_ns``.  visits: int32 [N, L] by column, of each head.
        """
        lists, clock = Lists(self, plans), Clock(self.machine, len(plans), self.dtype)
        alive, start, heads = np.arange(len(plans)), 0, []
        for size in self.sections:
            visited = clock.section(lists.of(alive, start, size), size, True)
            if len(alive) > 1:
                ends = clock.makespan_ns() if len(self.sections) == 1 else clock.spent_ns()
                best = int(ends.argmin())
                if ahead_ns is not None and clock.spent_ns()[best] >= ahead_ns:
                    return None
                visited = visited[:, :, best :: len(alive)]
                alive = alive[[best]]
                clock.keep(np.array([best]))
            visited = np.where(visited == self.grid.num_q_blocks, -1, visited).astype(np.int32)
            masks = self.grid.mask_of[start : start + visited.shape[2]]
            # Where a column is in launch order.
            place = np.argsort(plans[alive[0]].order[masks], axis=1)
            visits = [visited[each, :, index] for index, each in enumerate(place)]
            heads += visits if len(visits) == size else visits * size
            start += size
        return int(alive[0]), int(clock.makespan_ns()[0]), heads


def compose(
    case: Case, sections: list[int], orders: list[np.ndarray], rows: list[np.ndarray], name: str
) -> Schedule:
    """Build a schedule of each head's launch order [N] and visits [N, L], sharing equal lists."""
    grid = case.grid
    objects, sets, set_of_head = {}, {}, []
    shape = grid.num_kv_blocks, max(visited.shape[1] for visited in rows)
    for mask, order, visited in zip(grid.mask_of.tolist(), orders, rows, strict=True):
        thing = (mask, order.tobytes(), id(visited))
        if thing not in objects:
            padded = np.full(shape, -1, np.int32)
            padded[:, : visited.shape[1]] = visited
            key = (mask, order.tobytes(), padded.tobytes())
            objects[thing] = sets.setdefault(key, (len(sets), mask, order, padded))[0]
        set_of_head.append(objects[thing])
    masks = [entry[1] for entry in sets.values()]
    masks = torch.tensor(masks, dtype=torch.int64, device=grid.blocks.device)
    launch_orders = np.stack([entry[2] for entry in sets.values()])
    blocks = grid.blocks.index_select(0, masks)
    return assemble(
        blocks.cpu().numpy(),
        np.stack([entry[3] for entry in sets.values()]),
        ranks(blocks, torch.from_numpy(launch_orders)).cpu().numpy(),
        launch(np.stack(orders), sections),
        np.array(set_of_head),
        block_size=grid.block_size,
        heads_in_flight=case.flight,
        name=name,
    )
