"""The plot of attention: what the order of its backward costs."""

from __future__ import annotations

from pathlib import Path

from ..core import figure
from ..core.tables import Bench, latest
from . import page, targets


def order_bars(bench: Bench, folder: Path) -> list[Path]:
    """What the order costs our attention backward, by mask, with the prediction and the target."""
    found = page.order_points(bench)
    if not found:
        return []
    drawn, axes = figure.figure()
    at, labels = range(len(found)), list(found)
    measured, predicted, limits = zip(*found.values(), strict=True)
    costs = [ratio - 1 for ratio in measured]
    axes.bar(at, costs, 0.6, bottom=1.0, color=figure.OURS, label="measured")
    axes.plot(at, predicted, "D", color=figure.OTHER, label="predicted")
    axes.plot(at, limits, "_", color="black", markersize=30, label="target, at most")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(at, labels)
    axes.set_ylim(min(0.9, *measured), max(1.2, *(1.02 * x for x in (*measured, *predicted))))
    axes.set_ylabel("ordered over unordered time")
    drawn_of = {("bwd", page.label(size)) for size in targets.cases(quick=True)}
    own = {case: r for case, r in bench.records.items() if case[1:] in drawn_of}
    axes.set_title(figure.title(Bench(own), "attention backward, D = 128, 16 heads"))
    drawn.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure.save(drawn, folder, figure.file_name("attention_order", bench))


def write(records: list[dict], folder: Path) -> list[Path]:
    """The plot, if the records support it; the paths written."""
    return order_bars(latest(records, "attention"), folder)
