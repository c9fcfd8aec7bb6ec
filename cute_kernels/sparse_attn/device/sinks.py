"""The state of an online softmax behind a sink: a key of that score with a value of zeros."""

import math

import cutlass
from cutlass import cute

from ...dsl import softmax


@cute.jit
def start(row_max: cute.Tensor, row_sum: cute.Tensor, sinks, row, lane, c):
    """m = sink / c', c' = c / log2 e; the sum is exp2(c (m - m)) = 1, of one of a row's lanes.

    ``sinks``: one for each row of the head; ``row``: a thread's first, its second is 8 on.
    """
    for half in cutlass.range_constexpr(softmax.ROWS):
        at = cutlass.min(row + 8 * half, sinks.shape[0] - 1)
        row_max[half] = sinks[at] * cutlass.Float32(math.log2(math.e)) / c
        row_sum[half] = cutlass.Float32(1.0) if lane % 4 == 0 else cutlass.Float32(0.0)
