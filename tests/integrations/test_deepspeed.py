"""DeepSpeed, ZeRO 0 to 3: two real processes against one, byte for byte (zero_rank.py)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from cute_kernels.errors import ArgumentTypeError, MissingPackageError
from cute_kernels.integrations import deepspeed as ours
from tests import ranks
from tests.integrations import tiny, zero_rank

two = ranks.pool(tiny.RANKS)
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install 'cute-kernels[deepspeed]'",
)
#: (stage, tied head)
CASES = [(0, False), (1, False), (2, False), (2, True), (3, False), (3, True)]


@needs_deepspeed
@pytest.mark.parametrize(("stage", "tied"), CASES)
def test_steps_have_the_bytes_of_one_process(two, tmp_path, stage, tied):
    """Log-probs, the gradients of all ranks, the weights after each step of AdamW; publication."""
    two.run(zero_rank.train, stage, tied, 3, tmp_path)


@needs_deepspeed
@pytest.mark.parametrize("tied", [False, True])
def test_stage_3_gathers_and_releases_a_head(two, tied):
    """Once for each pass, and not what is there; a mutant whose backward does not is noticed."""
    two.run(zero_rank.gather_head, tied)


@needs_deepspeed
@pytest.mark.parametrize("how", ["bf16", "torch_autocast"])
@pytest.mark.parametrize("stage", [1, 3])
def test_mixed_precision_with_checkpointing_and_accumulation(two, stage, how):
    two.run(zero_rank.train_mixed, stage, how)


@needs_deepspeed
def test_a_killed_rank_ends_the_others(two):
    two.assert_error_not_hang(1, zero_rank.kill_one)


@needs_deepspeed
@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "tied"), CASES)
def test_twenty_steps(two, stage, tied):
    two.run(zero_rank.train, stage, tied, 20)


@needs_deepspeed
def test_no_engine():
    with pytest.raises(ArgumentTypeError, match=r"engine: expected .*DeepSpeedEngine, got Llama"):
        ours.zero_stage(tiny.llama())
    with pytest.raises(ArgumentTypeError, match=r"engine: expected .*DeepSpeedEngine, got Linear"):
        ours.publish_weights("nowhere", torch.nn.Linear(2, 2))


def test_without_deepspeed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"deepspeed: pip install 'cute-kernels\[deepsp"):
        ours.zero_stage(tiny.llama())


def test_importing_loads_no_deepspeed():
    code = (
        "import sys; from cute_kernels.integrations import deepspeed, fsdp, transformers; "
        "sys.exit(any(m in sys.modules for m in ('deepspeed', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
