"""What the index of the status pages says: targets and bits of each system on each GPU model."""

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
    """In how many cases the GPU models have the same digest."""
    words = Counter(digests.verdicts(records))
    both, bad = words[digests.EQUAL], words[digests.DIFFERS]
    if not both + bad:
        return NOT_RUN
    shared = f"equal digests in {both} of {both + bad} cases"
    return f"{shared}, {bad} differ" if bad else shared


def rows(page: ModuleType, records: list[dict], path: str = "") -> list[list[str]]:
    """(verdict on, a cell for each GPU model) of one system; path: its page, to link to."""
    cards = split(records)
    counts = [targets([row[2] for row in page.target_rows(own)]) for own in cards.values()]
    names = [name for name, _ in page.bits_kept([])]
    kept = [[verdict for _, verdict in page.bits_kept(own)] for own in cards.values()]
    return [
        ["targets", *(f"[{cell}]({path}#targets)" for cell in counts)],
        *([name, *cells] for name, *cells in zip(names, *kept, strict=True)),
    ]


def index(records: list[dict]) -> list[str]:
    """Lines of the table of every system."""
    found = []
    for page in modules("page"):
        path = f"status/{name_of(page)}.md"
        found += [[f"[{page.TITLE}]({path})", *row] for row in rows(page, records, path)]
    return table(["system", "verdict on", *split(records)], found)


def of_system(page: ModuleType, records: list[dict]) -> list[str]:
    """Lines of the table at the top of a system's page."""
    return table(["verdict on", *split(records)], rows(page, records))
