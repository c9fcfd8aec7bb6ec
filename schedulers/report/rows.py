"""Comparison of schedules: predicted times of each named kind and of ``select``.

The rows behind ``python -m cute_kernels.schedulers`` and the pictures and tables of the docs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_kernels.errors import ScheduleError, expected, one_of

from ..model.bounds import Bound, bound
from ..model.machines import Machine, resolve
from ..model.selection import Selection, select
from ..model.simulation import Simulation, simulate
from ..order.kinds import KINDS, WALKS
from ..order.ranks import block_grid
from ..order.safety import Safety, check
from ..order.schedule import Schedule

# Visits of all heads: beyond the first nothing is timed, beyond the second no kind that needs many
# resident CTAs (an event loop in Python; the others are timed array-wise).
MAX_VISITS, MAX_STEPPED = 6_000_000, 2_000_000
# Kinds of a row.
CHOICES = (*KINDS, "select")
# Kinds with an option ``walk``; the others define their own.
WALKED = ("left_to_right", "spt", "lpt", "shortest_first")
# The columns of a table of rows; the second names those to align at the right.
HEADER = ("kind", "in flight", "us", "/ unordered", "waiting", "/ bound", "safety")
NUMBERS = HEADER[1:6]


@dataclass(frozen=True, eq=False)
class Row:
    """One schedule on one machine.  ``simulation`` is None where it was not timed; ``why`` says.

    kind: a name of ``KINDS``, or "select".  bound: that of the mask.
    """

    kind: str
    walk: str
    heads_in_flight: int
    schedule: Schedule
    safety: Safety
    bound: Bound
    simulation: Simulation | None
    why: str = ""

    @property
    def title(self) -> str:
        """Name of the schedule (the choice of "select"), walk and interleaving."""
        walk = f", {self.walk}" if self.kind in WALKED else ""
        schedule_name = f": {self.schedule.name}" if self.kind == "select" else ""
        flight = self.heads_in_flight
        heads = f", {flight} heads in flight" if flight > 1 else ", one head at a time"
        return f"{self.kind}{schedule_name}{walk}{heads}"

    @property
    def over_bound(self) -> float | None:
        """Ratio of the predicted time to the greatest bound for schedules of this safety."""
        if self.simulation is None:
            return None
        least = self.bound.lower_ns if self.safety.any_residency else self.bound.any_order_ns
        return self.simulation.makespan_ns / max(1, least)


def evaluate(
    block_mask,
    kind: str,
    *,
    heads: int | None = None,
    heads_in_flight: int = 1,
    walk: str = "ascending",
    machine: Machine | str = "h200_d128",
    floor: Bound | None = None,
) -> Row:
    """Evaluate one kind of ``KINDS``, or "select" (which has its own walk and interleaving), timed.

    Arguments as for the kinds; floor: the mask's bound, if at hand.  A schedule that needs more
    resident CTAs than the machine has slots gets a row without a time.  Raises ScheduleError.
    """
    machine = resolve(machine)
    if kind not in CHOICES:
        raise ScheduleError(one_of("kind", CHOICES, kind))
    if walk not in WALKS:
        raise ScheduleError(one_of("walk", WALKS, walk))
    floor = floor or bound(block_mask, heads=heads, machine=machine)
    if kind == "select":
        schedule = select(block_mask, heads=heads, machine=machine).schedule
        walk = ""
    else:
        options = {"heads": heads, "heads_in_flight": heads_in_flight}
        options |= {"walk": walk} if kind in WALKED else {}
        schedule = KINDS[kind](block_mask, **options)
        walk = walk if kind in WALKED else "own"
    safety = check(schedule)
    visits = int(np.diff(schedule.offset)[schedule.list_of_ticket].sum())
    simulation, why = None, ""
    if safety.residents > machine.slots:
        why = f"more than {machine.slots}"
    elif not safety.any_residency and visits > MAX_STEPPED:
        why = f"not timed: {visits:,} visits"
    else:
        simulation = simulate(schedule, machine)
    return Row(kind, walk, schedule.heads_in_flight, schedule, safety, floor, simulation, why)


def compare(
    block_mask,
    *,
    heads: int | None = None,
    machine: Machine | str = "h200_d128",
    kinds: tuple[str, ...] = CHOICES,
    flights: tuple[int, ...] | None = None,
    walk: str = "ascending",
) -> list[Row]:
    """Return a row for each kind and number of heads in flight, in that order, and for "select".

    flights: None is one head at a time and as many as the machine takes.  Raises ScheduleError.
    """
    machine = resolve(machine)
    grid = block_grid(block_mask, heads)
    visits = int(np.count_nonzero(grid.host, axis=(1, 2))[grid.mask_of].sum())
    visits *= machine.for_blocks(grid.block_size)[1]
    if visits > MAX_VISITS:
        want = f"at most {MAX_VISITS:,} visits (blocks of all heads, times query tiles per block)"
        raise ScheduleError(expected("block_mask", want, f"{visits:,}"))
    floor = bound(block_mask, heads=heads, machine=machine)
    if flights is None:
        most = machine.most_heads(grid.num_q_blocks, grid.block_size)
        flights = tuple(sorted({1, min(most, grid.heads)}))
    rows = []
    for kind in kinds:
        for flight in flights[:1] if kind == "select" else flights:
            options = {"heads": heads, "heads_in_flight": flight, "walk": walk}
            rows.append(evaluate(block_mask, kind, machine=machine, floor=floor, **options))
    return rows


def cells(row: Row) -> list[str]:
    """Return a row's texts, one for each of ``HEADER``; "-" where it has no time."""
    timed, safety = row.simulation, str(row.safety)
    numbers = ["-"] * 4
    if timed:
        numbers = [f"{timed.makespan_ns / 1e3:,.1f}", f"{timed.ratio:.3f}"]
        numbers += [f"{timed.stall_share:.1%}", f"{row.over_bound:.3f}"]
    safety += f": {row.why}" if row.why else ""
    return [row.kind, str(row.heads_in_flight), *numbers, safety]


