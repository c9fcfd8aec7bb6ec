"""``fully_shard`` over one dimension of a mesh and ``ck.patch(mesh=)`` over the other."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import cute_kernels as ck
from tests.contract import same_bytes
from tests.model.parallel import cases

_FULL = StateDictOptions(full_state_dict=True)
STEPS = 2


def shard(net: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """``fully_shard`` each layer, and the rest, over the other dimension."""
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(net, mesh=mesh["dp"])


def training(family: str, mesh: DeviceMesh) -> list[str]:
    """Gradients and weights that differ from one process's, which averages both halves'."""
    reference, net = cases.model(family).train(), cases.model(family).train()
    ck.patch(reference, order="tree")
    ck.patch(net, order="tree", mesh=mesh["tp"])
    shard(net, mesh)
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
        want, actual = cases.gradients(reference), cases.gradients(net)
        wrong += [f"{n} {step}" for n in want if not same_bytes(want[n], actual[n])]
        norms = [cases.clipped(m) for m in (reference, net)]
        wrong += [f"norm {step}"] * (not same_bytes(*norms))
        for optimizer in optimizers:
            optimizer.step()
    state = get_model_state_dict(net, options=_FULL)
    return wrong + [n for n, t in reference.state_dict().items() if not same_bytes(t, state[n])]


def checkpoints(mesh: DeviceMesh) -> dict:
    """A checkpoint of 2 x 2 ranks, loaded by 2 ranks and by one process; what is refused."""
    folder = cases.shared_folder()
    source = cases.model("llama")
    want = source.state_dict()
    net = cases.model("llama")
    ck.patch(net, order="tree", mesh=mesh["tp"], main_grad=True)
    shard(net, mesh)
    checkpoint.save({"model": net.state_dict()}, checkpoint_id=folder)
    out = {}
    for name in ("cut", "whole"):
        other = cases.model("llama", seed=4)
        if name == "cut":
            ck.patch(other, order="tree", mesh=mesh["tp"])
        state = {"model": other.state_dict()}
        checkpoint.load(state, checkpoint_id=folder)
        loaded = get_model_state_dict(other, options=_FULL)
        out[name] = [n for n, t in want.items() if not same_bytes(t, loaded[n])]
    for p in net.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    ids = cases.tokens()
    early = shard(cases.model("llama"), mesh)
    calls = {
        "unpatch": lambda: ck.unpatch(net),
        "patch": lambda: ck.patch(early, order="tree", mesh=mesh["tp"]),
        "main_grad": lambda: net.train()(ids, labels=ids, use_cache=False),
    }
    for name, call in calls.items():
        try:
            call()
            out[name] = "nothing"
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out
