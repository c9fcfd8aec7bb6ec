"""`python -m perf refit`: the constants of the schedule model, fitted to measured backwards.

Each record of our ordered backward that was timed in both orders is one observation; its schedule
is made anew from its case and must have the recorded hash.  A CPU is enough.
"""

from __future__ import annotations

from collections.abc import Iterator

from cute_kernels.schedulers import Schedule, machine
from cute_kernels.schedulers.model.machines import TABLE
from cute_kernels.schedulers.report import fit
from cute_kernels.sparse_attn import config, masks

from .cases import Case, Problem


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
                observations += fit.observations([item], lambda _, made=schedule: made)
            else:
                skipped += 1
        if skipped:
            yield f"{name}: {skipped} records of another schedule than this tree makes, left out"
        if not observations:
            yield f"{name}: no record to fit to"
            continue
        current = machine(name)
        fitted = fit.refit(current, observations)
        for constant in fit.FITTED:
            old, new = (getattr(m, constant) for m in (current, fitted.machine))
            yield f"{name}: {constant} {old} -> {new}"
        yield f"{name}: rms error {fitted.error:.1%}; {fitted.source}"
