"""Candidate schedules: plans, and their times by the model.

A ``Plan`` is a launch order and the visits of each column, for each distinct mask; ranks follow the
launch.  A ``Case`` times plans over all heads, section by section, several plans side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ..order.kinds import assemble, even, fewest_first, launch, longest_first, visits
from ..order.ranks import BlockGrid, ranks
from ..order.schedule import Schedule
from .lockstep import Clock, Programs, programs
from .machines import Machine
from .traffic import Gaps, memory_ns

# Visits of all plans timed side by side; bounds the memory.
_BATCH = 1 << 22
# Number of plans that continue after the first section.
_CONTINUED = 3
# Tickets of each slot whose visits are used to estimate the tiles that leave L2.
_L2_TICKETS = 4


@dataclass(frozen=True, eq=False)
class Plan:
    """Plan: columns in launch order, int64 [G, N], and visits by column, rows int32 [G, N, L]."""

    kind: str
    walk: str
    order: np.ndarray
    rows: np.ndarray


def named_plans(grid: BlockGrid, walk_names: tuple[str, ...], shortest: bool = False) -> list[Plan]:
    """Return the plans right to left, left to right, longest first and, if ``shortest``, shortest
    first, each with the walks ``walk_names``, without repeats."""
    masks, columns = len(grid.blocks), grid.num_kv_blocks
    ascending = np.broadcast_to(np.arange(columns), (masks, columns))
    orders = {"spt": ascending[:, ::-1], "left_to_right": ascending, "lpt": longest_first(grid)}
    orders |= {"shortest_first": fewest_first(grid)} if shortest else {}
    blocks = grid.host
    walks = {walk: visits(blocks, walk, blocks) for walk in ("ascending", "descending")}
    plans, seen_orders = [], set()
    for walk in walk_names:
        for kind, order in orders.items():
            if walk == "by_rank":
                rank_table = ranks(grid.blocks, torch.from_numpy(order.copy())).cpu().numpy()
                rows = visits(blocks, walk, rank_table)
            else:
                rows = walks[walk]
            key = (order.tobytes(), rows.tobytes())
            if key not in seen_orders:
                seen_orders.add(key)
                plans.append(Plan(kind, walk, order, rows))
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


@dataclass(frozen=True, eq=False)
class Case:
    """One launch: a mask, a machine with costs per tile, and ``flight`` heads interleaved.

    tiles: query tiles of a block; group: query heads to a ticket.
    table: the plans whose programs were asked for last, and those.
    """

    grid: BlockGrid
    machine: Machine
    tiles: int
    flight: int
    group: int = 1
    table: list = field(default_factory=lambda: [[], None])

    @cached_property
    def sections(self) -> list[int]:
        return even(self.grid.heads, self.flight)

    @cached_property
    def alone_ns(self) -> np.ndarray:
        """Time of all tickets of each head without waits, one after another, int64 [heads]."""
        machine, blocks = self.machine, self.grid.host
        costs = np.array([0, machine.partial_ns, machine.full_ns]) * self.tiles * self.group
        busy = costs[blocks].sum(axis=1)
        busy += np.where(busy > 0, machine.reduce_ns, 0)
        busy += machine.tile_start_ns + machine.tile_end_ns
        return busy.sum(axis=1)[self.grid.mask_of]

    @property
    def steps(self) -> int:
        """Number of visits of one block: its tiles, for each query head."""
        return self.tiles * self.group

    def full(self, rows: np.ndarray) -> np.ndarray:
        """Whether visits are of full blocks: bool like rows [G, N, L]."""
        if not rows.size:
            return rows > 0
        return np.take_along_axis(self.grid.host.transpose(0, 2, 1), np.maximum(rows, 0), 2) == 2

    def programs(self, plans: list[Plan]) -> Programs:
        """Return the lists of plan k and mask g in launch order, as program k * G + g."""
        if self.table[0] != plans:
            self.table[:] = [plans, self._programs(plans)]
        return self.table[1]

    def _programs(self, plans: list[Plan]) -> Programs:
        rows, full = [], []
        for plan in plans:
            order = plan.order[:, :, None]
            rows.append(np.take_along_axis(plan.rows, order, 1))
            full.append(np.take_along_axis(self.full(plan.rows), order, 1))
        size = (self.grid.num_q_blocks, self.machine, self.tiles, self.grid.heads, self.group)
        return programs(np.concatenate(rows), np.concatenate(full), *size)

    @cached_property
    def by_column(self) -> Programs:
        """One program per mask, with place n for column n and ascending visits."""
        masks, columns = len(self.grid.blocks), self.grid.num_kv_blocks
        order = np.broadcast_to(np.arange(columns), (masks, columns))
        return self._programs([Plan("", "", order, visits(self.grid.host, "ascending", None))])

    def lists(self, table: Programs, plans: np.ndarray, start: int, size: int) -> Programs:
        """Return the lists of the heads start..start + size under ``plans``."""
        masks, mask_of_lists = len(self.grid.blocks), self.grid.mask_of[start : start + size]
        if (mask_of_lists == mask_of_lists[0]).all():
            return table.pick(plans * masks + mask_of_lists[0])
        return table.pick((plans * masks + mask_of_lists[:, None]).reshape(-1))

    def race(self, plans: list[Plan], best_ns: int | None = None, start: int = 0) -> Race:
        """Time plans[start:] over all heads, side by side.

        One that cannot beat ``best_ns`` any more is given up.  Of three or more sections, the
        first shows which ``_CONTINUED`` plans go on.
        """
        step = max(1, _BATCH // max(1, plans[0].rows.size * self.steps))
        race = Race({}, {}, [{} for _ in self.sections])
        for first in range(start, len(plans), step):
            part = list(range(first, min(len(plans), first + step)))
            race.join(self._race(plans, np.array(part), best_ns))
            times = [race.times[plan] for plan in part if race.times[plan] is not None]
            best_ns = min([*times, best_ns] if best_ns is not None else times, default=None)
        return race

    def _race(self, plans: list[Plan], candidates: np.ndarray, best_ns: int | None) -> Race:
        table = self.programs([plans[plan] for plan in candidates])
        clock = Clock(self.machine, len(candidates), table.cost.dtype)
        race = Race(dict.fromkeys(candidates.tolist()), {}, [])
        alive, start, remaining_ns = np.arange(len(candidates)), 0, int(self.alone_ns.sum())
        for index, size in enumerate(self.sections):
            race.marks.append(dict(zip(candidates[alive].tolist(), clock.free.copy(), strict=True)))
            clock.section(self.lists(table, alive, start, size), size)
            start, remaining_ns = (
                start + size,
                remaining_ns - int(self.alone_ns[start : start + size].sum()),
            )
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
        table, gaps, plan_index = self.programs(plans), Gaps(), np.array([plan])
        clock, start = Clock(self.machine, 1, table.cost.dtype, gaps), 0
        for size in self.sections:
            clock.section(self.lists(table, plan_index, start, size), size)
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
        table = self.programs(plans)
        clock = Clock(self.machine, 1, table.cost.dtype)
        clock.free[:] = mark
        start = self.grid.heads - heads_left
        if heads_left > tail:
            clock.section(
                self.lists(table, np.array([base]), start, heads_left - tail), heads_left - tail
            )
        clock.keep(np.zeros(len(tails), np.int64))
        lists = self.lists(table, tails, self.grid.heads - tail, tail)
        clock.section(lists, tail)
        return clock.makespan_ns()

    def by_turns(
        self, orders: np.ndarray, delay: np.ndarray | None = None, ahead_ns: int | None = None
    ) -> tuple[int, int, list[np.ndarray]] | None:
        """Time launch orders int64 [K, G, N] whose rows are visited as their turns come.

        ``(candidate, makespan, visits)`` of the one that has spent least after a section; None if
        that is no less than ``ahead_ns``.  visits: int32 [N, L] by column, of each head.
        delay: int64 [N, blocks] by column, for one candidate whose heads share a mask.
        """
        count, masks, columns = orders.shape
        lists = self.by_column.relaunch(
            orders.reshape(-1, columns), np.tile(np.arange(masks), count)
        )
        late = np.zeros((1, 1, 1), np.int64)
        if delay is not None:
            late = delay[orders[0, self.grid.mask_of[0]]][..., None]
        clock = Clock(self.machine, count, lists.cost.dtype)
        alive, start, heads = np.arange(count), 0, []
        for size in self.sections:
            visited = clock.section(self.lists(lists, alive, start, size), size, late)
            if len(alive) > 1:
                ends = clock.makespan_ns() if len(self.sections) == 1 else clock.spent_ns()
                best = int(ends.argmin())
                if ahead_ns is not None and clock.spent_ns()[best] >= ahead_ns:
                    return None
                visited = visited[:, :, best :: len(alive)]
                alive = alive[[best]]
                clock.keep(np.array([best]))
            heads += self._visits_of_heads(visited, orders[alive[0]], start, size)
            start += size
        return int(alive[0]), int(clock.makespan_ns()[0]), heads

    def _visits_of_heads(self, visited, order, start: int, size: int) -> list[np.ndarray]:
        lists = []
        for index in range(visited.shape[2]):
            rows = visited[:, :, index]
            by_column = np.empty(rows.shape, np.int32)
            empty = rows == self.grid.num_q_blocks
            by_column[order[self.grid.mask_of[start + index]]] = np.where(empty, -1, rows)
            lists.append(by_column)
        return lists if len(lists) == size else lists * size


def compose(
    case: Case, sections: list[int], orders: list[np.ndarray], rows: list[np.ndarray], name: str
) -> Schedule:
    """Build a schedule of each head's launch order [N] and visits [N, L], sharing equal lists."""
    grid = case.grid
    objects, sets, set_of_head = {}, {}, []
    for mask, order, visited in zip(grid.mask_of.tolist(), orders, rows, strict=True):
        thing = (mask, order.tobytes(), id(visited))
        if thing not in objects:
            key = (mask, order.tobytes(), visited.tobytes())
            objects[thing] = sets.setdefault(key, (len(sets), mask, order, visited))[0]
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
