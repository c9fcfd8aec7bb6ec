"""The plots of the status page, SVG and PNG, from the latest records."""

from __future__ import annotations

from pathlib import Path

from .. import report
from ..attention import page
from . import targets

COLORS = {"ours": "#1f5fa8", "cublas": "#7a9a01", "ours_triton": "#c2572b", "quack": "#7b4fa3"}
COLORS |= {"cublas_starved": "#b5c56a", "quack_untuned": "#b79ad0"}


def _figure():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "cute_kernels"
    return pyplot.subplots(figsize=(8, 4.2), layout="constrained")


def _save(figure, folder: Path, name: str) -> list[Path]:
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=160, metadata={"Software": None})
    pyplot.close(figure)
    return paths


def ratio_bars(bench: report.Bench, folder: Path) -> list[Path]:
    """Throughput over cuBLAS's for each shape and product; no file where nothing was measured."""
    found = report.ratio_points(bench)
    if not found:
        return []
    figure, axes = _figure()
    width = 0.8 / len(found)
    for index, (product, ratios) in enumerate(found.items()):
        shift = (index - (len(found) - 1) / 2) * width
        at = [list(targets.SHAPES).index(shape) + shift for shape in ratios]
        axes.bar(at, list(ratios.values()), width, label=targets.PRODUCT_FORMULAS[product])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(targets.SHAPES)), list(targets.SHAPES))
    axes.set_ylabel("throughput over cuBLAS")
    axes.set_title(_title(bench))
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return _save(figure, folder, "gemm_ratio")


def sweep_lines(bench: report.Bench, folder: Path) -> list[Path]:
    """Forward TFLOP/s over M at qkv's K and N, one line for each system."""
    lines, sizes = report.sweep_points(bench), targets.sweep_sizes()
    if not lines:
        return []
    figure, axes = _figure()
    for system, points in lines.items():
        name = targets.RIVAL_TEXT.get(system, system)
        axes.plot(*zip(*points, strict=True), marker="o", label=name, color=COLORS[system])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(m) for m in sizes])
    axes.set_xlabel("M")
    axes.set_ylabel("TFLOP/s")
    axes.set_ylim(0, 1.1 * max(rate for points in lines.values() for _, rate in points))
    axes.set_title(_title(bench))
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return _save(figure, folder, "gemm_sweep")


def order_bars(bench: report.Bench, folder: Path) -> list[Path]:
    """What the order costs our attention backward, by mask, with the prediction and the target."""
    found = page.order_points(bench)
    if not found:
        return []
    figure, axes = _figure()
    at, labels = range(len(found)), list(found)
    measured, predicted, limits = zip(*found.values(), strict=True)
    costs = [ratio - 1 for ratio in measured]
    axes.bar(at, costs, 0.6, bottom=1.0, color=COLORS["ours"], label="measured")
    axes.plot(at, predicted, "D", color=COLORS["ours_triton"], label="predicted")
    axes.plot(at, limits, "_", color="black", markersize=30, label="target, at most")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(at, labels)
    axes.set_ylim(min(0.9, *measured), max(1.2, *(1.02 * x for x in (*measured, *predicted))))
    axes.set_ylabel("ordered over unordered time")
    axes.set_title(_title(bench, "attention backward, D = 128, 16 heads"))
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return _save(figure, folder, "attention_order")


def _title(bench: report.Bench, what: str = "GEMM") -> str:
    cards = sorted(
        {f"{r['gpu']}, {r['date'][:10]}" for r in bench.records.values() if "tflops" in r}
    )
    return f"bf16 {what}, " + "; ".join(cards)


def write(records: list[dict], folder: Path) -> list[Path]:
    """Every plot that the records support; the paths written."""
    bench = report.latest(records)
    attention = report.latest(records, "attention")
    return ratio_bars(bench, folder) + sweep_lines(bench, folder) + order_bars(attention, folder)
