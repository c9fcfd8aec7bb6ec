"""DeepSpeed engines as one of two ranks over gloo: test_deepspeed.py calls these functions."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from cute_kernels.errors import ArgumentValueError, ManifestError
from cute_kernels.integrations import deepspeed as ours
from cute_kernels.integrations import gathering, sharded_head
from cute_kernels.integrations.token_logps import token_logps
from cute_kernels.logp.api import linear_logp
from tests.contract import same_bytes
from tests.integrations import tiny


def engine_of(model: torch.nn.Module, zero: object, **more: object):
    os.environ |= {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(tiny.RANKS)}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(dist.get_rank()))
    import deepspeed
    from deepspeed.comm import torch as transport

    # A kernel for all_reduce in shared memory, which is compiled at first use (30 s).
    transport.build_shm_op = lambda: None
    if zero:
        # DeepSpeed would keep as small a model as this whole, for the next use.
        names = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
        zero = {"stage": zero} | {f"stage3_{name}": 0 for name in names}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # Its default of 1 would scale them.
        "gradient_clipping": 0.0,
        **more,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=tiny.optimizer(model), config=config, dist_init_required=False
    )
    return engine


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        with gathering.whole((parameter,)):
            found[name] = parameter.detach().clone()
    return found


def left_over(module: torch.nn.Module) -> list[str]:
    """Parameters of stage 3 that are still there."""
    return [name for name, p in module.named_parameters() if p.numel()]


def backward(engine, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of all ranks, by name."""
    from deepspeed.utils import safe_get_full_grad

    engine.backward(loss)
    named = engine.module.named_parameters()
    return {name: safe_get_full_grad(p).clone() for name, p in named}


def sharded(model: torch.nn.Module, stage: int) -> tiny.Sharded:
    engine = engine_of(model, stage or False)
    assert ours.zero_stage(engine) == stage
    return tiny.Sharded(
        engine,
        functools.partial(backward, engine),
        engine.step,
        lambda: whole(engine.module),
        lambda: left_over(engine.module) if stage == 3 else [],
    )


def train(stage: int, tied: bool, steps: int, folder: Path | None = None) -> None:
    rank, start = dist.get_rank(), tiny.llama(tied)
    single = copy.deepcopy(start)
    shard = sharded(start, stage)
    tiny.check_training(shard, single, rank, steps)
    try:  # ids outside of the vocabulary: an error on every rank, before any collective
        token_logps(shard.model, torch.full((2, 4), tiny.VOCAB))
        raise AssertionError("nothing is refused")
    except ArgumentValueError as error:
        assert str(error) == "input_ids: expected ids of a vocabulary of 96, got 96"
    if folder is not None:
        tiny.check_publication(shard, single, ours.publish_weights, folder, stage)
        try:
            ours.publish_weights(folder, shard.model, version=0)
            raise AssertionError("a version twice")
        except ManifestError as error:
            assert "version 0 does not rise above 0" in str(error)
            assert str(error).startswith("rank 0 did not publish") == (rank > 0)
    shard.model.destroy()


def gather_head(tied: bool) -> None:
    """The head by itself, with nobody's hooks: gathered around its forward and its backward."""
    start = tiny.llama(tied)
    single = copy.deepcopy(start)
    shard = sharded(start, 3)
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

    with mock.patch.object(gathering, "whole", only_in_forward):
        try:
            survives = all(map(same_bytes, run(), want))
        except Exception:
            survives = False
    assert not survives and head.weight.numel() == 0


def train_mixed(stage: int, how: str) -> None:
    """bf16 weights, or autocast; with checkpointing, and two batches for one step."""
    model = tiny.llama().train()
    model.gradient_checkpointing_enable()
    single, rotary = copy.deepcopy(model), copy.deepcopy(model.model.rotary_emb)
    if how == "bf16":
        # DeepSpeed casts parameters, and leaves this buffer.
        single.bfloat16().model.rotary_emb = rotary
    asked = {"enabled": True} if how == "bf16" else {"enabled": True, "dtype": "bfloat16"}
    engine = engine_of(model, stage, gradient_accumulation_steps=2, **{how: asked})
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
    assert stage < 3 or not left_over(engine.module)
    engine.destroy()


def kill_one() -> None:
    """Rank 1 kills itself in the middle of a step of stage 3."""
    start = tiny.llama()
    shard = sharded(copy.deepcopy(start), 3)
    tiny.differing_steps(shard, start, dist.get_rank(), 3, killed=1)
