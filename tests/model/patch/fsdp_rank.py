"""One of two ranks of a patched model under FSDP2 and under DDP, over gloo on a CPU.

`report` has what each does; test_fsdp.py compares.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import cute_kernels as ck
from cute_kernels.model.patch import state
from tests.contract import same_bytes
from tests.model.patch import families

RANKS = 2
TOKENS = families.ids(4, 24)


def sharded(net: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in net.model.layers:
        fully_shard(layer.mlp.up_proj, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(net.lm_head, mesh=mesh)
    return fully_shard(net, mesh=mesh)


@functools.cache
def alone() -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """The logits; and the mean of both halves' gradients as reduced by FSDP2, by one process."""
    net = families.model("qwen3")
    ck.patch(net)
    logits, halves, losses = families.logits(net, TOKENS), [], []
    net.train()
    for half in TOKENS.chunk(RANKS):
        net.zero_grad()
        loss = net(half, labels=half, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        halves.append({n: p.grad.clone() for n, p in net.named_parameters()})
    mean = {n: (halves[0][n] + halves[1][n]) / RANKS for n in halves[0]}
    return logits, mean, torch.stack(losses)


def compared(net: torch.nn.Module, run: torch.nn.Module, rank: int) -> dict:
    """Logits, loss and gradients of this rank's half, against one process byte for byte."""
    logits, gradients, losses = alone()
    half = TOKENS.chunk(RANKS)[rank]
    same = same_bytes(families.logits(run.eval(), half), logits.chunk(RANKS)[rank])
    loss = run.train()(half, labels=half, use_cache=False).loss
    loss.backward()
    got = {
        n: getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for n, p in net.named_parameters()
    }
    return {
        "logits": same,
        "loss": same_bytes(loss.detach(), losses[rank]),
        "differing": [n for n in gradients if not same_bytes(got[n], gradients[n])],
    }


def under_ddp(rank: int) -> dict:
    net = families.model("qwen3")
    ck.patch(net, strict=True)
    return compared(net, DistributedDataParallel(net), rank)


def ran(order: str, rank: int) -> dict:
    """Patched before fully_shard or after it."""
    net = families.model("qwen3")
    if order == "patch first":
        ck.patch(net, strict=True)
    net = sharded(net)
    if order == "fully_shard first":
        ck.patch(net, strict=True)
    linear = net.model.layers[0].mlp.up_proj
    report = compared(net, net, rank) | {
        "order": order,
        "kinds": [state.kind_of(linear), state.kind_of(net.lm_head)],
        "classes": [isinstance(linear, FSDPModule), isinstance(linear, torch.nn.Linear)],
        "name": type(linear).__name__,
    }
    ck.unpatch(net)
    report["after"] = [state.kind_of(linear), isinstance(linear, FSDPModule)]
    families.logits(net, TOKENS.chunk(RANKS)[rank])
    return report


def report() -> list[dict]:
    rank = dist.get_rank()
    reports = [ran(order, rank) for order in ("patch first", "fully_shard first")]
    return [*reports, under_ddp(rank)]
