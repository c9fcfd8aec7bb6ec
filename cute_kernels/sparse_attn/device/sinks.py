"""Initial state of an online softmax with a sink: a key of that score with a value of zeros."""

import math

import cutlass
from cutlass import cute

from ...dsl import softmax


@cute.jit
def start(
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    sinks: cute.Tensor,
    row: cutlass.Int32,
    lane: cutlass.Int32,
    c: cutlass.Float32,
):
    """m = sink / c', c' = c / log2 e; the sum is exp2(c (m - m)) = 1, in one lane of each row.

    ``sinks``: one for each row of the head; ``row``: a thread's first row, the second is 8 below.
    """
    for half in cutlass.range_constexpr(softmax.ROWS):
        index = cutlass.min(row + 8 * half, sinks.shape[0] - 1)
        start_row(row_max, row_sum, half, sinks[index], lane, c)


@cute.jit
def start_row(
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    half: cutlass.Constexpr,
    sink: cutlass.Float32,
    lane: cutlass.Int32,
    c: cutlass.Float32,
):
    """`start` of one of a thread's rows."""
    row_max[half] = sink * cutlass.Float32(math.log2(math.e)) / c
    row_sum[half] = cutlass.Float32(1.0) if lane % 4 == 0 else cutlass.Float32(0.0)
