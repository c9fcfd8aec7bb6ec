"""Programs around a cut model: torch's optimizers, clipping, frozen parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

import cute_kernels as ck
from tests.model.parallel import cases

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
    out = cases.wholes(net.state_dict())
    states = get_optimizer_state_dict(net, optimizer, options=cases.FULL)["state"]
    for name, state in states.items():
        out |= {f"{key} of {name}": t for key, t in state.items() if isinstance(t, torch.Tensor)}
    return out


def programs(family: str, mesh: DeviceMesh, names: Iterable[str] = OPTIMIZERS) -> list[str]:
    """What differs from one process's: names of weights and states, by optimizer."""
    reference, cut = _model(family, None), _model(family, mesh)
    wrong = []
    for name in names:
        # Copies: deepcopy keeps hooks and DTensors.
        want, actual = (_trained(copy.deepcopy(net), OPTIMIZERS[name]) for net in (reference, cut))
        wrong += [f"{name}: {key}" for key in cases.different(want, actual)]
        wrong += [f"{name}: {key}" for key in actual.keys() - want]
    kinds = {type(p.data).__name__ for p in cut.parameters()}
    frozen = [name for name, p in cut.named_parameters() if not p.requires_grad]
    wrong += cases.failing(kinds=kinds == {"DTensor"}, frozen=frozen == ["model.norm.weight"])
    return wrong + clipped(cut)


def clipped(net: torch.nn.Module) -> list[str]:
    """torch's clipping takes the gradients; its norm is of another order, so not compared in bits.

    The norms that remain are compared with what was asked for; so are ours.
    """
    ids = cases.tokens()
    net(ids, labels=ids, use_cache=False).loss.backward()
    exact = _norm(net)
    norm = float(cases.whole(torch.nn.utils.clip_grad_norm_(net.parameters(), cases.MOST)))
    left = _norm(net) / min(cases.MOST, exact)
    return cases.failing(norm=abs(norm / exact - 1) < 2**-7, clip=abs(left - 1) < 2**-6)


def _norm(net: torch.nn.Module) -> float:
    squares = [g.double().square().sum() for g in cases.gradients(net).values()]
    return float(torch.stack(squares).sum().sqrt())


def failing_forward(mesh: DeviceMesh) -> list[str]:
    """After a forward that raises a module has its parameters again."""
    net, raised = _model("llama", mesh), False
    norm = net.model.norm
    try:
        norm(torch.zeros(2, 3))
    except Exception:
        raised = hasattr(norm.weight, "placements")
    ck.unpatch(net)
    hooks = [*norm._forward_hooks, *norm._forward_pre_hooks, *norm._forward_hooks_always_called]
    return cases.failing(raised=raised, hooks=not hooks, plain=not cases.is_cut(net))
