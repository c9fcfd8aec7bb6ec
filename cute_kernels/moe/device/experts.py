"""Rows of an expert on the device."""

import cutlass
from cutlass import cute


@cute.jit
def rows_of(
    expert: cutlass.Int32, mOffsets: cute.Tensor, total: cutlass.Int32
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """(first row, number of rows) of an expert, within ``total`` rows whatever the offsets are."""
    return clamped(mOffsets[expert], mOffsets[expert + 1], total)


@cute.jit
def clamped(
    first: cutlass.Int32, end: cutlass.Int32, total: cutlass.Int32
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """(first row, number of rows) between two offsets, within ``total`` rows."""
    row0 = cutlass.min(cutlass.max(first, 0), total)
    return row0, cutlass.min(cutlass.max(end, row0), total) - row0
