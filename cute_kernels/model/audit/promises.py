"""Gradients that a patched model promises, and those that autograd sums over micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from .report import Finding


def split(
    model: nn.Module, findings: Sequence[Finding]
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """(findings that break a promise, findings that are information).

    A model that is not patched is held to every gradient.  A patched one promises that a main_grad
    does not depend on the micro-batches; autograd rounds ``.grad`` after each of them.
    """
    if not any(hasattr(module, "_cute_kernels") for module in model.modules()):
        return tuple(findings), ()
    shared = _shared(model)
    information = tuple(
        one
        for one in findings
        if one.transform == "micro_batches"
        and (not one.tensor.endswith(".main_grad") or one.tensor in shared)
    )
    return tuple(one for one in findings if one not in information), information


def _shared(model: nn.Module) -> set[str]:
    """Names of main_grads that several modules add into."""
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {f"{name}.main_grad" for name, p in model.named_parameters() if uses[id(p)] > 1}
