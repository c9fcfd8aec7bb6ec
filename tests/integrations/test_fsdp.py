"""FSDP2: two real processes against one, byte for byte."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cute_kernels.errors import ArgumentTypeError, GatherError
from cute_kernels.integrations import fsdp as ours
from cute_kernels.integrations.sharded_head import Scoring, head_logp
from cute_kernels.integrations.token_logps import token_logps
from tests import ranks
from tests.integrations import tiny

two = ranks.pool(tiny.RANKS)


def train(which: str, tied: bool, steps: int, folder: Path | None = None) -> None:
    single = tiny.llama(tied)
    shard = tiny.fully_sharded(copy.deepcopy(single), which)
    tiny.check_training(shard, single, dist.get_rank(), steps)
    if folder is not None:
        # As FSDP2 does by itself with the outermost module: what a forward gathered stays.
        shard.model.set_reshard_after_forward(False)
        with torch.no_grad():
            token_logps(shard.model, tiny.batch(8)["input_ids"])
        tiny.check_publication(shard, single, ours.publish_weights, folder, 3)


def refuse_parts(which: str) -> None:
    """The head outside of any module's call, which FSDP2 has in parts; and a mutant.

    The mutant gathers by hand around the forward, reshards, and then runs a backward.
    """
    model = tiny.fully_sharded(tiny.llama(), which).model
    ids = tiny.batch(0)["input_ids"][:2, :3]
    hidden = torch.randn(2, 3, tiny.WIDTH, requires_grad=True)
    with pytest.raises(ArgumentTypeError, match=r"^weight: expected a whole parameter"):
        head_logp(model.lm_head, hidden, ids, Scoring())
    token_logps(model, ids)
    holder = model.lm_head if hasattr(model.lm_head, "unshard") else model
    holder.unshard()
    logps = head_logp(model.lm_head, hidden, ids, Scoring())
    holder.reshard()
    with pytest.raises(GatherError, match=r"^a parameter of the head was resharded"):
        logps.sum().backward()


#: (which modules are sharded by themselves besides the whole, tied head)
CASES = [("model", False), ("layers and head", False), ("layers", True)]


@pytest.mark.parametrize(("which", "tied"), CASES)
def test_steps_have_the_bytes_of_one_process(two, tmp_path, which, tied):
    """Log-probs, the gradients of all ranks, the weights after each step of AdamW; publication.

    Nothing whole is kept between a forward and its backward, after a step, an evaluation and a
    publication.
    """
    two.run(train, which, tied, 2, tmp_path)


@pytest.mark.parametrize("which", ["model", "layers and head"])
def test_parts_are_refused_by_name(two, which):
    two.run(refuse_parts, which)


@pytest.mark.nightly
def test_a_killed_rank_ends_the_others(two):
    two.assert_error_not_hang(
        1, tiny.kill_one, functools.partial(tiny.fully_sharded, which="layers")
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("which", "tied"), [*CASES, ("layers", False)])
def test_twenty_steps(two, which, tied):
    two.run(train, which, tied, 20)


def test_a_model_that_is_not_sharded(tmp_path):
    with pytest.raises(ArgumentTypeError, match="model: expected a module that fully_shard"):
        ours.publish_weights(tmp_path, tiny.llama())
