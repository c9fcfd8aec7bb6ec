"""Tiny models that 1, 2 and 4 ranks can cut, and what is compared with one rank's."""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cute_kernels as ck
from cute_kernels.model.parallel import clip
from tests import ranks
from tests.contract import same_bytes
from tests.model.patch import families

WORLD = 4

#: Sizes whose leaves are cut by 4 ranks; as many heads of keys as ranks.
_SIZES = {
    "vocab_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
#: Families whose head size follows the hidden size.
_WIDE = {name: {"hidden_size": 256} for name in ("gpt_neox", "phi3", "olmoe")}
STEPS, RATE = 3, 0.02
#: Gradients are clipped to this norm.
MOST = 0.25


def model(name: str, device: str = "cpu", **settings: object) -> torch.nn.Module:
    """A model in bf16, with -0.0 among the entries of its embedding."""
    net = families.model(name, **{**_SIZES, **_WIDE.get(name, {}), **settings})
    with torch.no_grad():
        table = net.get_input_embeddings().weight
        table[::3, ::5] = -0.0
    return net.to(device)


def tokens(batch: int = 2, length: int = 20, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, _SIZES["vocab_size"], (batch, length), generator=generator)


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def gradients(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name."""
    return {f"grad {name}": whole(p.grad) for name, p in net.named_parameters()}


def gradients_of_trained(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of whole gradients by name, of the parameters that have one."""
    trained = ((name, p.grad) for name, p in net.named_parameters() if p.grad is not None)
    return {name: whole(grad.detach().clone()) for name, grad in trained}


def clipped(net: torch.nn.Module) -> torch.Tensor:
    """The norm of all gradients, which are clipped; of one process by ``ck.clip_grad_norm_``."""
    cut = any(hasattr(p, "placements") for p in net.parameters())
    function = clip.clip_grad_norm_ if cut else ck.clip_grad_norm_
    return function(net.parameters(), MOST)


def results(net: torch.nn.Module, brief: bool = False) -> dict[str, torch.Tensor]:
    """Everything that is promised of a model, by name; its weights are those after three steps.

    brief: logits and their gradients alone.
    """
    ids = tokens().to(net.device)
    out = {"embedding": net.get_input_embeddings()(ids).detach()}
    out["logits"] = families.logits(net, ids)
    if not brief:
        options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        sampled = net.generate(ids[:, :7], max_new_tokens=4, **options)
        out |= {"generated": sampled.sequences, "of cache": torch.stack(sampled.logits)}
    net.train()
    # A loss of logits: the head's own gradient, and that of its input.
    (net(ids, use_cache=False).logits.float() ** 3).mean().backward()
    out |= {f"{name} of logits": t for name, t in gradients(net).items()}
    if brief:
        return out
    net.zero_grad()
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, foreach=True)  # as on a GPU
    for step in range(STEPS):
        loss = net(ids, labels=ids, use_cache=False).loss
        loss.backward()
        out[f"loss {step}"] = loss.detach()
        if step == 0:
            out |= {name: t.clone() for name, t in gradients(net).items()}
            out["norm"] = clipped(net)
        optimizer.step()
        optimizer.zero_grad()
    return out | {name: whole(t) for name, t in net.state_dict().items()}


@functools.cache
def of_one(name: str, device: str = "cpu", **settings: object) -> dict[str, torch.Tensor]:
    """Results of one process."""
    net = model(name, device, **settings)
    ck.patch(net, order="tree")
    return results(net)


def differing(name: str, mesh: DeviceMesh, brief: bool = False, **settings: object) -> list[str]:
    """Names of the results that differ from one rank's, of a model that is cut over a mesh."""
    device = mesh.device_type
    net = model(name, device, **settings)
    ck.patch(net, order="tree", mesh=mesh)
    actual, expected = results(net, brief), of_one(name, device, **settings)
    assert brief or actual.keys() == expected.keys()
    return different(actual, expected)


def different(expected: dict, actual: dict) -> list[str]:
    """Names of the expected tensors that are others."""
    return [n for n, t in expected.items() if n not in actual or not same_bytes(actual[n], t)]


def shared_folder() -> Path:
    """A new folder, the same on every rank."""
    folders = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folders)
    return Path(folders[0])


def loaded_by_transformers(family: str, mesh: DeviceMesh, saves: bool = True) -> dict:
    """A model that transformers' own tensor parallelism loaded, which is cut on."""
    from transformers.distributed import DistributedConfig

    # transformers cuts over all ranks that the environment names.
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": "0"}
    folder, source = shared_folder(), model(family)
    if dist.get_rank() == 0:
        source.save_pretrained(folder / "whole")
    dist.barrier()
    auto, config = transformers.AutoModelForCausalLM, DistributedConfig(tp_size=WORLD)
    net = auto.from_pretrained(folder / "whole", dtype=torch.bfloat16, distributed_config=config)
    parts = {id(p) for p in net.parameters() if hasattr(p, "placements")}
    ck.patch(net, order="tree", mesh=mesh, strict=True)
    taken = parts <= {id(p) for p in net.parameters()}
    saved = []
    if saves:  # of experts, save_pretrained has other names
        net.save_pretrained(folder / "again")
        dist.barrier()
        again = auto.from_pretrained(folder / "again", dtype=torch.bfloat16).state_dict()
        saved = different(source.state_dict(), again)
    return {"taken": taken, "saved": saved, "differing": different(of_one(family), results(net))}


def patching(name: str, degree: object = 2, change: Callable | None = None, **settings: object):
    """Return a call that patches a model, changed before, over a mesh."""
    options = {n: settings.pop(n) for n in ("linear", "order") if n in settings}

    def call(meshes: dict) -> None:
        net = model(name, **settings)
        if change is not None:
            change(net)
        ck.patch(net, **{"order": "tree", "mesh": meshes.get(degree, degree), **options})

    return call


def reports(module: str, parts: list[str], world: int = WORLD) -> list[dict]:
    """What each rank returns of these parts of a module."""
    return ranks.run(world, report, f"tests.model.parallel.{module}", parts)


def report(module: str, parts: list[str]) -> dict:
    """Run parts, functions of a module's `PARTS`, as a rank."""
    world, table = dist.get_world_size(), importlib.import_module(module).PARTS
    meshes = {world: init_device_mesh("cpu", (world,))}
    if world == WORLD:
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        alone = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("dp", "tp"))
        meshes |= {2: two["tp"], 1: alone["tp"], "2d": two}
    return {part: table[part](meshes) for part in parts}


def refusals(table: dict[str, tuple], meshes: dict) -> dict[str, str]:
    """Name -> "right", "nothing", or the error that came in place of the one that is meant.

    table: name -> (call of the meshes, name of the error, fragments of its message).
    """
    verdicts = {}
    for name, (call, kind, fragments) in table.items():
        try:
            call(meshes)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            right = message.startswith(kind) and all(part in message for part in fragments)
            verdicts[name] = "right" if right else message
        else:
            verdicts[name] = "nothing"
    return verdicts
