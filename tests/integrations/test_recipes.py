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
FOLDER = ROOT / "examples" / "recipes"
TEXT = (ROOT / PAGE).read_text().partition("## Recipes")[2]
#: Not one of the blocks that every page's are run as (tests/test_docs.py), but alone.
(BLOCK,) = re.findall(r"^```py(?:thon)?\n(.*?)^```$", TEXT, re.M | re.S)


def test_every_recipe_is_run():
    files = re.findall(r"\]\(\.\./examples/recipes/(\w+)\.py\)", TEXT)
    assert files == ["deepspeed_zero3", "fsdp2"]
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == files


def run(name: str, folder: Path, *launcher: str) -> None:
    file = FOLDER / f"{name}.py"
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
    exec(compile(BLOCK, PAGE, "exec"), {})


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install 'cute-kernels[deepspeed]'",
)
def test_deepspeed(tmp_path):
    run("deepspeed_zero3", tmp_path, *TORCHRUN)
    manifest = read_weights(tmp_path / "weights").manifest
    assert (manifest.zero_stage, manifest.world_size, manifest.rank) == (3, 2, 0)


# By day FSDP2 has the bytes of one process: test_fsdp.py.
@pytest.mark.nightly
def test_fsdp2(tmp_path):
    run("fsdp2", tmp_path, *TORCHRUN)
    manifest = read_weights(tmp_path / "weights").manifest
    assert manifest.contract_ids.keys() == {"linear_logp"}
