"""``fully_shard``ed models as one of two ranks over gloo: test_fsdp.py calls these functions."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cute_kernels.integrations import fsdp as ours
from cute_kernels.integrations.sharded_head import Scoring, head_logp
from cute_kernels.integrations.token_logps import token_logps
from cute_kernels.runtime import data_parallel
from tests.integrations import tiny


def sharded(model: torch.nn.Module, which: str, device: str = "cpu") -> tiny.Sharded:
    """A model of which ``which`` modules are sharded by themselves besides the whole."""
    mesh = init_device_mesh(device, (tiny.RANKS,))
    if "layers" in which:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
    if "head" in which:
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = tiny.optimizer(model)

    def backward(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        loss.backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return tiny.Sharded(model, backward, step, lambda: gathered(model), lambda: left_over(model))


def gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def left_over(model: torch.nn.Module) -> list[str]:
    """Parameters of which this rank holds more than its part, and memory of whole ones."""
    found = []
    for name, p in model.named_parameters():
        if not hasattr(p, "to_local") or p.to_local().numel() * tiny.RANKS != p.numel():
            found.append(name)
    mine = {id(p) for p in model.parameters()}
    for one in data_parallel._gathered(sys.modules[data_parallel.FSDP2_STATES]):
        whole = getattr(one, "_unsharded_param", None)
        if id(one.sharded_param) in mine and whole is not None:
            found += ["a whole one"] * (whole.untyped_storage().size() > 0)
    return found


def train(which: str, tied: bool, steps: int, folder: Path | None = None) -> None:
    start = tiny.llama(tied)
    single = copy.deepcopy(start)
    shard = sharded(start, which)
    tiny.check_training(shard, single, dist.get_rank(), steps)
    if folder is not None:
        # As FSDP2 does by itself with the outermost module: what a forward gathered stays.
        shard.model.set_reshard_after_forward(False)
        with torch.no_grad():
            token_logps(shard.model, tiny.batch(8)["input_ids"])
        tiny.check_publication(shard, single, ours.publish_weights, folder, 3)


def refuse_parts(which: str) -> str:
    """The head outside of any module's call: FSDP2 has it in parts."""
    head = sharded(tiny.llama(), which).model.lm_head
    hidden, target = torch.zeros(1, 2, tiny.WIDTH), torch.zeros(1, 2, dtype=torch.long)
    try:
        head_logp(head, hidden, target, Scoring())
    except TypeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def gather_in_the_forward_only(which: str) -> str:
    """The mutant: gathered by hand around the forward, resharded, and then a backward."""
    model = sharded(tiny.llama(), which).model
    token_logps(model, tiny.batch(0)["input_ids"])
    holder = model.lm_head if hasattr(model.lm_head, "unshard") else model
    holder.unshard()
    hidden = torch.randn(2, 3, tiny.WIDTH, requires_grad=True)
    logps = head_logp(model.lm_head, hidden, tiny.batch(0)["input_ids"][:2, :3], Scoring())
    holder.reshard()
    try:
        logps.sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "survives"


def kill_one() -> None:
    """Rank 1 kills itself in the middle of a step."""
    start = tiny.llama()
    shard = sharded(copy.deepcopy(start), "layers and head")
    tiny.differing_steps(shard, start, dist.get_rank(), 3, killed=1)
