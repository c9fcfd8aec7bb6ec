"""Gradients that a patched model promises, and those that autograd sums over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..patch import state
from ..patch.forwards import authors
from .report import Finding


def split(
    model: nn.Module, findings: Sequence[Finding]
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Split into (findings that break a promise, findings that are information).

    A parameter of modules that are not patched is held to every gradient.  A patched module
    promises that a main_grad does not depend on the micro-batches; autograd rounds ``.grad`` after
    each of them.
    """
    excused = _excused(model)
    information = tuple(
        finding
        for finding in findings
        if finding.transform == "micro_batches" and finding.tensor in excused
    )
    return tuple(finding for finding in findings if finding not in information), information


def _excused(model: nn.Module) -> set[str]:
    """Names of gradients that follow the micro-batches, as ``ck.patch`` says.

    They are ``.grad`` of the parameters that patched modules alone hold, and those main_grads of
    theirs that several modules add into, or that hold broadcast positions.
    """
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    modules = dict(model.named_modules())
    looked_up = [(n, m) for n, m in modules.items() if "embedding" in (_kind(m) or "")]
    position_modules = [module for module in modules.values() if _kind(module) == "positions"]
    ids = {
        id(module.weight) for _, module in authors.broadcast_embeddings(looked_up, position_modules)
    }
    excused: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not all(_kind(module) for module in holders[id(parameter)]):
            continue
        excused.add(name)
        if len(holders[id(parameter)]) > 1 or id(parameter) in ids:
            excused.add(f"{name}.main_grad")
    return excused


def _kind(module: nn.Module) -> str | None:
    return None if isinstance(module, torch.jit.ScriptModule) else state.kind_of(module)
