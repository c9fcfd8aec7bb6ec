"""Checkpoints, whole state dicts and clipping of a mixture: experts' gate and up are one weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cute_kernels as ck
from cute_kernels.model.parallel import shards
from tests.contract import same_bytes
from tests.model.parallel import cases, optimizers, sharded

FAMILY = "mixtral"
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
#: How a model is cut: over no mesh, over a degree of `meshes`, or by ``fully_shard`` besides.
Layout = int | str | None


def _model(layout: Layout, meshes: dict, seed: int = 3) -> tuple[torch.nn.Module, object]:
    """A model that is cut, and its optimizer after a step; seed: of the step's tokens."""
    net = cases.patched(FAMILY, meshes[2 if layout == "2d" else layout]).train()
    if layout == "2d":
        sharded.shard(net, meshes["2d"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=cases.RATE, foreach=True)
    ids = cases.tokens(seed=seed)
    net(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return net, optimizer


def _whole(net: torch.nn.Module, optimizer: object) -> dict[str, torch.Tensor]:
    """Whole weights, and states of the optimizer, by name."""
    out = cases.wholes(net.state_dict())
    for name, p in net.named_parameters():
        state = optimizer.state[p].items()
        out |= {f"{key} of {name}": cases.whole(t) for key, t in state}
    return out


def _saved(net: torch.nn.Module, optimizer: object) -> str:
    folder = cases.shared_folder()
    weights, states = get_state_dict(net, optimizer)
    checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return folder


def _load(net: torch.nn.Module, optimizer: object, folder: str) -> None:
    weights, states = get_state_dict(net, optimizer)
    state = {"model": weights, "optimizer": states}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def checkpoints(meshes: dict, layouts: Sequence[Layout]) -> dict[str, list[str]]:
    """What differs, by layouts: of those who save a checkpoint, and of those who load it."""
    models = {layout: _model(layout, meshes) for layout in layouts}
    want = {name: t.clone() for name, t in _whole(*models[None]).items()}
    out = {f"{layout}": cases.different(want, _whole(*of)) for layout, of in models.items()}
    folders = {layout: _saved(*of) for layout, of in models.items()}
    for target in layouts:
        loaded = _model(target, meshes, seed=4)
        for source, folder in folders.items():
            _overwrite(loaded[0])
            _load(*loaded, folder)
            out[f"{source} in {target}"] = cases.different(want, _whole(*loaded))
    return out


@torch.no_grad()
def _overwrite(net: torch.nn.Module) -> None:
    for p in net.parameters():
        p.fill_(3.0)


def whole_states(meshes: dict, layouts: Sequence[Layout]) -> dict[str, list[str]]:
    """What differs of whole state dicts that cut models take; redistributed gradients; clipping."""
    want, out = cases.model(FAMILY).state_dict(), {}
    takers: dict[str, Callable] = {
        "load_state_dict": lambda net: net.load_state_dict(want),
        "every rank's": lambda net: _set(net, want),
        "rank 0's": lambda net: _set(net, want, broadcast_from_rank0=True),
    }
    for layout in filter(None, layouts):
        net, _ = _model(layout, meshes, seed=4)
        for name, take in takers.items():
            _overwrite(net)
            take(net)
            weights = cases.wholes(net.state_dict())
            out[f"{name} {layout}"] = cases.different(want, weights)
        out[f"clipped {layout}"] = optimizers.clipped(net)
        out[f"redistributed {layout}"] = _redistributed(net.get_parameter(GATE_UP).grad)
    return out


def into_meta(meshes: dict) -> list[str]:
    """What differs after a model without memory takes whole tensors by assignment."""
    net, want = cases.model(FAMILY).to("meta"), cases.model(FAMILY, seed=4).state_dict()
    ck.patch(net, order="tree", mesh=meshes[2])
    net.load_state_dict(want, assign=True)
    if any(p.is_meta for p in net.parameters()):
        return ["without memory"]
    return cases.different(want, cases.wholes(net.state_dict()))


#: DTensors that are no parameters of ours: uneven, of two packed dimensions, ``fully_shard``'s.
_LAYOUTS = (
    ((2, 10, 4), Replicate(), shards.packed(1, 3)),
    ((2, 10, 4), Replicate(), shards.packed(0, 2)),
    ((5, 7, 3), Shard(0), shards.packed(1, 2)),
    ((5, 7, 3), shards.packed(1, 2), shards.packed(2, 2)),
    ((8, 4), shards.packed(0, 2), Shard(0)),
    ((4, 6, 4), Shard(1), shards.packed(1, 3)),
)


def other_layouts(meshes: dict) -> list[str]:
    """Layouts whose checkpoint, or what is loaded into them, has other values."""
    mesh, wrong = meshes["2d"], []
    for shape, *layout in _LAYOUTS:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        cut, folder = (
            distribute_tensor(whole, mesh, layout, src_data_rank=None),
            cases.shared_folder(),
        )
        saved, loaded = torch.zeros(shape), torch.zeros_like(cut)
        checkpoint.save({"w": cut}, checkpoint_id=folder)
        checkpoint.load(state := {"w": saved}, checkpoint_id=folder)
        wrong += [f"saved {shape} {layout}"] * (not same_bytes(state["w"], whole))
        checkpoint.load({"w": loaded}, checkpoint_id=folder)
        same = same_bytes(loaded.to_local(), cut.to_local())
        wrong += [f"loaded {shape} {layout}"] * (not same)
    return wrong


def _set(net: torch.nn.Module, want: dict, **options: bool) -> None:
    set_model_state_dict(net, dict(want), options=StateDictOptions(full_state_dict=True, **options))


def _redistributed(gradient: torch.Tensor) -> list[str]:
    whole = gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
    again = whole.redistribute(placements=gradient.placements)
    wrong = [] if same_bytes(whole.to_local(), gradient.full_tensor()) else ["whole"]
    return wrong + ["part"] * (not same_bytes(again.to_local(), gradient.to_local()))
