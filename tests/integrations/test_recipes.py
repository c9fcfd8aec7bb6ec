"""The recipes of the documentation run as they stand: one process, or two under torchrun."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.integrations.publish import read_weights
from tests.hang import HANG_SECONDS
from tests.ranks import ROOT

PAGE = Path("docs/linear_logp.md")
#: ``py``: not one that every page's blocks are run as (tests/test_docs.py), in one process.
FENCE = re.compile(r"^### ([^\n]+)\n(?:(?!^### ).)*?^```py(?:thon)?\n(.*?)^```$", re.M | re.S)
TEXT = (ROOT / PAGE).read_text().partition("## Recipes")[2]
RECIPES = dict(FENCE.findall(TEXT))


def test_every_recipe_is_run():
    assert list(RECIPES) == ["transformers", "DeepSpeed, ZeRO-3", "FSDP2"]
    assert TEXT.count("```py") == len(RECIPES)


def run(name: str, folder: Path, *launcher: str) -> None:
    file = folder / "recipe.py"
    file.write_text(RECIPES[name])
    # CPUs only, as in CI: a recipe takes the GPUs that there are.
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, "-m", "tests.integrations.recipe", str(file)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | settings,
        timeout=HANG_SECONDS,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-4000:]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_transformers():
    exec(compile(RECIPES["transformers"], PAGE, "exec"), {})


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install 'cute-kernels[deepspeed]'",
)
def test_deepspeed(tmp_path):
    run("DeepSpeed, ZeRO-3", tmp_path, *TORCHRUN)
    manifest = read_weights(tmp_path / "weights").manifest
    assert (manifest.zero_stage, manifest.world_size, manifest.rank) == (3, 2, 0)


# By day FSDP2 has the bytes of one process: test_fsdp.py.
@pytest.mark.nightly
def test_fsdp2(tmp_path):
    run("FSDP2", tmp_path, *TORCHRUN)
    manifest = read_weights(tmp_path / "weights").manifest
    assert manifest.contract_ids.keys() == {"linear_logp"}