def facts(row: Row) -> dict[str, object]:
    """Return a row as plain values, for JSON: times in ns, None where it has no time."""
    timed = row.simulation
    return {
        "kind": row.kind,
        "walk": row.walk,
        "heads_in_flight": row.heads_in_flight,
        "name": row.schedule.name,
        "hash": row.schedule.hash,
        "needs_residents": row.safety.residents,
        "predicted_ns": timed.makespan_ns if timed else None,
        "unordered_ns": timed.unordered_ns if timed else None,
        "over_unordered": timed.ratio if timed else None,
        "waiting": timed.stall_share if timed else None,
        "over_bound": row.over_bound,
        "why_untimed": row.why,
    }


def reasons(selection: Selection, rows: list[Row]) -> list[str]:
    """Explain the choice of ``select`` in sentences."""
    timed = [trial for trial in selection.trials if trial.predicted_ns is not None]
    share = selection.over_bound - 1
    floor = f"{selection.bound.lower_ns / 1e3:.1f} us ({_BINDING[selection.bound.binding()]})"
    sentences = [
        f"select takes '{selection.schedule.name}': {selection.predicted_ns / 1e3:.1f} us, the "
        f"least of {len(selection.trials)} tried ({len(selection.trials) - len(timed)} given up "
        f"on the way), {share:.1%} above the lower bound of {floor}.",
        "It tries only schedules that progress with any number of resident CTAs.",
    ]
    unsafe = [row for row in rows if row.simulation and not row.safety.any_residency]
    faster = [row for row in unsafe if row.simulation.makespan_ns < selection.predicted_ns]
    for row in faster:
        gain = 1 - row.simulation.makespan_ns / selection.predicted_ns
        sentences.append(f"{row.title} is {gain:.1%} faster but {row.safety}.")
    return sentences


_BINDING = {
    "work_ns": "all work over the slots",
    "packing_ns": "whole tickets over the slots",
    "longest_ns": "the longest ticket",
    "chain_ns": "the longest chain of writers of one row",
    "launch_ns": "the last writer's turn of the first ticket",
}
