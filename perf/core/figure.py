"""The plot of the status page: the rival's time over ours, row by row."""

from __future__ import annotations

import re
from pathlib import Path

from cute_kernels.cli.common import writing

from .tables import geomean

_OURS = "#1f5fa8"


def _name(card: str) -> str:
    """Name of a plot's file: each GPU model has its own."""
    return "speed_" + re.sub(r"[^a-z0-9]+", "_", card.lower())


def image(card: str) -> str:
    """The line of the status page that shows a plot."""
    return f"![The rival's time over ours, {card}](plots/{_name(card)}.svg)"


def speed(rows: list[tuple[str, list[float]]], card: str, folder: Path) -> list[Path]:
    """Draw the geometric mean of each row's ratios, and their range; the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "cute_kernels"
    chart, axes = pyplot.subplots(figsize=(8, 0.5 + 0.3 * len(rows)), layout="constrained")
    for height, (_, ratios) in enumerate(reversed(rows)):
        axes.plot([min(ratios), max(ratios)], [height, height], color=_OURS, linewidth=1.5)
        axes.plot([geomean(ratios)], [height], "o", color=_OURS)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.set_yticks(range(len(rows)), [label.replace("`", "") for label, _ in reversed(rows)])
    axes.set_title(f"the rival's time over ours (above 1: ours is faster), {card}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_name(card)}.svg"
    with writing(path):
        chart.savefig(path, metadata={"Date": None})
    pyplot.close(chart)
    return [path]
