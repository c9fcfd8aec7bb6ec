"""Launch the Triton kernels of grouped products: outputs, persistent grids, compiler options.

Offsets stay on the device: a grid is as wide as the most tiles that there can be, or as the device.
"""

from __future__ import annotations

from typing import Any

import torch

from ...runtime import triton_products as plans
from ...runtime.operands import most_ctas
from ...schedulers.tiles import leaves
from . import kernel as kernels

#: Stages of grouped_leaves_kernel.
_TREE, _LEAVES = "tree", "leaves"


def grouped_gemm(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """a [T, K] · b[e] [N, K]ᵀ + bias[e] for the rows of each expert e: [T, N].

    Args:
        a, b: bf16, fp16 or fp32, of one dtype and device; any strides, sizes above zero.
        offsets: int32 [E + 1].  Rows of no expert are not written.
        bias: [E, N] in the dtype of ``a``; added in fp32 before the one rounding.

    Runs on the device of ``a`` and its current stream.  The first launch of a (dtype, major,
    alignment) class compiles; do that before a CUDA graph is captured.
    """
    with torch.cuda.device(a.device):
        return _launch_gemm(a, b, offsets, bias, most_ctas(a.device))


def grouped_tree(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`grouped_gemm` in the order ``tree``: one program adds all leaves of a tile."""
    length = leaves.length(a.shape[1])
    with torch.cuda.device(a.device):
        return _launch_leaves(a, b, offsets, bias, length, _TREE, most_ctas(a.device))


def grouped_leaf_sums(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, length: int
) -> torch.Tensor:
    """a [T, K] · b[e] [N, K]ᵀ leaf by leaf: fp32 [ceil(K / length), T, N], each a chain, unrounded.

    K is a slice of a longer one, from the edge of a leaf; ``length``: `leaves.length` of the whole.
    """
    with torch.cuda.device(a.device):
        return _launch_leaves(a, b, offsets, None, length, _LEAVES, most_ctas(a.device))


def grouped_dw(
    dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, accumulator: torch.Tensor | None
) -> torch.Tensor:
    """Σ over the rows t of each expert of dy[t] x[t]ᵀ: [E, N, K], or added to ``accumulator``.

    accumulator: fp32, any strides whose elements do not overlap; each chain starts from it.
    """
    with torch.cuda.device(dy.device):
        return _launch_dw(dy, x, offsets, accumulator, most_ctas(dy.device))


def grouped_column_sum(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Σ over the rows of each expert, any strides: fp32 in a fixed order, one rounding; [E, N]."""
    with torch.cuda.device(rows.device):
        return _launch_sum(rows, offsets)


def _launch_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    programs: int,
    *,
    interpret: bool = False,
) -> torch.Tensor:
    """One launch; ``interpret`` rounds outside the kernel, for Triton's interpreter on a CPU."""
    dtype = torch.float32 if interpret else a.dtype
    out = a.new_empty(len(a), b.shape[1], dtype=dtype)
    operands = a, b, bias, out, offsets
    _launch_units(kernels.grouped_gemm_kernel, operands, (), programs, interpret)
    return out.to(a.dtype)


def _launch_leaves(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    length: int,
    stage: str,
    programs: int,
    *,
    interpret: bool = False,
) -> torch.Tensor:
    """One launch of grouped_leaves_kernel; ``stage``: `_TREE` or `_LEAVES`."""
    count, shape = plans.cdiv(a.shape[1], length), (len(a), b.shape[1])
    dtype = torch.float32 if interpret or stage == _LEAVES else a.dtype
    out = a.new_empty((count, *shape) if stage == _LEAVES else shape, dtype=dtype)
    operands, leaves_of_k = (a, b, bias, out, offsets), (length, count)
    kernel = kernels.grouped_leaves_kernel
    _launch_units(kernel, operands, leaves_of_k, programs, interpret, STAGE=stage)
    return out if stage == _LEAVES else out.to(a.dtype)


def _launch_units(
    kernel: Any,
    operands: tuple,
    leaves_of_k: tuple[int, ...],
    programs: int,
    interpret: bool,
    **constants: object,
) -> None:
    """Launch a kernel whose units are the tiles of all experts."""
    a, b, bias, out, offsets = operands
    (t, k), (experts, n, _) = a.shape, b.shape
    plan = plans.plan_of(a.dtype)
    tiles = (plans.cdiv(t, plan.block_m) + experts) * plans.cdiv(n, plan.block_n)
    kernel[(min(tiles, programs),)](
        *(a, b, bias, out, offsets.contiguous(), t, experts, n, k, *leaves_of_k),
        *(*a.stride(), *b.stride(), *((0, 0) if bias is None else bias.stride())),
        ALIGN_N=plans.alignment(n, 1),
        ALIGN_K=plans.alignment(k, a.stride(1), b.stride(2)),
        EXPERTS=plans.next_power_of_2(experts),
        GROUP_M=plan.group_m,
        **plans.dot_options(plan, interpret=interpret),
        **constants,
    )


def _launch_dw(
    dy: torch.Tensor,
    x: torch.Tensor,
    offsets: torch.Tensor,
    accumulator: torch.Tensor | None,
    programs: int,
    *,
    interpret: bool = False,
) -> torch.Tensor:
    (t, m), n, experts = dy.shape, x.shape[1], len(offsets) - 1
    plan = plans.plan_of(dy.dtype)
    out, accumulate = accumulator, accumulator is not None
    if out is None:
        out = dy.new_empty(experts, m, n, dtype=torch.float32 if interpret else dy.dtype)
    units = experts * plans.cdiv(m, plan.block_m) * plans.cdiv(n, plan.block_n)
    kernels.grouped_dw_kernel[(min(units, programs),)](
        *(dy, x, out, offsets.contiguous(), t, experts, m, n),
        *(*dy.stride(), *x.stride(), *out.stride()),
        ALIGN_M=plans.alignment(m, dy.stride(1)),
        ALIGN_N=plans.alignment(n, x.stride(1), out.stride(2)),
        ACCUMULATE=accumulate,
        **plans.dot_options(plan, accumulate, interpret),
    )
    return out if accumulate else out.to(dy.dtype)


def _launch_sum(
    rows: torch.Tensor, offsets: torch.Tensor, *, interpret: bool = False
) -> torch.Tensor:
    (t, n), experts, plan = rows.shape, len(offsets) - 1, plans.plan_of(rows.dtype)
    out = rows.new_empty(experts, n, dtype=torch.float32 if interpret else rows.dtype)
    kernels.grouped_sum_kernel[(experts * plans.cdiv(n, plans.SUM_COLUMNS),)](
        *(rows, out, offsets.contiguous(), t, n, *rows.stride()),
        ALIGN_N=plans.alignment(n, rows.stride(1)),
        LANES=plans.SUM_LANES,
        COLUMNS=plans.SUM_COLUMNS,
        UNROLL=plan.sum_unroll,
        **plans.options(plan, plan.sum_warps),
    )
    return out.to(rows.dtype)
