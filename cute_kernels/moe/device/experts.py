"""Rows of an expert on the device."""

import cutlass
from cutlass import cute


@cute.jit
def rows_of(
    expert: cutlass.Int32, mOffsets: cute.Tensor, total: cutlass.Int32
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """(first row, number of rows) of an expert, within ``total`` rows whatever the offsets are."""
    first = cutlass.min(cutlass.max(mOffsets[expert], 0), total)
    end = cutlass.min(cutlass.max(mOffsets[expert + 1], first), total)
    return first, end - first
