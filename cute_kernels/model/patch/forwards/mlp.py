"""Forward of a gated MLP whose activation and product are one launch, with the bytes of two."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..scan.mlp import is_gated
from .residual import alike

#: (activation, gate, up) -> f(gate) up, or None where two steps are needed.
_Gate = Callable[..., torch.Tensor | None]


def forward_of(cls: type, gate_product: _Gate) -> Callable:
    """Return the forward of an MLP; the author's own where it is not known."""
    author = cls.forward
    if not is_gated(cls):
        return author

    def forward(self, x):
        # down(f(gate(x)) · up(x))
        gate, up = self.gate_proj(x), self.up_proj(x)
        product = gate_product(self.act_fn, gate, up) if alike(gate, up) else None
        return self.down_proj(self.act_fn(gate) * up if product is None else product)

    forward.__doc__ = author.__doc__
    return forward
