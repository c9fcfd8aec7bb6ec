"""Top-k with a stated order of ties, and look-ups along rows whose gradients add in one order.

torch.topk says nothing of equal elements, and the gradient of torch.gather adds by atomics on CUDA.
Here the lowest index of equal elements comes first, and repeated indices add in their order.
"""

from __future__ import annotations

import torch

from ....moe import checks, routing_op
from ....moe.config import MAX_EXPERTS
from ....runtime import checking

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def topk(x, k, dim=-1, largest=True, sorted=True, *, out=None):
    """Return the k largest elements of each row and their places, descending."""
    if not _are_rows(x, dim) or not largest or out is not None or not 1 <= k <= x.shape[-1]:
        return NotImplemented
    shape = (*x.shape[:-1], k)
    with torch.no_grad():
        wide = x.detach().float().reshape(-1, x.shape[-1])
        places = routing_op.select(wide, None, int(k), 1, 1).long()
    return torch.return_types.topk((_look_up(x, places).view(shape), places.view(shape)))


def gather(x, dim, index, *, sparse_grad=False, out=None):
    """Return the elements of each row at these places."""
    rows = _are_rows(x, dim) and index.shape[:-1] == x.shape[:-1] and index.shape[-1] > 0
    if not rows or index.dtype != torch.int64 or out is not None:
        return NotImplemented
    places = index.reshape(-1, index.shape[-1])
    # To moe an index outside is a slot that is not used; to torch it is an error.
    if not torch.compiler.is_compiling() and checking.in_memory(places) is not None:
        checks.index_values(places, x.shape[-1])
    return _look_up(x, places).view(index.shape)


def _are_rows(x: object, dim: int) -> bool:
    """Whether these are rows that a program holds, along the last dimension."""
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES or not x.dim():
        return False
    return dim in (-1, x.dim() - 1) and 1 <= x.shape[-1] <= MAX_EXPERTS


def _look_up(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    wide = x.float().reshape(-1, x.shape[-1])
    return routing_op.weights(wide, places, False, 1.0).to(x.dtype)
