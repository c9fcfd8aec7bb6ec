"""Launches the Triton kernels: outputs, persistent grids, compiler options.

Every layout is loaded as it lies; what a tensor is known to be aligned to widens loads only.
"""

from __future__ import annotations

import torch

from ...operands import most_ctas
from .. import config
from . import kernel as kernels
from .plan import TRITON, TRITON_FP32, TritonPlan

#: With more, Triton 3.9 spills on gfx950.
_HIP_STAGES = 4


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    order: str = config.ORDER,
) -> torch.Tensor:
    """a [M, K] · b [N, K]ᵀ + bias [N], or accumulator [M, N] += a · bᵀ in place.

    Args:
        a, b: bf16, fp16 or fp32, of one dtype and device; any strides, sizes above zero.
        bias: The dtype of ``a``; added in fp32 before the one rounding.
        accumulator: fp32, any strides whose elements do not overlap; the chain starts from it.
        order: Of `config.ORDERS`; this kernel has the one.

    Returns:
        [M, N], contiguous, the dtype of ``a``; or ``accumulator``.

    Runs on the device of ``a`` and its current stream.  The first launch of a (dtype, major,
    alignment) class compiles; do that before a CUDA graph is captured.
    """
    with torch.cuda.device(a.device):
        return _launch(a, b, bias, accumulator, most_ctas(a.device))


def column_sum(rows: torch.Tensor) -> torch.Tensor:
    """Σ over the rows of [M, N], any strides: fp32 in a fixed order, one rounding; [N]."""
    with torch.cuda.device(rows.device):
        return _launch_column_sum(rows)


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    programs: int,
    *,
    interpret: bool = False,
) -> torch.Tensor:
    """One launch; ``interpret`` rounds outside the kernel, for Triton's interpreter on a CPU."""
    (m, k), n = a.shape, b.shape[0]
    plan = _plan(a.dtype)
    accumulate = accumulator is not None
    out = accumulator
    if out is None:
        out = torch.empty(m, n, dtype=torch.float32 if interpret else a.dtype, device=a.device)
    tiles = _tiles(m, plan.block_m) * _tiles(n, plan.block_n)
    kernels.gemm_kernel[(min(tiles, programs),)](
        a,
        b,
        bias,
        out,
        m,
        n,
        k,
        *a.stride(),
        *b.stride(),
        0 if bias is None else bias.stride(0),
        *out.stride(),
        ALIGN_M=_alignment(m, a.stride(0), out.stride(0)),
        ALIGN_N=_alignment(n, b.stride(0), out.stride(1)),
        ALIGN_K=_alignment(k, a.stride(1), b.stride(1)),
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.accumulate_k if accumulate else plan.block_k,
        GROUP_M=plan.group_m,
        ACCUMULATE=accumulate,
        INPUT_PRECISION=plan.input_precision,
        UPCAST=interpret,
        num_stages=_stages(plan, accumulate),
        **_options(plan, plan.num_warps),
    )
    return out if accumulate else out.to(a.dtype)


def _launch_column_sum(rows: torch.Tensor, *, interpret: bool = False) -> torch.Tensor:
    m, n = rows.shape
    order, plan = config.COLUMN_SUM, _plan(rows.dtype)
    out = torch.empty(n, dtype=torch.float32 if interpret else rows.dtype, device=rows.device)
    kernels.column_sum_kernel[(_tiles(n, order.columns),)](
        rows,
        out,
        m,
        n,
        *rows.stride(),
        ALIGN_N=_alignment(n, rows.stride(1)),
        LANES=order.lanes,
        COLUMNS=order.columns,
        UNROLL=plan.sum_unroll,
        **_options(plan, plan.sum_warps),
    )
    return out.to(rows.dtype)


def _plan(dtype: torch.dtype) -> TritonPlan:
    return TRITON_FP32 if dtype == torch.float32 else TRITON


def _stages(plan: TritonPlan, accumulate: bool) -> int:
    """Loads under way; no bit depends on them."""
    stages = plan.accumulate_stages if accumulate else plan.num_stages
    return stages if torch.version.hip is None else min(stages, _HIP_STAGES)


def _alignment(size: int, *strides: int) -> int:
    """A known factor of ``size``, where a tensor is contiguous along it; it widens loads only."""
    return 16 if size % 16 == 0 and 1 in strides else 1


def _options(plan: TritonPlan, num_warps: int) -> dict[str, int | bool]:
    """The compiler options that every launch names."""
    options = {"num_warps": num_warps, "enable_fp_fusion": plan.fp_fusion}
    if torch.version.hip is not None:
        options["matrix_instr_nonkdim"] = plan.hip_matrix_instr_nonkdim
        options["kpack"] = plan.hip_kpack
    return options


def _tiles(size: int, block: int) -> int:
    return -(-size // block)
