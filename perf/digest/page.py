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
    digests = [r for r in records if r["kind"] == "digest" and r["gpu"] != "none"]
    digests.sort(key=lambda r: (r["date"], r["digest"]))
    return {case.name: [r for r in digests if r["case"] == case.name] for case in CASES}


def verdict(own: list[dict]) -> str:
    """Verdict on one case: whether records of equal contract ids have equal digests."""
    if not own:
        return NOT_RUN
    met = False
    for i, newer in enumerate(own):
        for older in own[:i]:
            if comparable(newer, older) and newer["digest"] != older["digest"]:
                return DIFFERS
            met |= comparable(newer, older) and model(newer["gpu"]) != model(older["gpu"])
    if met:
        return EQUAL
    return ONE_MODEL if len({model(r["gpu"]) for r in own}) == 1 else OTHER_ID


def verdicts(records: list[dict]) -> list[str]:
    """The verdict of every case."""
    return [verdict(digests) for digests in _kept(records).values()]


def _row(case: str, digests: list[dict], names: list[str]) -> list[str]:
    last = {model(r["gpu"]): r for r in digests}
    cells = [f"`{last[n]['digest'][:_SHOWN]}`" if n in last else NOT_RUN for n in names]
    return [f"`{case}`", *cells, verdict(digests)]


def _id_rows(records: list[dict], names: list[str]) -> list[list[str]]:
    """Rows of the contract ids: how many cases each model has a record of."""
    digests = [r for case_records in _kept(records).values() for r in case_records]
    rows = []
    for contract_id in sorted({r["contract_id"] for r in digests}):
        pairs = {(model(r["gpu"]), r["case"]) for r in digests if r["contract_id"] == contract_id}
        counts = [sum(name == n for n, _ in pairs) for name in names]
        rows.append([f"`{contract_id}`", *(str(n) if n else NOT_RUN for n in counts)])
    return rows


def state(records: list[dict]) -> list[str]:
    """Lines of a table: which GPU models have digests, and whether they agree with each other."""
    by_case, rows = _kept(records), []
    for name in models(records):
        digests = [
            r for case_records in by_case.values() for r in case_records if model(r["gpu"]) == name
        ]
        last = max(digests, key=lambda r: r["date"], default=None)
        last_run = f"{last['gpu']}, {commit_of(last)}, {last['date'][:10]}" if last else NOT_RUN
        rows.append(
            [f"{name} taken", f"{len({r['case'] for r in digests})} of {len(CASES)}", last_run]
        )
    return table(
        ["digests", "cases", "last"], [*rows, ["models against each other", *_agreed(by_case)]]
    )


def _agreed(by_case: dict[str, list[dict]]) -> tuple[str, str]:
    """How many cases two models share under one contract id, and whether their digests agree."""
    case_verdicts = {case: verdict(digests) for case, digests in by_case.items()}
    bad = [case for case, word in case_verdicts.items() if word == DIFFERS]
    equal = list(case_verdicts.values()).count(EQUAL)
    count = f"{equal + len(bad)} of {len(case_verdicts)}"
    if bad:
        return count, f"{DIFFERS}: {', '.join(bad)}"
    return count, EQUAL if equal else NOT_RUN


def render(records: list[dict]) -> list[str]:
    """The lines of the page of digests."""
    names = models([r for r in records if r["kind"] == "digest"])
    rows = [_row(case, digests, names) for case, digests in _kept(records).items()]
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
