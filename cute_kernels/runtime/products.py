"""Products for systems that are made of them: gemm's launchers, asked for by name.

Bits, layouts and limits are those of docs/gemm.md.  Sizes are above zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..schedulers.tiles import leaves
from . import dispatch


def _launch(entry: str, like: torch.Tensor, *operands: object) -> torch.Tensor:
    """Launch ``entry`` of `dispatch`, planned anew: `dispatch.Launches` plans it once."""
    return dispatch.launcher(entry, like.device, like.dtype)(*operands)


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    order: str = "chain",
    bias: torch.Tensor | None = None,
    accumulator: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    launch: Callable[..., torch.Tensor] = _launch,
) -> torch.Tensor:
    """a [M, K] · b [N, K]ᵀ (+ bias [N]), rounded once; or ``accumulator`` fp32 += the product.

    ``accumulator``: the chain starts from it, and there is no bias.  ``out``: where to put it, of
    the dtype of ``a``; None: in a new tensor.  ``launch``: the `dispatch.Launches` of an op's run.
    """
    return launch("gemm", a, a, b, bias, accumulator, order, out)


def sums(a: torch.Tensor, b: torch.Tensor, order: str) -> torch.Tensor:
    """a [M, K] · b [N, K]ᵀ as it is before its rounding: fp32 [M, N]."""
    length = a.shape[1] if order == "chain" else leaves.length(a.shape[1])
    parts = leaf_sums(a, b, length)
    if len(parts) == 1:
        return parts[0]
    return torch.ops.cute_kernels.add_leaves(parts, None, torch.float32)


def leaf_sums(a: torch.Tensor, b: torch.Tensor, length: int) -> torch.Tensor:
    """The chains over leaves of ``length`` of a [M, K] · b [N, K]ᵀ: fp32 [leaves, M, N]."""
    return _launch("leaf_sums", a, a, b, length)


def column_sum(rows: torch.Tensor, launch: Callable[..., torch.Tensor] = _launch) -> torch.Tensor:
    """Σ over the rows of [M, N], in fp32, rounded once: [N].  ``launch``: as in `product`."""
    return launch("column_sum", rows, rows)
