"""The SM90 launcher for calls like an earlier one (`again`): one launch and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..compile.call import allocator, prepared
from ..operands import ALIGN, matrix
from . import launch
from .config import ORDER
from .tiles import Dense


def gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, order: str
) -> Callable | None:
    """``run(x, weight, bias, ...)`` of all operands like these: the bits of `launch.gemm`.

    x: [M, K], or contiguous [..., K] of another number of dimensions; the result is [..., N].
    What else a call has is left alone.

    None where an operand would be copied or the result has padding.
    """
    rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    (m, k), n = rows.shape, weight.shape[0]
    own, major = matrix(rows, "gemm", "a")
    own_weight, weight_major = matrix(weight, "gemm", "b")
    copied = own is not rows or own_weight is not weight or (order != ORDER and major != "k")
    if copied or n * x.itemsize % ALIGN:
        return None
    if bias is not None and bias.stride(0) != 1:
        return None
    tile = launch.choose_tile((m, n, k), order, major, x.device)
    empty, flat = allocator((*x.shape[:-1], n), x.dtype, x.device), rows is not x
    if isinstance(tile, Dense):
        epilogue = "plain" if bias is None else "bias"
        kernel = launch.gemm_kernel(x.dtype, major, weight_major, epilogue, tile, order)
        run_dense = prepared(x.device, kernel, rows=(0, 2) if flat else ())
        clusters = launch.max_clusters(x.device)

        def run(x, weight, bias, *_):
            out = empty()
            run_dense(x, weight, out, bias, clusters)
            return out
    else:
        kernel = launch.skinny_kernel(x.dtype, weight_major, bias is not None, tile, order)
        run_skinny = prepared(x.device, kernel, rows=(1, 2) if flat else ())

        def run(x, weight, bias, *_):
            out = empty()
            run_skinny(weight, x, out, None if bias is None else bias.expand(m, n))
            return out

    return run
