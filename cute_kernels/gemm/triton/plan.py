"""Every constant that the bits of the Triton gemm depend on."""

from __future__ import annotations

from dataclasses import dataclass


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
