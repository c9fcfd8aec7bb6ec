"""`python -m perf refit`: the constants of the schedule model, fitted to measured backwards.

Each record of our ordered backward that was timed in both orders is one observation; its schedule
is made anew from its case and must have the recorded hash.  A CPU is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from cute_kernels.schedulers import Machine, Schedule, machine, simulate
from cute_kernels.schedulers.model.machines import TABLE
from cute_kernels.sparse_attn import config, masks

from .cases import Case, Problem

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


def refit(machine: Machine, seen: list[Observation]) -> Fit:
    """Fit full_ns, partial_ns and handoff_ns of ``machine`` by least squares of log times.

    A pattern search from the machine's own values; deterministic.  The unordered times set what a
    tile's compute takes, the ordered ones the handoff.  The reduction stays as it is: a chain of
    writers shows only the sum of a reduction and a handoff.
    """
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


def observation(item: dict, schedule: Schedule) -> Observation:
    """One record's times, measured with this schedule."""
    times = (item[name] * 1e3 for name in ("ordered_us", "unordered_us"))
    return Observation(schedule, *times, f"{item['gpu']} at {item['commit']}")


def schedule_of(record: dict) -> Schedule:
    """The schedule that "auto" means on a GPU for a record's case, on this host."""
    case = Case(record["mask"], record["s"], record["d"], record["heads"], record["kv_heads"])
    lowered = masks.lower(Problem(case, "cpu").mask)
    count = config.schedule_heads(lowered.mask.shape[1], case.batch, case.heads, case.kv_heads)
    group = case.batch * case.heads // count
    return config.auto(lowered.mask, count, case.dim, "cuda", group)


def usable(records: list[dict]) -> list[dict]:
    """The latest of each case: right, timed in both orders, one query head to a ticket."""
    newest = {}
    for item in records:
        timed = item.get("kernel") == "attention" and {"ordered_us", "unordered_us"} <= set(item)
        if timed and item["status"] == "ok" and item["schedule"]["group"] == 1:
            newest[item["shape"]] = item
    return list(newest.values())


def lines(records: list[dict]) -> Iterator[str]:
    """New constants for ``schedulers.machines``, machine by machine, and how well they fit."""
    records_used = usable(records)
    for name in TABLE:
        observations, skipped = [], 0
        for item in (r for r in records_used if r["predicted"]["machine"] == name):
            schedule = schedule_of(item)
            if schedule.hash == item["schedule"]["hash"]:
                observations.append(observation(item, schedule))
            else:
                skipped += 1
        if skipped:
            yield f"{name}: {skipped} records of another schedule than this tree makes, left out"
        if not observations:
            yield f"{name}: no record to fit to"
            continue
        current = machine(name)
        fitted = refit(current, observations)
        for constant in FITTED:
            old, new = (getattr(m, constant) for m in (current, fitted.machine))
            yield f"{name}: {constant} {old} -> {new}"
        yield f"{name}: rms error {fitted.error:.1%}; {fitted.source}"
