"""One of two ranks of ``fully_shard``ed models, over gloo on a CPU.

``python -m tests.integrations.fsdp_rank RANK STORE`` prints one JSON object; test_fsdp.py starts
both.  ``KILL`` in the environment: rank 1 kills itself in the middle of a step.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cute_kernels as ck
from cute_kernels.integrations import fsdp as ours
from cute_kernels.integrations import publish
from cute_kernels.integrations.sharded_head import Scoring, head_logp
from cute_kernels.integrations.token_logps import token_logps
from cute_kernels.runtime import data_parallel
from tests.contract import same_bytes
from tests.integrations import tiny
from tests.ranks import joined

STEPS = int(os.environ.get("STEPS", "3"))
#: (which modules are sharded by themselves besides the whole, tied head)
CASES = [("model", False), ("layers", False), ("layers and head", False), ("layers", True)]


def sharded(model: torch.nn.Module, which: str, device: str = "cpu") -> tiny.Sharded:
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


def trained(which: str, tied: bool, rank: int, folder: Path) -> dict:
    """Steps against one process's, byte for byte; what is held after each; publication."""
    start = tiny.llama(tied)
    single = copy.deepcopy(start)
    shard = sharded(start, which)
    model = shard.model
    report = tiny.trained(shard, single, rank, STEPS)
    half = tiny.part(tiny.batch(7), rank)
    with torch.no_grad():
        got, want = (token_logps(m.eval(), half["input_ids"]) for m in (model, single))
    report["kept"] += left_over(model)
    report["evaluation"] = same_bytes(got, want)
    report |= {"refused": refused(model), "mutant": only_in_forward(model, half)}
    report["fused"] = tiny.differing_policy_loss(shard, single, rank)
    report["published"] = published(model, single, folder / f"{which}-{tied}")
    return report | {"case": [which, tied]}


def refused(model) -> str:
    """The head outside of any module's call: FSDP2 has it in parts."""
    hidden, target = torch.zeros(1, 2, tiny.WIDTH), torch.zeros(1, 2, dtype=torch.long)
    try:
        head_logp(model.lm_head, hidden, target, Scoring())
    except TypeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def only_in_forward(model, half) -> str:
    """The mutant: gathered by hand around the forward, resharded, and then a backward."""
    holder = model.lm_head if hasattr(model.lm_head, "unshard") else model
    holder.unshard()
    hidden = torch.randn(2, 3, tiny.WIDTH, requires_grad=True)
    logps = head_logp(model.lm_head, hidden, half["input_ids"][:, :3], Scoring())
    holder.reshard()
    try:
        logps.sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "survives"


def published(model, single, path: Path) -> dict:
    # As FSDP2 does by itself with the outermost module: what a forward gathered stays.
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        token_logps(model, tiny.batch(8)["input_ids"])
    ids = {"linear_logp": ck.contract_id("linear_logp", "cpu", torch.float32)}
    made = ours.publish_weights(path, model, {"step": STEPS}, contract_ids=ids)
    dist.barrier()
    tensors, manifest = publish.read_weights(path, contract_ids=ids)
    report = {
        "manifest": made == manifest,
        "differing": tiny.differing(tensors, single.state_dict()),
    }
    report |= {"layout": [manifest.zero_stage, manifest.world_size, manifest.rank]}
    return report | {"kept": left_over(model), "tied": manifest.tied}


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    with joined(rank, store, tiny.RANKS):
        cases = CASES[2:3] if os.environ.get("KILL") else CASES
        reports = [trained(*case, rank, Path(store).parent) for case in cases]
        # Modules and their hooks are cycles, and hold the group.
        gc.collect()
    print(json.dumps(reports))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
