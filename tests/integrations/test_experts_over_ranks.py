"""transformers' mixtures with experts cut over ranks: the bytes of one process; refusals."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cute_kernels.errors import ArgumentTypeError, ArgumentValueError
from cute_kernels.integrations import transformers as ours
from tests import ranks
from tests.integrations.moe_models import model_of
from tests.ranks import joined

pytest.importorskip("transformers.distributed.expert_parallel")
from tests.integrations import expert_parallel_rank

two, four = ranks.pool(2), ranks.pool(4)
PARTS = ("own_function", "fsdp_of_transformers", "shared_batch")


def check_mutant(pool: ranks.Pool, world: int) -> None:
    """First experts have other gradients, and no result of a token differs."""
    for names in pool.run(expert_parallel_rank.last_rank_first, world):
        assert names and "logits" not in names


@pytest.mark.parametrize("part", PARTS)
def test_two_processes_have_the_bytes_of_one(two, part):
    """`shard_experts` under FSDP2; transformers' plan with FSDP2, and with a shared batch."""
    assert two.run(getattr(expert_parallel_rank, part), 2) == [[], []]


def test_another_order_is_killed(two):
    check_mutant(two, 2)


@pytest.mark.nightly
def test_four_processes_have_the_bytes_of_one(four):
    """And `shard_experts` alone, and two copies of each expert under FSDP2."""
    for part in (*PARTS, "copies"):
        assert four.run(getattr(expert_parallel_rank, part), 4) == [[]] * 4
    check_mutant(four, 4)


@pytest.fixture
def alone(tmp_path):
    """A group of this process."""
    ours.register()
    with joined(0, str(tmp_path / "store"), 1):
        yield dist.group.WORLD


def test_refused_by_name(alone, monkeypatch):
    model = model_of("qwen3_moe")
    module = model.model.layers[1].mlp.experts
    name = "model.layers.1.mlp.experts"
    with pytest.raises(ArgumentValueError, match="model: expected modules decorated"):
        ours.shard_experts(torch.nn.Linear(2, 2), alone)
    for owner, attribute, value, error, words in (
        (module, "num_experts", 3, ArgumentValueError, "gate_up_proj: expected a first dimension"),
        (dist.ProcessGroup, "size", lambda group: 3, ArgumentValueError, "a multiple of 3.*got 8"),
        (torch.nn.Parameter, "to_local", id, ArgumentTypeError, "fully_shard.*, got a DTensor"),
    ):
        with monkeypatch.context() as patch, pytest.raises(error, match=words):
            patch.setattr(owner, attribute, value, raising=False)
            ours.shard_experts(model, alone)
    assert module.num_experts == 8 and not module._is_expert_parallel
    assert ours.shard_experts(model, alone)[1] == name
    with pytest.raises(ArgumentValueError, match=r"experts that are not cut over ranks yet"):
        ours.shard_experts(model, alone)
    x, index = torch.randn(4, 256).bfloat16(), torch.zeros(4, 1).long()
    assert module(x, index, torch.ones(4, 1)).shape == x.shape
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(ArgumentValueError, match=r"experts_implementation: .*got 'grouped_mm'"):
        module(x, index, torch.ones(4, 1))
