"""``fully_shard`` over one dimension of a mesh and ``ck.patch(mesh=)`` over the other."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import cute_kernels as ck
from tests.contract import same_bytes
from tests.model import refusals
from tests.model.parallel import cases

STEPS = 2


def shard(net: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """``fully_shard`` each layer, and the rest, over the other dimension."""
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(net, mesh=mesh["dp"])


def training(family: str, mesh: DeviceMesh) -> list[str]:
    """Gradients and weights that differ from one process's, which averages both halves'."""
    reference = cases.patched(family, None).train()
    net = shard(cases.patched(family, mesh["tp"]).train(), mesh)
    halves = cases.tokens(4).chunk(2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, foreach=True) for m in (reference, net)]
    wrong = []
    for step in range(STEPS):
        sums = []
        for half in halves:
            reference.zero_grad()
            reference(half, labels=half, use_cache=False).loss.backward()
            sums.append({name: p.grad.clone() for name, p in reference.named_parameters()})
        for name, p in reference.named_parameters():
            p.grad = (sums[0][name] + sums[1][name]) / 2
        half = halves[mesh["dp"].get_local_rank()]
        net.zero_grad()
        net(half, labels=half, use_cache=False).loss.backward()
        differing = cases.different(cases.gradients(reference), cases.gradients(net))
        norms = [cases.clipped(m) for m in (reference, net)]
        wrong += [f"{n} {step}" for n in differing] + cases.failing(norm=same_bytes(*norms))
        for optimizer in optimizers:
            optimizer.step()
    state = get_model_state_dict(net, options=cases.FULL)
    return wrong + cases.different(reference.state_dict(), state)


def checkpoints(mesh: DeviceMesh) -> list[str]:
    """A checkpoint of 2 x 2 ranks, loaded by 2 ranks and by one process; what is refused."""
    folder = cases.shared_folder()
    want = cases.model("llama").state_dict()
    net = shard(cases.patched("llama", mesh["tp"], main_grad=True), mesh)
    checkpoint.save({"model": net.state_dict()}, checkpoint_id=folder)
    checks: dict[str, object] = {}
    for name in ("cut", "whole"):
        other = cases.model("llama", seed=4)
        if name == "cut":
            ck.patch(other, order="tree", mesh=mesh["tp"])
        checkpoint.load({"model": other.state_dict()}, checkpoint_id=folder)
        checks[name] = cases.different(want, get_model_state_dict(other, options=cases.FULL))
    for p in net.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    ids, early = cases.tokens(), shard(cases.model("llama"), mesh)
    calls = {
        "PatchError ... fully_shard": lambda: ck.unpatch(net),
        "ArgumentTypeError ... q_proj": lambda: ck.patch(early, order="tree", mesh=mesh["tp"]),
        "ArgumentValueError: main_grad": lambda: net.train()(ids, labels=ids, use_cache=False),
    }
    for name, call in calls.items():
        message = "nothing"
        try:
            call()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        checks[name] = refusals.agrees(name, message)
    return cases.failing(**checks)
