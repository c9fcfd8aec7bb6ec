"""The digests on the pages: per case what each GPU model gave, and whether models agree."""

from __future__ import annotations

from ..core.counts import recorded
from ..core.models import model, models
from ..core.tables import NOT_RUN, commit_of, table
from .cases import CASES
from .run import comparable

_SHOWN = 12  # hex digits of a digest
EQUAL, DIFFERS = "equal", "differs"
COUNTS = (
    recorded(
        "digests of fixed inputs recorded",
        "case",
        {case.name for case in CASES},
        lambda item: item["kind"] == "digest",
    ),
)
ONE_MODEL, OTHER_ID = "one model", "other contract ids"


def _kept(records: list[dict]) -> dict[str, list[dict]]:
    """Case -> its records taken on a GPU, oldest first."""
    own = [r for r in records if r["kind"] == "digest" and r["gpu"] != "none"]
    own.sort(key=lambda r: (r["date"], r["digest"]))
    return {case.name: [r for r in own if r["case"] == case.name] for case in CASES}


def verdict(own: list[dict]) -> str:
    """Of the records of one case: do those of equal contract ids have equal digests?"""
    if not own:
        return NOT_RUN
    met = False
    for i, one in enumerate(own):
        for other in own[:i]:
            if comparable(one, other) and one["digest"] != other["digest"]:
                return DIFFERS
            met |= comparable(one, other) and model(one["gpu"]) != model(other["gpu"])
    if met:
        return EQUAL
    return ONE_MODEL if len({model(r["gpu"]) for r in own}) == 1 else OTHER_ID


def verdicts(records: list[dict]) -> list[str]:
    """The verdict of every case."""
    return [verdict(own) for own in _kept(records).values()]


def _row(case: str, own: list[dict], names: list[str]) -> list[str]:
    last = {model(r["gpu"]): r for r in own}
    shown = [f"`{last[n]['digest'][:_SHOWN]}`" if n in last else NOT_RUN for n in names]
    return [f"`{case}`", *shown, verdict(own)]


def _id_rows(records: list[dict], names: list[str]) -> list[list[str]]:
    """Of each contract id, how many cases each model has a record of."""
    own = [r for found in _kept(records).values() for r in found]
    rows = []
    for contract_id in sorted({r["contract_id"] for r in own}):
        of = {(model(r["gpu"]), r["case"]) for r in own if r["contract_id"] == contract_id}
        counts = [sum(name == n for n, _ in of) for name in names]
        rows.append([f"`{contract_id}`", *(str(n) if n else NOT_RUN for n in counts)])
    return rows


def state(records: list[dict]) -> list[str]:
    """Lines of a table: which GPU models have digests, and whether they agree with each other."""
    kept, rows = _kept(records), []
    for name in models(records):
        own = [r for found in kept.values() for r in found if model(r["gpu"]) == name]
        last = max(own, key=lambda r: r["date"], default=None)
        place = f"{last['gpu']}, {commit_of(last)}, {last['date'][:10]}" if last else NOT_RUN
        rows.append([f"{name} taken", f"{len({r['case'] for r in own})} of {len(CASES)}", place])
    return table(
        ["digests", "cases", "last"], [*rows, ["models against each other", *_agreed(kept)]]
    )


def _agreed(kept: dict[str, list[dict]]) -> tuple[str, str]:
    """How many cases two models share under one contract id, and whether their digests agree."""
    found = {case: verdict(own) for case, own in kept.items()}
    bad = [case for case, word in found.items() if word == DIFFERS]
    same = list(found.values()).count(EQUAL)
    count = f"{same + len(bad)} of {len(found)}"
    if bad:
        return count, f"{DIFFERS}: {', '.join(bad)}"
    return count, EQUAL if same else NOT_RUN


def render(records: list[dict]) -> list[str]:
    """The lines of the page of digests."""
    names = models([r for r in records if r["kind"] == "digest"])
    rows = [_row(case, own, names) for case, own in _kept(records).items()]
    ids = _id_rows(records, names)
    return [
        "# Digests",
        "",
        "`python -m perf digest`: SHA-256 of all results of a case, forward and backward, from",
        "inputs that every machine draws alike; the first digits.  Equal contract ids must mean",
        "equal digests, on both GPU models: `--check` compares a card with these.",
        "",
        *table(["case", *names, "verdict"], rows),
        *(["", *table(["cases of contract id", *names], ids)] if ids else []),
    ]
