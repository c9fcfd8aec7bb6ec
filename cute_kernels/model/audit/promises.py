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
    kinds = {module: _kind(module) for module in model.modules()}
    holders: dict[int, list[nn.Module]] = {}
    for module in kinds:
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    look_ups = [(n, m) for n, m in model.named_modules() if "embedding" in (kinds[m] or "")]
    positions = [module for module, kind in kinds.items() if kind == "positions"]
    broadcast = {id(m.weight) for _, m in authors.broadcast_embeddings(look_ups, positions)}
    excused: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        modules = holders[id(parameter)]
        if all(kinds[module] for module in modules):
            excused.add(name)
            if len(modules) > 1 or id(parameter) in broadcast:
                excused.add(f"{name}.main_grad")
    return excused


def _kind(module: nn.Module) -> str | None:
    return None if isinstance(module, torch.jit.ScriptModule) else state.kind_of(module)
