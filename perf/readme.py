"""The README's table of speed: the rival's time over ours on each GPU, from the newest records.

`python -m perf report` writes it where the README has a table with this header; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from .core import record
from .core.models import MODELS
from .core.systems import modules
from .core.tables import NOT_RUN, by_card, table

README = record.ROOT / "README.md"
HEADER = ["rival's time over ours", "rival", *MODELS]


def lines(records: list[dict]) -> list[str]:
    """Lines of the table."""
    rows = [row for page in modules("page") for row in page.SPEED]
    cards = {row.kernel: by_card(records, row.kernel) for row in rows}
    cells = []
    for row in rows:
        benches = cards[row.kernel]
        values = [row.cell(benches[card]) if card in benches else NOT_RUN for card in MODELS]
        cells.append([row.label, row.name, *values])
    return table(HEADER, cells)


def written(text: str, records: list[dict]) -> str:
    """The README with this table in place of the one with its header."""
    before, head, after = text.partition(table(HEADER, [])[0] + "\n")
    if not head:
        return text
    remaining_lines = after.splitlines(keepends=True)
    while remaining_lines and remaining_lines[0].startswith("|"):
        del remaining_lines[0]
    return before + "\n".join(lines(records)) + "\n" + "".join(remaining_lines)


def write(records: list[dict], path: Path = README) -> None:
    """Rewrite the table in the README."""
    path.write_text(written(path.read_text(encoding="utf-8"), records), encoding="utf-8")
