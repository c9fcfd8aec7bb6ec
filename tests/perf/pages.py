"""Makes a status page of some records, and reads rows of a Markdown page."""

from __future__ import annotations

import re

from perf import report


def made(name: str, *records: dict) -> str:
    """The status page of a system, by the name of its folder."""
    return report.pages(list(records), [])[f"status/{name}.md"]


def index(*records: dict) -> str:
    """The index of the status pages."""
    return report.pages(list(records), [])["status.md"]


def row(page: str, *start: str) -> list[str]:
    """The cells of the one row that begins with these cells."""
    head = "| " + " | ".join(start) + " |"
    lines = [line for line in page.splitlines() if line.startswith(head)]
    assert len(lines) == 1, (start, lines)
    return [cell.strip() for cell in lines[0].strip("|").split("|")]


def facts(page: str, heading: str, *start: str) -> dict[str, str]:
    """Column -> cell of the one row below a heading that begins so, and what every row has."""
    part = re.split(r"\n#+ ", page.split(f"{heading}\n", 1)[1])[0]
    (shared,) = re.findall(r"^Every row: (.*)\.$", part, re.M) or [""]
    message = dict(text.split(": ", 1) for text in shared.split("; ") if text)
    head = next(line for line in part.splitlines() if line.startswith("| "))
    names = [cell.strip() for cell in head.strip("|").split("|")]
    return dict(zip(names, row(part, *start), strict=True)) | message
