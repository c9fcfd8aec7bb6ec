"""Forward of transformers' experts: sorted rows, grouped products, sums in the order of experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from ....integrations import experts as interface
from ...batch_invariant.api import batch_invariant
from .elements import Elements

#: (activation, gate, up) -> f(gate) up, or None where two steps are needed.
_Gate = Callable[..., torch.Tensor | None]


def forward_of(cls: type, gate_product: _Gate) -> Callable:
    """Return the forward of experts that ``use_experts_implementation`` decorates."""
    author = cls.forward
    signature = inspect.signature(author)

    def activate(module, rows: torch.Tensor) -> torch.Tensor:
        if module.has_gate and interface.gates_by_default(module):
            # Two roundings, as in a dense MLP.
            gate, up = rows.chunk(2, dim=-1)
            product = gate_product(module.act_fn, gate, up)
            if product is not None:
                return product
        return _by_author(module, rows)

    def forward(self, *args, **kwargs):
        if kwargs or len(args) != 3:
            args = tuple(signature.bind(self, *args, **kwargs).arguments.values())[1:]
        return interface.run(self, *args, activate)

    forward.__doc__ = author.__doc__
    forward.__signature__ = signature
    return forward


@torch.compiler.disable
def _by_author(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Compute the author's own gate or activation; a compiled graph breaks there."""
    with batch_invariant(), Elements():
        return module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
