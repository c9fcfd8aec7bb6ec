"""The table of the demo, torch's own ops beside ours."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from .compare import Tally
from .measure import Column


def table(torch_column: Column, ours: Column) -> Table:
    """Numbers whose bits differ; every row against training with all sequences in one batch."""
    out = Table(title="How many numbers have other bits")
    out.add_column("against training in one batch")
    for heading in ("numbers", "torch's own", "ours"):
        out.add_column(heading, justify="right")
    for heading, field in (
        ("log-probs in rollout", "rollouts"),
        ("log-probs in micro-batches", "micro"),
        ("weight gradients in micro-batches", "grads"),
    ):
        left, right = getattr(torch_column, field), getattr(ours, field)
        out.add_row(Text(heading, style="bold"))
        for label, theirs in left.items():
            mine = right[label]
            out.add_row(f"  {label}", f"{mine.numbers:,}", _count(theirs), _count(mine))
        largest = [f"{_sum(side).largest:.3g}" for side in (left, right)]
        out.add_row("  max |difference|", "", *largest, end_section=True)
    out.add_row(Text("seconds", style="bold"))
    for label, field in (("rollout", "rollout_seconds"), ("training", "training_seconds")):
        spent = [f"{getattr(column, field):.1f}" for column in (torch_column, ours)]
        out.add_row(f"  {label}", "", *spent)
    return out


def verdict(torch_column: Column, ours: Column) -> list[str]:
    """The last lines; the very last one is about us."""
    lines = []
    if torch_column.total().differing == 0:
        lines.append(
            "torch's own ops happened to agree with themselves on this machine: nothing to see in "
            "their column (their contract does not promise it)."
        )
    mine = ours.total()
    lines.append(f"ours: {mine.differing_bytes:,} differing bytes of {mine.bytes:,}")
    return lines


def _count(tally: Tally) -> str:
    if not tally.differing:
        return "0"
    return f"{tally.differing:,} ({tally.differing / tally.numbers:.1%})"


def _sum(tallies: dict[str, Tally]) -> Tally:
    return sum(tallies.values(), Tally())
