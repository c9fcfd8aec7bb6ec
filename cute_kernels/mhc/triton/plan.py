"""Every constant that the bits of the Triton mhc depend on, and sizes that show in none.

Products are IEEE fp32 of fp32 operands (`tl.dot`, input_precision "ieee"), as gemm's of fp32: no
term is dropped.  Of `config.PRECISIONS` only the chunks of channels are left.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TritonPlan:
    """Constants that bits depend on; not tuned by measurement.

    ``project``: (tokens, elements of a row) of a step of the projection; the elements are the lanes
    of Σ x², and divide the smallest chunk.
    ``back``: (tokens, channels) of a step of its backward, whose products are chains over tokens.
    ``reduce``: (tokens, channels) of a step: a part of dbias, and the lanes of sums over channels.
    ``gate_tokens``: of a part of dalpha and dbeta, and of a program of small rows.
    ``fp_fusion``: an fma is one that is written (kernel.py), or part of a product.
    The ``hip`` fields pin the matrix instruction.
    """

    project: tuple[int, int] = (64, 32)
    back: tuple[int, int] = (32, 16)
    reduce: tuple[int, int] = (8, 64)
    gate_tokens: int = 32
    input_precision: str = "ieee"
    fp_fusion: bool = False
    hip_matrix_instr_nonkdim: int = 16
    hip_kpack: int = 1


@dataclass(frozen=True)
class Sizes:
    """Sizes that no bit depends on; not tuned by measurement.

    ``combine``: (tokens, channels) of a program.  ``sinkhorn_tokens``: of a program.
    ``segment``: iterations between two that the backward of sinkhorn starts from again.
    ``sum_columns``: of a program that adds parts.
    ``fp32_warps``: of the passes of a backward over fp32 streams, which need the registers.
    """

    combine: tuple[int, int] = (4, 128)
    sinkhorn_tokens: int = 32
    segment: int = 8
    sum_columns: int = 128
    num_warps: int = 4
    fp32_warps: int = 8


TRITON = TritonPlan()
SIZES = Sizes()
#: Columns of H in a product: `config.WIDTH`, or the least that `tl.dot` takes.
DOT_WIDTH = {2: 16, 4: 32}
