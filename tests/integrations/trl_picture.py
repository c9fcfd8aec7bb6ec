"""Draws docs/plots/trl_ratio: ``python -m tests.integrations.trl_picture``; needs trl.

The importance ratio of each token at the first step, of a patched and of an unpatched model, in the
trainer of test_trl.py, on this machine's CPU.
"""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path

import matplotlib
import torch
import trl

from cute_kernels import arch
from tests.integrations import trl_step
from tests.ranks import ROOT

PICTURE = ROOT / "docs" / "plots" / "trl_ratio.png"
#: Whether the model is patched -> its dots.
COLOURS = {False: "#c2572b", True: "#1f5fa8"}


def measured(folder: Path, patched: bool) -> tuple[torch.Tensor, float]:
    """(the ratio of each token, the KL to the reference) of one step."""
    path = trl_step.checkpoint(folder / f"model_{patched}")
    given = {"patched": patched, "unchecked": not patched}
    one = trl_step.trainer(path, trl_step.tokenizer(), folder / f"out_{patched}", **given)
    one.train()
    return trl_step.ratios(one), one.state.log_history[0]["kl"]


def main() -> None:
    """Draw a dot a token, and say how many of them are not at 1."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for patched, colour in COLOURS.items():
        with tempfile.TemporaryDirectory() as folder:
            ratio, kl = measured(Path(folder), patched)
        off, model = int((ratio != 1).sum()), "after ck.patch" if patched else "as it is"
        label = f"{model}: {off} of {len(ratio)} ratios are not 1; KL {kl:g}"
        axes.plot(range(len(ratio)), ratio, "o", markersize=3.5, color=colour, label=label)
    axes.set_xlabel("token of the completions")
    axes.set_ylabel("importance ratio at the first step")
    where = f"CPU, {arch.describe('cpu').arch}, {datetime.date.today()}"
    axes.set_title(f"TRL {trl.__version__}, SampledLogps, a small random Llama, bf16; {where}")
    axes.legend(loc="upper left")
    picture.savefig(PICTURE, dpi=160, metadata={"Software": None})


if __name__ == "__main__":
    main()
