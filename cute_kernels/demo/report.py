"""The table of the demo, torch's own ops beside ours, and the picture of the drift of log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from rich.table import Table
from rich.text import Text

from ..cli.common import writing
from .compare import Column, Tally

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_TORCH, _OURS = "#d1495b", "#00798c"


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


def drift(columns: Sequence[Column], folder: Path) -> list[Path]:
    """Writes drift.png and drift.svg: (torch's column, ours) per token, and summed per sequence."""
    plt.rcParams["svg.hashsalt"] = "cute_kernels"
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    for column, colour in zip(columns, (_TORCH, _OURS), strict=True):
        differing = next(iter(column.rollouts.values()))
        label = f"{column.name}: {differing.differing:,} of {differing.numbers:,} differ"
        for i, gaps in enumerate(column.drift):
            steps = torch.arange(1, len(gaps) + 1).numpy()
            first = label if i == 0 else None
            top.plot(steps, gaps.numpy(), ".", ms=3, color=colour, label=first)
            bottom.plot(steps, gaps.cumsum(0).numpy(), "-", lw=1, color=colour, label=first)
    top.set_title("log-prob in training − log-prob in rollout, same weights, same tokens")
    top.set_ylabel("per token, nats")
    bottom.set_ylabel("running sum of a sequence\n(log importance ratio), nats")
    bottom.set_xlabel("position in the sequence, bytes")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    top.legend(loc="upper left", frameon=False)
    paths = [folder / "drift.png", folder / "drift.svg"]
    for path, options in zip(paths, ({"dpi": 150}, {"metadata": {"Date": None}}), strict=True):
        with writing(path):
            figure.savefig(path, **options)
    plt.close(figure)
    return paths
