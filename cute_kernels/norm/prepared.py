"""The SM90 launcher for calls like an earlier one (`again`): one launch and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..compile.call import allocator, prepared
from . import launch
from .config import LAYER
from .tensors import Rule, Scale

#: Where the rows are among the kernel's arguments: x, residual, h and y.
_ROWS = (0, 1, 4, 5)


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, scale: Scale, rule: Rule
) -> Callable | None:
    """``run(x, residual, weight, bias, ...)`` of all operands like these: (y, h, mean, rstd).

    x and residual: contiguous [..., D].  What else a call has is left alone.  None where an operand
    would be copied or made.
    """
    width = x.shape[-1]
    rows, added = (None if t is None else t.view(-1, width) for t in (x, residual))
    given = rows, added, *scale
    taken = launch.taken(rows, added, scale, rule)
    if any(one is not other for one, other in zip(taken, given, strict=True)):
        return None
    kernel, ctas = launch.forward_kernel(rows, added, scale.weight, rule.kind, width)
    m, layer = rows.shape[0], rule.kind == LAYER
    run_kernel = prepared(x.device, kernel, rows=() if x.dim() == 2 else _ROWS)
    numbers = *launch.forward_numbers(rule, width), ctas
    empty = allocator(x.shape, x.dtype, x.device)
    empty_number = allocator((m,), torch.float32, x.device)

    def run(x, residual, weight, bias, *_):
        y, rstd = empty(), empty_number()
        h = None if residual is None else empty()
        mean = empty_number() if layer else None
        run_kernel(x, residual, weight, bias, h, y, mean, rstd, *numbers)
        return y, h, mean, rstd

    return run
