"""Refit a machine's constants to measured times.

The unordered times set what a tile's compute takes, the ordered ones the handoff.  The reduction
stays as it is: a chain of writers shows only the sum of a reduction and a handoff.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations

from cute_kernels.errors import ScheduleError, expected

from ..model.machines import Machine
from ..model.simulation import simulate
from ..order.schedule import Schedule

# Constants are whole multiples of this, so that they share a coarse tick.
STEP_NS = 50
FITTED = ("full_ns", "partial_ns", "handoff_ns")
# One constant, or two against each other.
_MOVES = [{name: sign} for name in FITTED for sign in (-1, 1)]
_MOVES += [{a: 1, b: -1} for a, b in permutations(FITTED, 2)]


@dataclass(frozen=True)
class Observation:
    """One schedule's measured times in ns, with and without the write order, and its record."""

    schedule: Schedule
    ordered_ns: float
    unordered_ns: float
    record: str


@dataclass(frozen=True)
class Fit:
    """Refitted machine, the source text of its constants, and the rms relative error."""

    machine: Machine
    source: str
    error: float


def observations(
    records: Iterable[Mapping], schedule_of: Callable[[Mapping], Schedule]
) -> list[Observation]:
    """Make observations from perf records, mappings with ``ordered_us``, ``unordered_us``,
    ``commit`` and ``gpu``.  ``schedule_of`` gives the schedule that a record was measured with."""
    observed = []
    for record in records:
        missing = {"ordered_us", "unordered_us", "commit", "gpu"} - set(record)
        if missing:
            raise ScheduleError(expected("record", f"the fields {sorted(missing)}", dict(record)))
        times = [float(record[name]) * 1e3 for name in ("ordered_us", "unordered_us")]
        name = f"{record['gpu']} at {record['commit']}"
        observed.append(Observation(schedule_of(record), *times, name))
    return observed


def refit(machine: Machine, seen: list[Observation]) -> Fit:
    """Fit full_ns, partial_ns and handoff_ns of ``machine`` by least squares of log times.

    A pattern search from the machine's own values; deterministic.  Raises ScheduleError without
    observations or for a time that is not above 0.
    """
    if not seen:
        raise ScheduleError(expected("seen", "at least one observation", 0))
    for each in seen:
        for name in ("ordered_ns", "unordered_ns"):
            value = getattr(each, name)
            if not (math.isfinite(value) and value > 0):
                raise ScheduleError(expected(f"{name} of {each.record}", "a time above 0", value))
    least, share = _loss(machine, seen), 0.5
    while share * max(getattr(machine, name) for name in FITTED) >= STEP_NS:
        before = machine
        for move in _MOVES:
            candidate = _moved(machine, move, share)
            loss = _loss(candidate, seen) if candidate != machine else least
            if loss < least:
                least, machine = loss, candidate
        share = share / 2 if machine == before else share
    records = sorted({each.record for each in seen})
    source = f"fitted to {len(seen)} records: {'; '.join(records)}"
    return Fit(machine, source, math.sqrt(least / (2 * len(seen))))


def _loss(machine: Machine, seen: list[Observation]) -> float:
    total = 0.0
    for each in seen:
        simulated = simulate(each.schedule, machine)
        total += math.log(simulated.makespan_ns / each.ordered_ns) ** 2
        total += math.log(simulated.unordered_ns / each.unordered_ns) ** 2
    return total


def _moved(machine: Machine, move: dict[str, int], share: float) -> Machine:
    """Return the machine with the constants of a move changed by a share of themselves."""
    values = {}
    for name, sign in move.items():
        value, least = getattr(machine, name), 0 if name == "handoff_ns" else STEP_NS
        step = max(STEP_NS, round(value * share / STEP_NS) * STEP_NS)
        values[name] = max(least, value + sign * step)
    return replace(machine, **values)
