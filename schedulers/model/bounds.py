"""Lower bounds of a schedule's time, and for small cases the optimum.

The bounds hold for every schedule of the model in ``simulate``.  The optimum, from OR-tools
CP-SAT, is over all launch orders and all visiting orders with ranks that follow the launch, that is
over all schedules that progress with any residency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cute_kernels.errors import ScheduleError, expected

from ..order.kinds import assemble
from ..order.ranks import BlockGrid, block_grid
from ..order.schedule import Schedule
from .machines import Machine, query_heads, resolve

# Most visits of all heads for which CP-SAT is used.
MAX_VISITS = 96
# Blocks of a mask whose bounds are computed at once.
_AT_ONCE = 1 << 18
# Longer than any time, in ns.
_NONE = 2**62


@dataclass(frozen=True)
class Bound:
    """Times in ns that no schedule can beat, and what a solver found.

    work_ns      all tickets' times, never waiting, over the slots
    packing_ns   as work_ns, with whole tickets: some slot gets k + 1 of the k * slots + 1 longest
    longest_ns   the longest ticket
    chain_ns     the longest row: its writers one after another
    launch_ns    for ranks that follow the launch: the row that the first ticket visits last
    best_ns      what CP-SAT found, if asked; ``proven`` if it is the optimum
    solver_ns    CP-SAT's own lower bound
    schedule     the schedule behind best_ns
    """

    work_ns: int
    packing_ns: int
    longest_ns: int
    chain_ns: int
    launch_ns: int
    best_ns: int | None = None
    proven: bool = False
    solver_ns: int | None = None
    schedule: Schedule | None = None

    @property
    def any_order_ns(self) -> int:
        """Greatest bound that holds for every schedule."""
        return max(self.work_ns, self.packing_ns, self.longest_ns, self.chain_ns)

    @property
    def lower_ns(self) -> int:
        """Greatest bound for schedules that progress with any residency."""
        return max(self.any_order_ns, self.launch_ns, self.solver_ns or 0)

    def binding(self) -> str:
        """Name of the bound that ``lower_ns`` is."""
        names = ("work_ns", "packing_ns", "longest_ns", "chain_ns", "launch_ns", "solver_ns")
        return next(name for name in names if getattr(self, name) == self.lower_ns)


def bound(
    block_mask,
    *,
    heads: int | None = None,
    machine: Machine | str = "h200_d128",
    group: int = 1,
    solve_s: float = 0,
) -> Bound:
    """Compute lower bounds; with ``solve_s`` > 0 also CP-SAT's best schedule in that many seconds.

    Arguments as for ``select``.  CP-SAT needs ``ortools`` (extra ``schedule``), one dQ stage and at
    most ``MAX_VISITS`` visits; ScheduleError otherwise.
    """
    grid = block_grid(block_mask, heads)
    machine, tiles = resolve(machine).for_blocks(grid.block_size)
    lower = lower_bound(grid, machine, tiles, query_heads(group))
    return lower if not solve_s else _solve(grid, machine, tiles * group, lower, solve_s)


def lower_bound(grid: BlockGrid, machine: Machine, tiles: int, group: int = 1) -> Bound:
    """Compute the bounds of a mask on a machine whose costs are those of the grid's tiles.

    The chain and the launch are those of the last query head's rows: every writer comes to them
    after its visits for the heads before.
    """
    blocks = grid.host
    step = max(1, _AT_ONCE // max(1, blocks[:1].size))
    parts = [
        _bounds_of(blocks[first : first + step], machine, tiles, group)
        for first in range(0, len(blocks), step)
    ]
    alone = np.concatenate([part[0] for part in parts])
    chain = max(part[1] for part in parts)
    launch = max(part[2] for part in parts)
    each = np.bincount(grid.mask_of, minlength=len(blocks))
    durations = np.sort(np.repeat(alone, each, axis=0).reshape(-1))[::-1]
    return Bound(
        math.ceil(int(durations.sum()) / machine.slots),
        _packing(durations, machine.slots),
        int(durations.max(initial=0)),
        chain,
        launch,
    )


def _bounds_of(
    blocks: np.ndarray, machine: Machine, tiles: int, group: int
) -> tuple[np.ndarray, int, int]:
    """Return (each ticket's time without waits int64 [G, N], longest chain, latest launch)."""
    reduce = machine.reduce_ns
    tile = np.array([0, machine.partial_ns, machine.full_ns])[blocks]
    present = blocks > 0
    writers = np.count_nonzero(present, axis=2)
    fixed = machine.tile_start_ns + machine.tile_end_ns
    of_head = tile.sum(axis=1) * tiles
    busy = of_head * group
    alone = np.where(busy > 0, busy + reduce, 0) + fixed
    link = reduce + machine.handoff_ns
    if group > 1:
        tile += (of_head * (group - 1))[:, None]
    least = np.where(present, tile, _NONE).min(axis=2, initial=_NONE)
    chains = np.where(writers > 0, least + writers * link - machine.handoff_ns + fixed, 0)
    after = np.where(present, writers[:, :, None], 2**31).min(axis=1, initial=2**31)
    launch = np.where(busy > 0, alone + (after - 1) * link, _NONE).min(axis=1, initial=_NONE)
    return alone, int(chains.max(initial=0)), int(launch[launch < _NONE].max(initial=0))


def _packing(durations: np.ndarray, slots: int) -> int:
    """Packing bound of durations int64, longest first."""
    total = np.concatenate(([0], np.cumsum(durations)))
    waves = np.arange(1, (len(durations) - 1) // slots + 1)
    last = waves * slots + 1
    return int((total[last] - total[last - waves - 1]).max(initial=0))


def _solve(grid: BlockGrid, machine: Machine, tiles: int, lower: Bound, seconds: float) -> Bound:
    from ortools.sat.python import cp_model

    visits = int((grid.host[grid.mask_of] > 0).sum()) * tiles
    if machine.dq_stages != 1 or tiles != 1 or not 0 < visits <= MAX_VISITS:
        want = f"one dQ stage, one step per block and 1 to {MAX_VISITS} visits"
        actual = f"{machine.dq_stages} stages, {tiles} steps, {visits} visits"
        raise ScheduleError(expected("bound with solve_s", want, actual))
    model = _Model(cp_model.CpModel(), grid, machine, lower.lower_ns)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ScheduleError(expected("solve_s", "time enough for a first solution", seconds))
    tick = machine.tick()
    return Bound(
        lower.work_ns,
        lower.packing_ns,
        lower.longest_ns,
        lower.chain_ns,
        lower.launch_ns,
        round(solver.objective_value) * tick,
        status == cp_model.OPTIMAL,
        math.ceil(solver.best_objective_bound - 1e-6) * tick,
        model.schedule(solver),
    )


class _Model:
    """CP-SAT model in ticks: a position and a span per ticket, two times per visit."""

    def __init__(self, model, grid: BlockGrid, machine: Machine, least_ns: int):
        self.model, self.grid = model, grid
        tick = machine.tick()
        times = ("reduce_ns", "handoff_ns", "tile_start_ns", "tile_end_ns")
        self.reduce, self.handoff, self.begin, self.end = (
            getattr(machine, name) // tick for name in times
        )
        self.cost = (0, machine.partial_ns // tick, machine.full_ns // tick)
        blocks = grid.host[grid.mask_of]
        step = max(self.cost) + self.reduce + self.handoff
        tickets = blocks.shape[0] * blocks.shape[2]
        self.horizon = int((blocks > 0).sum()) * step + tickets * (self.begin + self.end)
        self.start, self.stop, self.place, self.landed = {}, {}, {}, {}
        spans = []
        for head in range(blocks.shape[0]):
            for column in range(blocks.shape[2]):
                spans.append(self._ticket((head, column), blocks[head, :, column]))
        model.add_cumulative(spans, [1] * len(spans), machine.slots)
        model.add_all_different(self.place.values())
        names = list(self.place)
        for i, first in enumerate(names):
            for second in names[i + 1 :]:
                self._order(first, second)
        self.makespan = model.new_int_var(least_ns // tick, self.horizon, "")
        model.add_max_equality(self.makespan, self.stop.values())
        model.minimize(self.makespan)

    def _time(self):
        return self.model.new_int_var(0, self.horizon, "")

    def _ticket(self, name, column):
        model, start, stop = self.model, self._time(), self._time()
        self.start[name], self.stop[name] = start, stop
        self.place[name] = model.new_int_var(
            0, len(self.grid.mask_of) * len(self.grid.host[0][0]), ""
        )
        computing, holding = [], []
        for row in np.flatnonzero(column).tolist():
            cost, computed, landed = self.cost[column[row]], self._time(), self._time()
            self.landed[(*name, row)] = landed
            model.add(computed >= start + self.begin + cost)
            model.add(stop >= landed + self.end)
            computing.append(model.new_interval_var(computed - cost, cost, computed, ""))
            holding_ns = model.new_int_var(self.reduce, self.horizon, "")
            holding.append(model.new_interval_var(computed, holding_ns, landed, ""))
        model.add_no_overlap(computing)
        model.add_no_overlap(holding)
        busy = sum(self.cost[kind] for kind in column) + (self.reduce if holding else 0)
        model.add(stop >= start + self.begin + busy + self.end)
        return model.new_interval_var(start, self._time(), stop, "")

    def _order(self, left, right) -> None:
        model, first = self.model, self.model.new_bool_var("")
        step = self.reduce + self.handoff
        for a, b, lit in ((left, right, first), (right, left, first.negated())):
            model.add(self.place[a] < self.place[b]).only_enforce_if(lit)
            model.add(self.start[a] <= self.start[b]).only_enforce_if(lit)
            for name, landed in self.landed.items():
                if name[:2] == b and a[0] == b[0] and (*a, name[2]) in self.landed:
                    earlier = self.landed[(*a, name[2])]
                    model.add(landed >= earlier + step).only_enforce_if(lit)

    def schedule(self, solver) -> Schedule:
        """Return the solution's launch and visiting orders, one set of lists per head."""
        grid = self.grid
        order = sorted(self.place, key=lambda name: solver.value(self.place[name]))
        blocks = grid.host[grid.mask_of]
        heads, height, columns = blocks.shape
        rows = np.full((heads, columns, height), -1, np.int32)
        rank_table = np.full(blocks.shape, -1, np.int32)
        count = np.zeros((heads, height), np.int32)
        for head, column in order:
            landed_in_column = [name for name in self.landed if name[:2] == (head, column)]
            landed_in_column.sort(key=lambda name: solver.value(self.landed[name]))
            for index, (_, _, row) in enumerate(landed_in_column):
                rows[head, column, index] = row
                rank_table[head, row, column] = count[head, row]
                count[head, row] += 1
        return assemble(
            blocks,
            rows,
            rank_table,
            np.array(order, np.int32).reshape(-1, 2),
            np.arange(heads),
            block_size=grid.block_size,
            name="cp_sat",
        )
