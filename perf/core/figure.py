"""Size, files, title and colours of every plot of the status pages."""

from __future__ import annotations

import re
from pathlib import Path

from cute_kernels.cli.common import writing

from .tables import Bench

OURS, OTHER = "#1f5fa8", "#c2572b"


def figure():
    """(figure, axes) that draw the same file from the same records."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "cute_kernels"
    return pyplot.subplots(figsize=(8, 4.2), layout="constrained")


def file_name(name: str, bench: Bench) -> str:
    """Name of a plot's file: each GPU model has its own."""
    return f"{name}_{re.sub(r'[^a-z0-9]+', '_', bench.card.lower())}"


def image(alt: str, name: str, bench: Bench) -> str:
    """The line of a status page that shows a plot."""
    return f"![{alt}, {bench.card}](../plots/{file_name(name, bench)}.svg)"


def save(figure, folder: Path, name: str) -> list[Path]:
    """The figure as SVG and PNG."""
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    with writing(paths[0]):
        figure.savefig(paths[0], metadata={"Date": None})
    with writing(paths[1]):
        figure.savefig(paths[1], dpi=160, metadata={"Software": None})
    pyplot.close(figure)
    return paths


def title(bench: Bench, what: str) -> str:
    """Title of a plot: the measurement, the cards and the dates."""
    cards = sorted(
        {f"{r['gpu']}, {r['date'][:10]}" for r in bench.records.values() if "tflops" in r}
    )
    return f"bf16 {what}, " + "; ".join(cards)
