"""transformers' mixtures with experts cut over ranks: the bytes of one process; refusals.

expert_parallel_rank.py has what each process runs.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cute_kernels.errors import ArgumentTypeError, ArgumentValueError
from cute_kernels.integrations import transformers as ours
from tests.integrations.moe_models import model_of
from tests.ranks import joined, reports

pytest.importorskip("transformers.distributed.expert_parallel")


def check_processes(world: int, folder) -> None:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs torch.distributed with gloo")
    for rank in reports("tests.integrations.expert_parallel_rank", world, folder, str(world)):
        # In the order of the last rank's tokens first experts have other gradients, and no result
        # of a token differs.
        mutant = rank["own"].pop("mutant")
        assert mutant and "logits" not in mutant
        assert rank == {"own": {"plain": [], "fsdp": []}, "fsdp": [], "shared": [], "copies": []}


def test_two_processes_have_the_bytes_of_one(tmp_path):
    """`shard_experts` under FSDP2; transformers' plan with FSDP2, and with a shared batch."""
    check_processes(2, tmp_path)


@pytest.mark.nightly
def test_four_processes_have_the_bytes_of_one(tmp_path):
    """And `shard_experts` alone, and two copies of each expert under FSDP2."""
    check_processes(4, tmp_path)


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
    with monkeypatch.context() as patch:
        patch.setattr(module, "num_experts", 3)
        with pytest.raises(ArgumentValueError, match=r"gate_up_proj: expected a first dimension"):
            ours.shard_experts(model, alone)
    with monkeypatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "size", lambda group: 3)
        with pytest.raises(
            ArgumentValueError, match=r"experts: .*a multiple of 3, the ranks.*got 8"
        ):
            ours.shard_experts(model, alone)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Parameter, "to_local", lambda t: t, raising=False)
        with pytest.raises(ArgumentTypeError, match=r"before fully_shard\), got a DTensor"):
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
