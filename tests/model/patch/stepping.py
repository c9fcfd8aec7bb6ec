"""A small Llama whose MLPs compute a step by torch before they multiply."""

from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.model.patch import families


class _MLP(LlamaMLP):
    """Parts that torch computes; what runs of them is an attribute of the class."""

    step = staticmethod(lambda x: x)

    def forward(self, x):
        if self.gate_proj.weight.shape[0] < 0:
            x = torch.cumsum(x, dim=1)
        return super().forward(self.step(x))


def llama(step, layers: int = 2) -> torch.nn.Module:
    """A Llama whose MLPs begin with ``step``."""
    net = families.model("llama", num_hidden_layers=layers)
    cls = type("Stepping", (_MLP,), {"step": staticmethod(step)})
    for layer in net.model.layers:
        layer.mlp.__class__ = cls
    return net
