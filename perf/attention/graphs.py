"""A rival's backward through autograd, on graphs that the first call of each input set leaves.

So later calls are the backward alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.rival import Call
from .cases import Inputs


def backward(run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Call:
    """(dq, dk, dv) of an input set; ``run``: q, k, v -> out."""
    graphs: dict[int, tuple[list[Tensor], Tensor]] = {}

    def call(t: Inputs) -> tuple[Tensor, ...]:
        key = t.q.data_ptr()
        if key not in graphs:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
                graphs[key] = leaves, run(*leaves)
        leaves, out = graphs[key]
        return torch.autograd.grad(out, leaves, t.dout, retain_graph=True)

    return call
