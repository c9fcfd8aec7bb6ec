"""The picture: how far the log-prob of each token drifts between rollout and training."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch

from ..cli.common import writing
from .measure import Column

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_TORCH, _OURS = "#d1495b", "#00798c"


def drift(columns: tuple[Column, Column], folder: Path) -> list[Path]:
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
