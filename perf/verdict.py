"""Index of the status pages: targets and bits of each system on each GPU model."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

from .core.models import split
from .core.systems import modules, name_of
from .core.tables import MET, MISSED, NOT_RUN, table
from .digest import page as digests


def targets(words: list[str]) -> str:
    """How many targets are met, missed, not run; "not run" where no target has a record."""
    counts = Counter(words)
    if not counts[MET] + counts[MISSED]:
        return NOT_RUN
    order = (MET, MISSED, NOT_RUN)
    return ", ".join(f"{counts[word]} {word}" for word in order if counts[word])


def certified(certificates: list[dict]) -> str:
    """How many certificates hold."""
    if not certificates:
        return NOT_RUN
    return f"{sum(c['ok'] for c in certificates)} of {len(certificates)} hold"


def agreed(records: list[dict]) -> str:
    """Cell: the number of cases in which the GPU models have the same digest."""
    words = Counter(digests.verdicts(records))
    equal, bad = words[digests.EQUAL], words[digests.DIFFERS]
    if not equal + bad:
        return NOT_RUN
    shared = f"equal digests in {equal} of {equal + bad} cases"
    return f"{shared}, {bad} differ" if bad else shared


def rows(page: ModuleType, records: list[dict], path: str = "") -> list[list[str]]:
    """(verdict on, a cell for each GPU model) of one system; path: its page, to link to."""
    cards = split(records)
    counts = [
        targets([row[2] for row in page.target_rows(model_records)])
        for model_records in cards.values()
    ]
    names = [name for name, _ in page.bits_kept([])]
    verdicts = [
        [verdict for _, verdict in page.bits_kept(model_records)]
        for model_records in cards.values()
    ]
    return [
        ["targets", *(f"[{cell}]({path}#targets)" for cell in counts)],
        *([name, *cells] for name, *cells in zip(names, *verdicts, strict=True)),
    ]


def index(records: list[dict]) -> list[str]:
    """Lines of the table of every system."""
    out = []
    for page in modules("page"):
        path = f"status/{name_of(page)}.md"
        out += [[f"[{page.TITLE}]({path})", *row] for row in rows(page, records, path)]
    return table(["system", "verdict on", *split(records)], out)


def of_system(page: ModuleType, records: list[dict]) -> list[str]:
    """Lines of the table at the top of a system's page."""
    return table(["verdict on", *split(records)], rows(page, records))
