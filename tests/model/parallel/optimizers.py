"""Programs around a cut model: torch's optimizers, clipping, frozen parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

import cute_kernels as ck
from tests.contract import same_bytes
from tests.model.parallel import cases

_FULL = StateDictOptions(full_state_dict=True)
#: Name -> how an optimizer is made.
OPTIMIZERS = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=cases.RATE, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=cases.RATE, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=cases.RATE, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=False),
}


def _model(family: str, mesh: DeviceMesh | None) -> torch.nn.Module:
    """A patched model whose last norm is frozen; biases are no zeros."""
    net = cases.model(family).train()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith("bias"):
                p.copy_(torch.randn(p.shape, generator=generator) / 4)
    net.model.norm.weight.requires_grad_(False)
    ck.patch(net, order="tree", mesh=mesh)
    return net


def _trained(net: torch.nn.Module, make) -> dict[str, torch.Tensor]:
    """Weights and states of an optimizer after two steps, each of two micro-batches."""
    optimizer = make(net.parameters())
    for seed in range(2):
        for half in cases.tokens(2, seed=seed).split(1):
            net(half, labels=half, use_cache=False, num_items_in_batch=38).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    out = {name: cases.whole(t) for name, t in net.state_dict().items()}
    for name, state in get_optimizer_state_dict(net, optimizer, options=_FULL)["state"].items():
        out |= {f"{key} of {name}": t for key, t in state.items() if isinstance(t, torch.Tensor)}
    return out


def programs(family: str, mesh: DeviceMesh, names: Iterable[str] = OPTIMIZERS) -> list[str]:
    """What differs from one process's: names of weights and states, by optimizer."""
    reference, cut = _model(family, None), _model(family, mesh)
    wrong = []
    for name in names:
        # Copies: deepcopy keeps hooks and DTensors.
        want, actual = (_trained(copy.deepcopy(net), OPTIMIZERS[name]) for net in (reference, cut))
        wrong += [f"{name}: {key}" for key in want | actual if not _same(want, actual, key)]
    kinds = {type(p.data).__name__ for p in cut.parameters()}
    wrong += ["kinds"] * (kinds != {"DTensor"})
    frozen = [name for name, p in cut.named_parameters() if not p.requires_grad]
    wrong += ["frozen"] * (frozen != ["model.norm.weight"])
    return wrong + clipped(cut)


def _same(want: dict, actual: dict, key: str) -> bool:
    return key in want and key in actual and same_bytes(want[key], actual[key])


def clipped(net: torch.nn.Module) -> list[str]:
    """torch's clipping takes the gradients; its norm is of another order, so not compared in bits.

    The norms that remain are compared with what was asked for; so are ours.
    """
    ids, wrong = cases.tokens(), []
    net(ids, labels=ids, use_cache=False).loss.backward()
    before = cases.gradients_of_trained(net)
    norm = cases.whole(torch.nn.utils.clip_grad_norm_(net.parameters(), cases.MOST))
    exact = torch.stack([g.double().square().sum() for g in before.values()]).sum().sqrt()
    wrong += ["torch's norm"] * (abs(float(norm) / float(exact) - 1) > 2**-7)
    after = [g.double().square().sum() for g in cases.gradients_of_trained(net).values()]
    most = min(cases.MOST, float(exact))
    wrong += ["torch's clip"] * (abs(float(torch.stack(after).sum().sqrt()) / most - 1) > 2**-6)
    return wrong


def failing_forward(mesh: DeviceMesh) -> list[str]:
    """After a forward that raises a module has its parameters again."""
    net = _model("llama", mesh)
    norm = net.model.norm
    try:
        norm(torch.zeros(2, 3))
    except Exception as error:
        raised = [] if hasattr(norm.weight, "placements") else [f"left local after {error}"]
    else:
        raised = ["nothing was raised"]
    ck.unpatch(net)
    hooks = [*norm._forward_hooks, *norm._forward_pre_hooks, *norm._forward_hooks_always_called]
    plain = not any(hasattr(p, "placements") for p in net.parameters())
    return raised + ["hooks"] * bool(hooks) + ["DTensors"] * (not plain)
