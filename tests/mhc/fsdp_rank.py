"""One of two ranks with a ``fully_shard``ed `HyperConnection`, over gloo on a CPU.

Both ranks have the same tokens, so that the mean of two equal gradients is one process's, exactly.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cute_kernels.errors import ArgumentValueError
from cute_kernels.mhc import HyperConnection, op, recompute_streams
from tests.contract import same_bytes

WORLD, C = 2, 24


def refusal(module: nn.Module, x: torch.Tensor) -> str:
    """The error of a main_grad that FSDP2 would not reduce."""
    module.phi.main_grad = torch.zeros(24, 4 * C)
    try:
        module(x)
    except ArgumentValueError as error:
        return str(error)[: len("main_grad: expected none")]
    return "nothing"


def recomputed(x: torch.Tensor, cotangent: torch.Tensor, wrap) -> dict[str, object]:
    """Whether three sites, each of which ``wrap`` wraps, have the bytes of one process.

    And how many streams were made again.
    """
    torch.manual_seed(2)
    alone = nn.Sequential(*(HyperConnection(nn.Linear(C, C), C, bias=True) for _ in range(3)))
    with torch.no_grad():
        for site in alone:
            site.bias.normal_()
    module, plain, sizes = wrap(copy.deepcopy(alone)), op.recompute, []

    def counted(x, fs, *args):
        sizes.append(len(fs))
        return plain(x, fs, *args)

    outputs = [alone(x)]
    op.recompute = counted
    with recompute_streams(3):
        outputs.append(module(x))
    for y in outputs:
        y.backward(cotangent)
    op.recompute = plain
    pairs = zip(alone.named_parameters(), module.parameters(), strict=True)
    grads = {name: (p.grad, other.grad) for (name, p), other in pairs}
    grads = {
        name: (one, other.full_tensor() if hasattr(other, "full_tensor") else other)
        for name, (one, other) in grads.items()
    }
    return {
        "differing": [name for name, pair in grads.items() if not same_bytes(*pair)],
        "outputs": same_bytes(*outputs),
        "streams": sizes,
    }


def sharded_sites(mesh):
    """``wrap`` of `recomputed`: each site is sharded by itself, its weights freed after forward."""

    def wrap(module: nn.Module) -> nn.Module:
        for site in module:
            fully_shard(site, mesh=mesh, reshard_after_forward=True)
        return fully_shard(module, mesh=mesh)

    return wrap


def report() -> dict:
    torch.manual_seed(1)
    alone = HyperConnection(nn.Linear(C, C), C, bias=True, norm_weight=True)
    x, cotangent = torch.randn(2, 33, C, 4)
    module = copy.deepcopy(alone)
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(module, mesh=mesh)
    out = [one(x) for one in (alone, module)]
    for y in out:
        y.backward(cotangent)
    sharded = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
    named = alone.named_parameters()
    return {
        "outputs": "same" if same_bytes(*out) else "other",
        "gradients": [name for name, p in named if not same_bytes(p.grad, sharded[name])],
        "refused": refusal(module, x),
        "recomputed": recomputed(x, cotangent, sharded_sites(mesh)),
        "in DDP": recomputed(x, cotangent, nn.parallel.DistributedDataParallel),
    }
