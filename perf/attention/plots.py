"""The plot of attention: what the order of its backward costs."""

from __future__ import annotations

from pathlib import Path

from ..core import figure
from ..core.tables import Bench, latest
from . import page, targets


def order_bars(bench: Bench, folder: Path) -> list[Path]:
    """Bars of the cost of the order in our backward, by mask, with prediction and target."""
    points = page.order_points(bench)
    if not points:
        return []
    chart, axes = figure.figure()
    positions, labels = range(len(points)), list(points)
    measured, predicted, limits = zip(*points.values(), strict=True)
    costs = [ratio - 1 for ratio in measured]
    axes.bar(positions, costs, 0.6, bottom=1.0, color=figure.OURS, label="measured")
    axes.plot(positions, predicted, "D", color=figure.OTHER, label="predicted")
    axes.plot(positions, limits, "_", color="black", markersize=30, label="target, at most")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(positions, labels)
    axes.set_ylim(min(0.9, *measured), max(1.2, *(1.02 * x for x in (*measured, *predicted))))
    axes.set_ylabel("ordered over unordered time")
    drawn_of = {("bwd", page.label(size)) for size in targets.cases(quick=True)}
    quick_records = {case: r for case, r in bench.records.items() if case[1:] in drawn_of}
    axes.set_title(figure.title(Bench(quick_records), "attention backward, D = 128, 16 heads"))
    chart.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure.save(chart, folder, figure.file_name("attention_order", bench))


def write(records: list[dict], folder: Path) -> list[Path]:
    """The plot, if the records support it; the paths written."""
    return order_bars(latest(records, "attention"), folder)
