"""A section of a status page: written once for each GPU model that has records of it.

A section sees the records of one model at a time, so no table can mix the times of two.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from .models import split
from .tables import MET, MISSED, NOT_RUN, folded, table, where

#: The columns of a table of targets; a verdict is "met", "missed" or "not run".
TARGET_HEAD = ["target", "measured", "verdict", "next step"]


@dataclass(frozen=True)
class Section:
    """One heading of a page.

    Attributes:
        heading: Title of the section.
        text: What stands below it, for all GPU models; wrapped anew.
        lines: Lines of one model's records.  Of no records: the rows that say "not run", or
            nothing, which leaves the section out.
        counts: Whether a record gives its model a part of this section.
    """

    heading: str
    text: str
    lines: Callable[[list[dict]], list[str]]
    counts: Callable[[dict], bool]

    def render(self, records: list[dict]) -> list[str]:
        """Lines of the section: a part for each model, its name in bold first."""
        lines_by_model = {
            name: lines
            for name, model_records in split(records).items()
            if any(map(self.counts, model_records)) and (lines := self.lines(model_records))
        }
        out = [
            line
            for name, lines in lines_by_model.items()
            for line in (f"**{name}**", "", *lines, "")
        ]
        if not lines_by_model:
            if not (lines := self.lines([])):
                return []
            out = [*lines, ""]
        text = [*wrapped(self.text), ""] if self.text else []
        return [f"## {self.heading}", "", *text, *out]


def wrapped(text: str) -> list[str]:
    """Lines of a paragraph, as wide as the other pages."""
    return textwrap.wrap(
        " ".join(text.split()), width=100, break_on_hyphens=False, break_long_words=False
    )


def benched(*kernels: str) -> Callable[[dict], bool]:
    """Counts the bench records of some kernels, but for those of an absent rival."""

    def counts(item: dict) -> bool:
        return item["kind"] == "bench" and item["kernel"] in kernels and item["status"] != "absent"

    return counts


def targets(
    rows: Callable[[list[dict]], list[list[str]]],
    counts: Callable[[dict], bool],
    text: str = "",
    heading: str = "Targets",
) -> Section:
    """The section of a table of targets."""
    return Section(heading, text, lambda records: table(TARGET_HEAD, rows(records)), counts)


def target_row(
    text: str, values: list[float], at_least: float, share: bool, steps: tuple[str, str]
) -> list[str]:
    """Row of a target that every measured size has to reach: text, measured, verdict, next step.

    values: Of the sizes that were measured.  share: Whether they are fractions of a copy, not
    ratios to a rival.  steps: Next steps of a target that is not run, and of one that is missed.
    """
    measure, after_a_miss = steps
    if not values:
        return [text, NOT_RUN, NOT_RUN, measure]
    form = "{:.0%}" if share else "{:.2f}x"
    measured = f"{form.format(min(values))} to {form.format(max(values))}, {len(values)} sizes"
    if min(values) >= at_least:
        return [text, measured, MET, "none"]
    return [text, measured, MISSED, after_a_miss]


def profiles(*kernels: str) -> Section:
    """The hardware counters of some kernels; left out where there are none."""

    def counts(item: dict) -> bool:
        return item["kind"] == "profile" and item["kernel"] in kernels

    def lines(records: list[dict]) -> list[str]:
        head = ["system", "product", "shape", "of floor", "traffic", "top stalls", "ran on"]
        rows = _profile_rows([r for r in records if counts(r)])
        return folded(head, rows, ("system", "ran on")) if rows else []

    return Section("Profiles", "", lines, counts)


def _profile_rows(records: list[dict]) -> list[list[str]]:
    """Rows of the newest record of each case."""
    newest = {}
    for item in sorted(records, key=lambda r: r["date"]):
        newest[item["system"], item["product"], item["shape"]] = item
    rows = []
    for (system, product, shape), item in sorted(newest.items()):
        # Words instead of one name each: a table's line breaks at spaces alone.
        stalls = ", ".join(
            f"{stall['reason'].replace('_', ' ')} {stall['warps']:.2f}" for stall in item["stalls"]
        )
        share = f"{item['floor_fraction']:.0%}"
        traffic = f"{item['bytes_over_least']:.2f}x"
        names = [system, product, shape.replace("/", " ")]
        rows.append([*names, share, traffic, stalls, where(item | {"status": "ok"})])
    return rows
