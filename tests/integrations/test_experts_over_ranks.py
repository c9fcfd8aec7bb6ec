"""transformers' mixtures with experts cut over ranks: the bytes of one process; refusals.

Functions that ranks call return what differs from one process with all sequences.
"""

from __future__ import annotations

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError, ArgumentValueError
from cute_kernels.integrations import transformers as ours
from cute_kernels.moe import exchange
from tests import ranks
from tests.contract import same_bytes
from tests.integrations.moe_models import VOCABULARY, WIDTH, model_of, tokens
from tests.moe.parallel_cases import orders_by_sources_descending
from tests.ranks import joined

pytest.importorskip("transformers.distributed.expert_parallel")
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.utils import initialize_distributed_mesh

two, four = ranks.pool(2), ranks.pool(4)


@functools.cache
def _patched() -> torch.nn.Module:
    ours.register()
    model = model_of("qwen3_moe")
    ck.patch(model, strict=False)
    return model


def patched() -> torch.nn.Module:
    """A copy of one patched model: a mixture takes a second of a CPU to observe."""
    return copy.deepcopy(_patched())


def patched_and_cut() -> torch.nn.Module:
    model = patched()
    assert len(ours.shard_experts(model, dist.group.WORLD)) == len(model.model.layers)
    return model


def passed(model, ids: torch.Tensor, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits of a model, and the gradients of all parameters, forward and backward of it."""
    with ck.batch_invariant():
        logits = model(ids).logits
        logits.backward(upstream)
    named = dict(model.named_parameters())
    return {"logits": logits.detach()} | {name: p.grad for name, p in named.items()}


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


class Batches:
    """Sequences of all ranks, uneven, and what one process makes of them together."""

    def __init__(self, sizes: tuple[int, ...], first: int = 0):
        self.sizes = sizes
        rows = slice(first, first + sum(sizes))
        self.ids = tokens(7)[rows]
        shape = *tokens(7).shape, VOCABULARY
        generator = torch.Generator().manual_seed(5)
        self.upstream = torch.randn(shape, generator=generator).to(torch.bfloat16)[rows]
        self.whole = passed(patched(), self.ids, self.upstream)

    def span(self, index: int) -> slice:
        first = sum(self.sizes[:index])
        return slice(first, first + self.sizes[index])

    def differing(self, model, index: int, part: int, parts: int, dense=False, scale=1):
        """Results that are not those of one process: logits, experts, and dense ones if asked.

        Args:
            index: Of the batch that this rank has.
            part, parts: Of the experts that this rank has.
            scale: What gradients of experts are multiplied by, as FSDP2 divides them.
        """
        span = self.span(index)
        got = passed(model, self.ids[span], self.upstream[span])
        pairs = {"logits": (got["logits"], self.whole["logits"][span])}
        for name in got.keys() - pairs.keys():
            if ".experts." in name:
                pairs[name] = local(got[name]) * scale, self.whole[name].chunk(parts)[part]
            elif dense:
                pairs[name] = local(got[name]), self.whole[name]
        assert len(pairs) > 4
        return [name for name, (value, want) in pairs.items() if not same_bytes(value, want)]


@functools.cache
def batches(world: int) -> Batches:
    return Batches((3, 1, 2, 1)[:world])


def own_function(world: int) -> list[str]:
    """`shard_experts`, alone (nightly) and with FSDP2 for the rest of the model."""
    rank = dist.get_rank()
    names = batches(world).differing(patched_and_cut(), rank, rank, world) if world == 4 else []
    model = patched()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    ours.shard_experts(model, mesh)
    experts = {p for name, p in model.named_parameters() if ".experts." in name}
    assert experts and all(p.shape[0] == 8 // world for p in experts)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)
    return names + batches(world).differing(model, rank, rank, world)


def last_rank_first(world: int) -> list[str]:
    """The mutant: in the order of the last rank's tokens first."""
    rank = dist.get_rank()
    with mock.patch.object(exchange, "_orders", orders_by_sources_descending):
        return batches(world).differing(patched_and_cut(), rank, rank, world)


def fsdp_of_transformers(world: int) -> list[str]:
    rank, model = dist.get_rank(), distributed(fsdp_size=world, ep_size=world)
    return batches(world).differing(model, rank, rank, world, scale=world)


def distributed(**sizes) -> torch.nn.Module:
    """The model of one process, cut as ``from_pretrained(distributed_config=)`` cuts it.

    (That function itself asks for accelerate.)
    """
    config = DistributedConfig(ep_implementation=ours.NAME, **sizes)
    model = patched()
    _, meshes = initialize_distributed_mesh(config)
    return type(model).maybe_distribute_model(model, config, meshes)


def shared_batch(world: int) -> list[str]:
    """Experts cut by transformers over pairs of ranks that hold one batch; all else is on every.

    (``tp_plan={}``, which would ask for that, is refused by transformers 5.23.)
    """
    sizes = {"tp_size": 2, "fsdp_size": world // 2, "ep_size": world}
    _, meshes = initialize_distributed_mesh(DistributedConfig(**sizes))
    model, rank = patched(), dist.get_rank()
    plan = model._expand_parallel_plan(model.ep_plan)
    apply_expert_parallelism(
        model, meshes.get_mesh("ep"), meshes.get_mesh("tp"), plan, ep_implementation=ours.NAME
    )
    shared = Batches((3, 1)[: world // 2])
    return shared.differing(model, rank // 2, rank, world, dense=world == 2)


def copies(world: int) -> list[str]:
    """EP 2 with FSDP2 of 4: two copies of each expert, whose gradients FSDP2 adds."""
    every = batches(world)
    halves = Batches(every.sizes[:2]), Batches(every.sizes[2:], sum(every.sizes[:2]))
    span = every.span(dist.get_rank())
    got = passed(distributed(fsdp_size=4, ep_size=2), every.ids[span], every.upstream[span])
    wrong = [] if same_bytes(got["logits"], every.whole["logits"][span]) else ["logits"]
    for name, grad in got.items():
        if ".experts." in name:
            want = halves[0].whole[name] + halves[1].whole[name]
            wrong += [name] * (not same_bytes(grad.full_tensor() * 4, want))
    return wrong


PARTS = own_function, fsdp_of_transformers, shared_batch


def check_mutant(pool: ranks.Pool, world: int) -> None:
    """First experts have other gradients, and no result of a token differs."""
    for names in pool.run(last_rank_first, world):
        assert names and "logits" not in names


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_two_processes_have_the_bytes_of_one(two, part):
    """`shard_experts` under FSDP2; transformers' plan with FSDP2, and with a shared batch."""
    assert two.run(part, 2) == [[], []]


def test_another_order_is_killed(two):
    check_mutant(two, 2)


@pytest.mark.nightly
def test_four_processes_have_the_bytes_of_one(four):
    """And `shard_experts` alone, and two copies of each expert under FSDP2."""
    for part in (*PARTS, copies):
        assert four.run(part, 4) == [[]] * 4
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
    x, index = torch.randn(4, WIDTH).bfloat16(), torch.zeros(4, 1).long()
    assert module(x, index, torch.ones(4, 1)).shape == x.shape
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(ArgumentValueError, match=r"experts_implementation: .*got 'grouped_mm'"):
        module(x, index, torch.ones(4, 1))
