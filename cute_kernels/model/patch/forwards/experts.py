"""Forward of transformers' experts: sorted rows, grouped products, sums in the order of experts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch

from ....integrations import experts as interface
from ....moe import api as moe
from . import fused, modes


def linears(module: torch.nn.Module) -> interface.Linears:
    """Return the products of experts on one rank, in the order of their notes."""
    order = module._cute_kernels.order
    product = functools.partial(moe.grouped_linear, order=order)
    return interface.Linears(product, product, halves=order == "tree")


def forward_of(
    cls: type,
    linears_of: Callable[[torch.nn.Module], interface.Linears] = linears,
) -> Callable:
    """Return the forward of experts that ``use_experts_implementation`` decorates."""
    author = cls.forward
    signature = inspect.signature(author)

    def activate(module, *parts: torch.Tensor) -> torch.Tensor:
        if module.has_gate and interface.gates_by_default(module):
            # Two roundings, as in a dense MLP.
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
            product = fused.gate_product(module.act_fn, gate, up)
            if product is not None:
                return product
        return _by_author(module, parts[0] if len(parts) == 1 else torch.cat(parts, -1))

    def forward(self, *args, **kwargs):
        if kwargs or len(args) != 3:
            args = tuple(signature.bind(self, *args, **kwargs).arguments.values())[1:]
        return interface.run(self, *args, activate, linears_of(self))

    forward.__doc__ = author.__doc__
    forward.__signature__ = signature
    return forward


@torch.compiler.disable
def _by_author(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Compute the author's own gate or activation; a compiled graph breaks there."""
    with modes.by_ours():
        return module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
