"""Table of the records of each GPU model, which the home, support and status pages share."""

from __future__ import annotations

from .core.counts import Count
from .core.models import model, models
from .core.systems import modules
from .core.tables import NOT_RUN, commit_of, table
from .digest import page as digests
from .probes import page as probes


def _cell(count: Count, records: list[dict]) -> str:
    """How many cases have a record, and commit and date of the last."""
    counted = [r for r in records if count.of(r) is not None]
    if not counted:
        return NOT_RUN
    last = max(counted, key=lambda r: r["date"])
    cases = len(set(map(count.of, counted)))
    return f"{cases} of {count.total}; {commit_of(last)}, {last['date'][:10]}"


def render(records: list[dict]) -> list[str]:
    """Lines of a Markdown table: what ran on which GPU model."""
    names = models(records)
    by_model = {name: [r for r in records if model(r["gpu"]) == name] for name in names}
    counts = [
        *(count for page in modules("page") for count in page.COUNTS),
        *probes.COUNTS,
        *digests.COUNTS,
    ]
    rows = [[count.text, *(_cell(count, by_model[name]) for name in names)] for count in counts]
    return table(["record of", *names], rows)
