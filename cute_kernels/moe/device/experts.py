"""Rows of an expert on the device."""

import cutlass
from cutlass import cute


def clamped(offset: cutlass.Int32, low: cutlass.Int32 | int, total: cutlass.Int32) -> cutlass.Int32:
    """An offset, at least ``low`` and at most ``total``, whatever it is."""
    return cutlass.min(cutlass.max(offset, low), total)


@cute.jit
def rows_of(
    expert: cutlass.Int32, mOffsets: cute.Tensor, total: cutlass.Int32
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """(first row, number of rows) of an expert, within ``total`` rows whatever the offsets are."""
    first = clamped(mOffsets[expert], 0, total)
    end = clamped(mOffsets[expert + 1], first, total)
    return first, end - first
