"""What the status page says first: the promises and the targets in a few rows, from the records."""

from __future__ import annotations

from collections import Counter

from .core.systems import modules
from .core.tables import NOT_RUN, table
from .digest import page as digests


def _targets(words: list[str]) -> str:
    """How many targets are held, missed, not run."""
    counts = Counter(words)
    order = ("held", "missed", NOT_RUN)
    return ", ".join(f"{counts[word]} {word}" for word in order if counts[word])


def _certified(certificates: list[dict]) -> str:
    if not certificates:
        return NOT_RUN
    return f"{sum(c['ok'] for c in certificates)} of {len(certificates)} hold"


def _models(records: list[dict]) -> str:
    words = Counter(digests.verdicts(records))
    both, bad = words[digests.EQUAL], words[digests.DIFFERS]
    if not both + bad:
        return NOT_RUN
    shared = f"equal digests in {both} of {both + bad} cases"
    return f"{shared}, {bad} differ" if bad else shared


def render(records: list[dict], certificates: list[dict]) -> list[str]:
    """Lines of a table."""
    pages = list(modules("page"))
    verdicts = [page.target_verdicts(records) for page in pages]
    rows = [
        *(row for page in pages for row in page.bits_kept(records)),
        ["[the same bits on H100 and H200](#digests)", _models(records)],
        ["[certificates](certificate.md) of the compiled kernels", _certified(certificates)],
        *([link, _targets(words)] for link, words in verdicts),
    ]
    return table(["question", "verdict"], rows)
