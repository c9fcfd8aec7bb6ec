"""One of several ranks of transformers' mixtures whose experts are cut over them, over gloo.

``python -m tests.integrations.expert_parallel_rank RANK STORE WORLD`` prints one JSON object: what
differed from one process with all sequences.  test_experts_over_ranks.py starts all of them.
"""

from __future__ import annotations

import gc
import json
import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.utils import initialize_distributed_mesh

import cute_kernels as ck
from cute_kernels.integrations import transformers as ours
from cute_kernels.moe import exchange
from tests.contract import same_bytes
from tests.integrations.moe_models import model_of, tokens
from tests.moe.parallel_cases import orders_by_sources_descending
from tests.ranks import joined

KIND = "qwen3_moe"


def patched() -> torch.nn.Module:
    model = model_of(KIND)
    ck.patch(model, strict=False)
    return model


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

    def __init__(self, sizes: list[int]):
        self.sizes = sizes
        self.ids = tokens(sum(sizes))
        model = patched()
        generator = torch.Generator().manual_seed(5)
        shape = *self.ids.shape, model.config.vocab_size
        self.upstream = torch.randn(shape, generator=generator).to(torch.bfloat16)
        self.whole = passed(model, self.ids, self.upstream)

    def span(self, index: int) -> slice:
        first = sum(self.sizes[:index])
        return slice(first, first + self.sizes[index])

    def differing(
        self, model, index: int, part: int, parts: int, dense: bool, scale=1
    ) -> list[str]:
        """Results that are not those of one process: logits, experts, and dense ones if asked.

        Args:
            index: Of the batch that this rank has.
            part, parts: Of the experts that this rank has.
            scale: What gradients of experts are multiplied by, as FSDP2 divides them.
        """
        span = self.span(index)
        got = passed(model, self.ids[span], self.upstream[span])
        wrong, compared = [], 0
        for name, want in self.whole.items():
            if name == "logits":
                want, value = want[span], got[name]
            elif ".experts." in name:
                want, value = want.chunk(parts)[part], local(got[name]) * scale
            elif dense:
                value = local(got[name])
            else:
                continue
            compared += 1
            if not same_bytes(value, want):
                wrong.append(name)
        assert compared > 4
        return wrong


def own_function(batches: Batches, rank: int, world: int) -> dict:
    """`shard_experts`, alone and with FSDP2 for the rest of the model."""
    report = {"plain": []}
    if world == 4:  # nightly
        report["plain"] = batches.differing(patched_and_cut(), rank, rank, world, False)
    with mock.patch.object(exchange, "_orders", orders_by_sources_descending):
        report["mutant"] = batches.differing(patched_and_cut(), rank, rank, world, False)
    model = patched()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    ours.shard_experts(model, mesh)
    experts = {p for name, p in model.named_parameters() if ".experts." in name}
    assert experts and all(p.shape[0] == 8 // world for p in experts)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)
    return report | {"fsdp": batches.differing(model, rank, rank, world, False)}


def distributed(**sizes) -> torch.nn.Module:
    """The model of one process, cut as ``from_pretrained(distributed_config=)`` cuts it.

    (That function itself asks for accelerate.)
    """
    config = DistributedConfig(ep_implementation=ours.NAME, **sizes)
    model = patched()
    _, meshes = initialize_distributed_mesh(config)
    return type(model).maybe_distribute_model(model, config, meshes)


def shared_batch(**sizes) -> torch.nn.Module:
    """Experts cut by transformers over ranks that hold one batch; all else is on every rank.

    (``tp_plan={}``, which would ask for that, is refused by transformers 5.23.)
    """
    _, meshes = initialize_distributed_mesh(DistributedConfig(**sizes))
    model = patched()
    plan = model._expand_parallel_plan(model.ep_plan)
    return apply_expert_parallelism(
        model, meshes.get_mesh("ep"), meshes.get_mesh("tp"), plan, ep_implementation=ours.NAME
    )


def copies(batches: Batches, rank: int) -> list[str]:
    """EP 2 with FSDP2 of 4: two copies of each expert, whose gradients FSDP2 adds."""
    groups = [Batches(batches.sizes[:2]), Batches(batches.sizes[2:])]
    ids, upstream = batches.ids.split([len(g.ids) for g in groups]), batches.upstream
    for group, part, up in zip(
        groups, ids, upstream.split([len(g.ids) for g in groups]), strict=True
    ):
        group.ids, group.upstream = part, up
        group.whole = passed(patched(), part, up)
    span = batches.span(rank)
    model = distributed(fsdp_size=4, ep_size=2)
    got = passed(model, batches.ids[span], upstream[span])
    wrong = [] if same_bytes(got["logits"], batches.whole["logits"][span]) else ["logits"]
    for name, grad in got.items():
        if ".experts." in name:
            want = groups[0].whole[name] + groups[1].whole[name]
            wrong += [name] * (not same_bytes(grad.full_tensor() * 4, want))
    return wrong


def main(rank: int, store: str, world: int) -> None:
    torch.set_num_threads(1)
    ours.register()
    with joined(rank, store, world):
        batches = Batches([3, 1, 2, 1][:world])
        report = {"own": own_function(batches, rank, world)}
        model = distributed(fsdp_size=world, ep_size=world)
        report["fsdp"] = batches.differing(model, rank, rank, world, False, scale=world)
        # Two ranks share each batch.
        shared = Batches([3, 1][: world // 2])
        model = shared_batch(tp_size=2, fsdp_size=world // 2, ep_size=world)
        report["shared"] = shared.differing(model, rank // 2, rank, world, dense=world == 2)
        report["copies"] = copies(batches, rank) if world == 4 else []
        del model
        gc.collect()
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
