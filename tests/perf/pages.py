"""Reads what the pages say of some records."""

from __future__ import annotations

from types import ModuleType


def targets(page: ModuleType, *records: dict) -> dict[str, list[str]]:
    """Target -> measured, verdict and next step, of the records of one GPU model."""
    return {text: rest for text, *rest in page.target_rows(list(records))}


def row(text: str, *start: str) -> list[str]:
    """The cells of the one row of a Markdown text that begins with these cells."""
    head = "| " + " | ".join(start) + " |"
    lines = [line for line in text.splitlines() if line.startswith(head)]
    assert len(lines) == 1, (start, lines)
    return [cell.strip() for cell in lines[0].strip("|").split(" | ")]
