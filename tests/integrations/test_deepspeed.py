"""DeepSpeed, ZeRO 0 to 3: two real processes against one, byte for byte."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ManifestError,
    MissingPackageError,
)
from cute_kernels.integrations import deepspeed as ours
from cute_kernels.integrations import gathering, sharded_head
from cute_kernels.integrations.token_logps import token_logps
from cute_kernels.logp.api import linear_logp
from tests import ranks
from tests.contract import same_bytes
from tests.integrations import tiny

two = ranks.pool(tiny.RANKS)


def train(stage: int, tied: bool, steps: int, folder: Path | None = None) -> None:
    rank, single = dist.get_rank(), tiny.llama(tied)
    shard = tiny.zero_sharded(copy.deepcopy(single), stage)
    assert ours.zero_stage(shard.model) == stage
    tiny.check_training(shard, single, rank, steps)
    # Ids outside of the vocabulary: an error on every rank, before any collective.
    with pytest.raises(ArgumentValueError, match=r"input_ids: .*a vocabulary of 96, got 96"):
        token_logps(shard.model, torch.full((2, 4), tiny.VOCAB))
    if folder is not None:
        tiny.check_publication(shard, single, ours.publish_weights, folder, stage)
        first = "^rank 0 did not publish: .*" if rank else "^(?!rank 0 did not).*"
        with pytest.raises(ManifestError, match=f"{first}version 0 does not rise above 0"):
            ours.publish_weights(folder, shard.model, version=0)
    shard.model.destroy()


def gather_head(tied: bool) -> None:
    """The head by itself, with nobody's hooks: gathered around its forward and its backward."""
    single = tiny.llama(tied)
    shard = tiny.zero_sharded(copy.deepcopy(single), 3)
    assert not tiny.differing_steps(shard, single, dist.get_rank(), 1)
    engine = shard.model
    from deepspeed import zero

    gathers, sizes, true = [], [], zero.GatheredParameters
    head, size = engine.module.lm_head, tiny.VOCAB * tiny.WIDTH
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 5, tiny.WIDTH, generator=generator).requires_grad_()
    target = torch.randint(0, tiny.VOCAB, (2, 5), generator=generator)
    target[0, 1] = -100
    scoring = sharded_head.Scoring(return_entropy=True, softcap=5.0)
    upstream = [torch.randn(2, 5, generator=generator) for _ in range(2)]

    def counted(parameters, **options):
        gathers.append(len(parameters))
        return true(parameters, **options)

    def run() -> list[torch.Tensor]:
        gathers.clear()
        out = sharded_head.head_logp(head, hidden, target, scoring)
        sizes[:] = [head.weight.numel()]
        gradients = torch.autograd.grad(out, [hidden, head.weight], upstream)
        sizes.append(head.weight.numel())
        return [t.detach() for t in (*out, *gradients)]

    out = linear_logp(hidden, single.lm_head.weight, target, **vars(scoring))
    want = [*out, *torch.autograd.grad(out, [hidden, single.lm_head.weight], upstream)]
    want = [t.detach() for t in want]
    with mock.patch.object(zero, "GatheredParameters", counted):
        assert all(map(same_bytes, run(), want)) and len(want) == 4
        # Nothing is left after the forward, nor after the backward; one gather for each.
        assert (sizes, gathers) == ([0, 0], [1, 1])
        with true([head.weight]):  # what is there already is neither gathered nor released
            assert all(map(same_bytes, run(), want))
            assert (sizes, gathers) == ([size, size], [])
        embedding, tied = engine.module.model.embed_tokens, single.config.tie_word_embeddings
        with gathering.whole((head.weight, None, head.weight, embedding.weight)):
            assert gathers == [1 if tied else 2]
    # The mutant: the backward trusts the forward's gather.
    whole_, calls = gathering.whole, []

    def only_in_forward(parameters):
        calls.append(1)
        return whole_(parameters) if len(calls) == 1 else contextlib.nullcontext()

    with mock.patch.object(gathering, "whole", only_in_forward), pytest.raises(RuntimeError):
        run()
    assert head.weight.numel() == 0


def train_mixed(stage: int, how: str) -> None:
    """bf16 weights, or autocast; with checkpointing, and two batches for one step."""
    model = tiny.llama().train()
    model.gradient_checkpointing_enable()
    single, rotary = copy.deepcopy(model), copy.deepcopy(model.model.rotary_emb)
    if how == "bf16":
        # DeepSpeed casts parameters, and leaves this buffer.
        single.bfloat16().model.rotary_emb = rotary
    asked = {"enabled": True} if how == "bf16" else {"enabled": True, "dtype": "bfloat16"}
    engine = tiny.engine_of(model, stage, gradient_accumulation_steps=2, **{how: asked})
    half = tiny.part(tiny.batch(0), dist.get_rank())
    ids, mask, losses = half["input_ids"], half["attention_mask"], []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=how != "bf16"):
        assert same_bytes(*(token_logps(m, ids, attention_mask=mask) for m in (engine, single)))
    for _ in range(3):
        loss = -token_logps(engine, ids, attention_mask=mask).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[0] == losses[1] != losses[2]  # two batches make one step
    assert stage < 3 or not tiny.left_over(engine.module)
    engine.destroy()


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
    two.run(train, stage, tied, 3, tmp_path)


@needs_deepspeed
@pytest.mark.parametrize("tied", [False, True])
def test_stage_3_gathers_and_releases_a_head(two, tied):
    """Once for each pass, and not what is there; a mutant whose backward does not is noticed."""
    two.run(gather_head, tied)


@needs_deepspeed
@pytest.mark.parametrize("how", ["bf16", "torch_autocast"])
@pytest.mark.parametrize("stage", [1, 3])
def test_mixed_precision_with_checkpointing_and_accumulation(two, stage, how):
    two.run(train_mixed, stage, how)


@needs_deepspeed
def test_a_killed_rank_ends_the_others(two):
    two.assert_error_not_hang(1, tiny.kill_one, functools.partial(tiny.zero_sharded, stage=3))


@needs_deepspeed
@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "tied"), CASES)
def test_twenty_steps(two, stage, tied):
    two.run(train, stage, tied, 20)


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
