"""Tiny models that 1, 2 and 4 ranks can cut, and what is compared with one rank's."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cute_kernels as ck
from cute_kernels.model.parallel import clip
from tests.contract import same_bytes
from tests.model.patch import families

#: Sizes of the groups of ranks, and the degrees by which each of them cuts models.
WORLDS = {2: (1, 2), 4: (4,), 8: (8,)}
#: Sizes whose leaves are cut by 4 ranks; as many heads of keys as ranks.
_SIZES = {"vocab_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4}
#: Families whose head size follows the hidden size.
_WIDE = {name: {"hidden_size": 256} for name in ("gpt_neox", "phi3", "olmoe")}
EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
STEPS, RATE = 2, 0.02
#: Gradients are clipped to this norm.
MOST = 0.25
FULL = StateDictOptions(full_state_dict=True)


def model(name: str, device: str = "cpu", **settings: object) -> torch.nn.Module:
    """A model in bf16, with -0.0 among the entries of its embedding."""
    net = families.model(name, **{**_SIZES, **_WIDE.get(name, {}), **settings})
    with torch.no_grad():
        table = net.get_input_embeddings().weight
        table[::3, ::5] = -0.0
    return net.to(device)


def patched(name: str, mesh: DeviceMesh | None, **settings: object) -> torch.nn.Module:
    """A model that is cut over a mesh, if there is one: a copy of what was patched once."""
    return copy.deepcopy(_patched(name, mesh, **settings))


@functools.cache
def _patched(name: str, mesh: DeviceMesh | None, **settings: object) -> torch.nn.Module:
    return patched_anew(name, mesh, **settings)


def patched_anew(name: str, mesh: DeviceMesh | None, main_grad: bool = False, **settings: object):
    net = model(name, **settings)
    ck.patch(net, order="tree", mesh=mesh, main_grad=main_grad)
    return net


def tokens(batch: int = 2, length: int = 20, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, _SIZES["vocab_size"], (batch, length), generator=generator)


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def wholes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: whole(t) for name, t in tensors.items()}


def gradients(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of whole gradients by name, of the parameters that have one."""
    trained = ((name, p.grad) for name, p in net.named_parameters() if p.grad is not None)
    return {f"grad {name}": whole(grad.detach().clone()) for name, grad in trained}


def is_cut(net: torch.nn.Module) -> bool:
    return any(hasattr(p, "placements") for p in net.parameters())


def clipped(net: torch.nn.Module, most: float = MOST, **options: object) -> torch.Tensor:
    """The norm of all gradients, which are clipped; of one process by ``ck.clip_grad_norm_``."""
    function = clip.clip_grad_norm_ if is_cut(net) else ck.clip_grad_norm_
    return function(net.parameters(), most, **options)


def results(net: torch.nn.Module, brief: bool = False) -> dict[str, torch.Tensor]:
    """Everything that is promised of a model, by name; its weights are those after all steps.

    brief: logits and their gradients alone.
    """
    ids = tokens().to(net.device)
    out = {"embedding": net.get_input_embeddings()(ids).detach()}
    out["logits"] = families.logits(net, ids)
    if not brief:
        options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        sampled = net.generate(ids[:, :7], max_new_tokens=3, **options)
        out |= {"generated": sampled.sequences, "of cache": torch.stack(sampled.logits)}
    net.train()
    # A loss of logits: the head's own gradient, and that of its input.
    (net(ids, use_cache=False).logits.float() ** 3).mean().backward()
    out |= {f"{name} of logits": t for name, t in gradients(net).items()}
    net.zero_grad()
    if brief:
        return out
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, foreach=True)  # as on a GPU
    for step in range(STEPS):
        loss = net(ids, labels=ids, use_cache=False).loss
        loss.backward()
        out[f"loss {step}"] = loss.detach()
        if step == 0:
            out |= gradients(net)
            out["norm"] = clipped(net)
        optimizer.step()
        optimizer.zero_grad()
    return out | wholes(net.state_dict())


@functools.cache
def of_one(name: str, device: str = "cpu", **settings: object) -> dict[str, torch.Tensor]:
    """Results of one process; on a CPU rank 0's, which the others get."""
    if device != "cpu" or dist.get_rank() == 0:
        want = results(patched(name, None, device=device, **settings))
    if device != "cpu":
        return want
    file = shared_folder() / "results"
    if dist.get_rank() == 0:
        torch.save(want, file)
    dist.barrier()
    return torch.load(file)


def differing(name: str, mesh: DeviceMesh, brief: bool = False, **settings: object) -> list[str]:
    """Names of the results that differ from one rank's, of a model that is cut over a mesh."""
    device = mesh.device_type
    expected = of_one(name, device, **settings)
    actual = results(patched(name, mesh, device=device, **settings), brief)
    assert brief or actual.keys() == expected.keys()
    return different(actual, expected)


def different(expected: dict, actual: dict) -> list[str]:
    """Names of the expected tensors that are others."""
    return [n for n, t in expected.items() if n not in actual or not same_bytes(actual[n], t)]


def failing(**checks: object) -> list[str]:
    """Names of checks that do not hold: a flag that is not set, a list with entries."""
    items = {n: v if isinstance(v, list) else [""] * (not v) for n, v in checks.items()}
    return [f"{name} {item}" for name, each in items.items() for item in each]


def shared_folder() -> Path:
    """A new folder, the same on every rank."""
    folders = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folders)
    return Path(folders[0])


@functools.cache
def meshes() -> dict:
    """The mesh of each degree, of one process (None) and, of four ranks, 2 x 2; on this rank."""
    world, names = dist.get_world_size(), {"mesh_dim_names": ("dp", "tp")}
    by_degree = {
        degree: init_device_mesh("cpu", (world // degree, degree), **names)
        for degree in (1, 2, 4, 8)
        if degree <= world
    }
    return {None: None, "2d": by_degree[2]} | {d: mesh["tp"] for d, mesh in by_degree.items()}


def call(part: Callable[[dict], list[str]]) -> list[str]:
    """What a part says that is wrong, on this rank."""
    return part(meshes())
