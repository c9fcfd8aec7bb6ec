"""The plots of products: ratios to cuBLAS, and rates over M."""

from __future__ import annotations

from pathlib import Path

from ..core import figure
from ..core.tables import Bench, latest
from . import page, targets

COLORS = {"ours": figure.OURS, "cublas": "#7a9a01", "ours_triton": figure.OTHER}
COLORS |= {"quack": "#7b4fa3", "cublas_starved": "#b5c56a", "quack_untuned": "#b79ad0"}


def ratio_bars(bench: Bench, folder: Path) -> list[Path]:
    """Throughput over cuBLAS's for each shape and product; no file where nothing was measured."""
    points = page.ratio_points(bench)
    if not points:
        return []
    chart, axes = figure.figure()
    width = 0.8 / len(points)
    for index, (product, ratios) in enumerate(points.items()):
        shift = (index - (len(points) - 1) / 2) * width
        positions = [list(targets.SHAPES).index(shape) + shift for shape in ratios]
        axes.bar(positions, list(ratios.values()), width, label=targets.PRODUCT_FORMULAS[product])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(targets.SHAPES)), list(targets.SHAPES))
    axes.set_ylabel("throughput over cuBLAS")
    axes.set_title(figure.title(bench, "GEMM"))
    chart.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure.save(chart, folder, figure.file_name("gemm_ratio", bench))


def sweep_lines(bench: Bench, folder: Path) -> list[Path]:
    """Forward TFLOP/s over M at qkv's K and N, one line for each system."""
    lines, sizes = page.sweep_points(bench), targets.sweep_sizes()
    if not lines:
        return []
    chart, axes = figure.figure()
    for system, points in lines.items():
        name = targets.RIVAL_TEXT.get(system, system)
        axes.plot(*zip(*points, strict=True), marker="o", label=name, color=COLORS[system])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(m) for m in sizes])
    axes.set_xlabel("M")
    axes.set_ylabel("TFLOP/s")
    axes.set_ylim(0, 1.1 * max(rate for points in lines.values() for _, rate in points))
    axes.set_title(figure.title(bench, "GEMM"))
    chart.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure.save(chart, folder, figure.file_name("gemm_sweep", bench))


def write(records: list[dict], folder: Path) -> list[Path]:
    """Every plot that the records support; the paths written."""
    bench = latest(records, "gemm")
    return ratio_bars(bench, folder) + sweep_lines(bench, folder)
