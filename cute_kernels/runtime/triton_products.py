"""Constants and launch options of products in Triton, for every system that has such kernels.

Products with one `TritonPlan` have one set of bits, whichever kernel has the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: With more, Triton 3.9 spills on gfx950.
_HIP_STAGES = 4


@dataclass(frozen=True)
class TritonPlan:
    """The one tile of the Triton kernel, for every shape.

    ``accumulate_k`` is the K of one ``tl.dot`` when the accumulator starts from memory: the unit at
    which a token stream may be cut.  The ``hip`` fields pin the MFMA shape and the K packing, which
    decide how products are grouped; other devices ignore them.  ``sum_warps`` and ``sum_unroll``
    are column_sum's, whose order is COLUMN_SUM.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    accumulate_k: int = 16
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    accumulate_stages: int = 6
    sum_warps: int = 4
    sum_unroll: int = 4
    input_precision: str = "ieee"
    fp_fusion: bool = True
    hip_matrix_instr_nonkdim: int = 16
    hip_kpack: int = 1


TRITON = TritonPlan()
TRITON_FP32 = TritonPlan(block_m=64, block_n=64, block_k=32)

#: Of a column sum: each lane adds every LANES-th row in order; then lanes in order.
SUM_LANES, SUM_COLUMNS = 32, 64


def plan_of(dtype: torch.dtype) -> TritonPlan:
    """The plan of products of this dtype."""
    return TRITON_FP32 if dtype == torch.float32 else TRITON


def stages(plan: TritonPlan, accumulate: bool) -> int:
    """Loads in flight; no bit depends on them."""
    count = plan.accumulate_stages if accumulate else plan.num_stages
    return count if torch.version.hip is None else min(count, _HIP_STAGES)


def options(plan: TritonPlan, num_warps: int) -> dict[str, int | bool]:
    """The compiler options that every launch names."""
    out = {"num_warps": num_warps, "enable_fp_fusion": plan.fp_fusion}
    if torch.version.hip is not None:
        out["matrix_instr_nonkdim"] = plan.hip_matrix_instr_nonkdim
        out["kpack"] = plan.hip_kpack
    return out


def dot_options(
    plan: TritonPlan, accumulate: bool = False, interpret: bool = False
) -> dict[str, object]:
    """The tile of a product, how it is multiplied, and the compiler options.

    ``interpret``: for Triton's interpreter, which multiplies fp32 only.
    """
    return {
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.accumulate_k if accumulate else plan.block_k,
        "INPUT_PRECISION": plan.input_precision,
        "UPCAST": interpret,
        "num_stages": stages(plan, accumulate),
        **options(plan, plan.num_warps),
    }


def alignment(size: int, *strides: int) -> int:
    """A known factor of ``size``, where a tensor is contiguous along it; it widens loads only."""
    return 16 if size % 16 == 0 and 1 in strides else 1


def cdiv(size: int, block: int) -> int:
    """Number of blocks that cover ``size``."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The least power of two that is not below ``size``."""
    return 1 << (size - 1).bit_length()


def least_block(size: int) -> int:
    """The least power of two of which 65,535 cover ``size``: CUDA's limit of a grid's y."""
    return next_power_of_2(cdiv(size, 65_535))
