"""Key blocks of queries that each see one contiguous range of keys (mask form "spans").

``kv_ranges`` defines the ranges.  Keys are counted as there: key 0 is at the multiple of 128
before the first key of the sequence that the buffer holds, so that a key's block follows from its
position alone.  In the buffer, key 0 may be a column of another sequence, or lie before the
buffer's first column; no row sees it then.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import copy
from ...dsl.softmax import ROWS
from .block_union import BLOCK, BlockList, BlockRange

#: The columns of a range.
BEGIN, POSITION, FIRST, END = FIELDS = range(4)
#: A key beyond all keys.
FAR = 2**30
WARP = 32
#: One value for each of a thread's two rows of an accumulator, ``row`` and ``row + 8``.
RowPair = tuple[cutlass.Int32, cutlass.Int32]


@dataclass(frozen=True)
class RowBounds:
    """First and last key that each of a thread's two rows sees, both included."""

    first: RowPair
    last: RowPair


@cute.jit
def column_of_key_0(ranges: cute.Tensor):
    """Return the column of key 0 of a sequence's ranges [T, 4]; negative before the buffer."""
    span = copy.vector(ranges, (0, 0), len(FIELDS)).load()
    return span[BEGIN] - span[POSITION] % BLOCK


@cute.jit
def seen(ranges: cute.Tensor, row: cutlass.Int32, column: cutlass.Int32):
    """Return (first, end) of the keys that a row sees; rows beyond the last see what it sees."""
    index = cutlass.min(row, ranges.shape[0] - 1)
    span = copy.vector(ranges, (index, 0), len(FIELDS)).load()
    return span[FIRST] - column, span[END] - column


@cute.jit
def row_bounds(ranges: cute.Tensor, row: cutlass.Int32):
    """Return the `RowBounds` of a thread whose first row is ``row``; the second is 8 below."""
    column = column_of_key_0(ranges)
    both = [seen(ranges, row + 8 * half, column) for half in range(ROWS)]
    return RowBounds((both[0][0], both[1][0]), (both[0][1] - 1, both[1][1] - 1))


def hides(bounds: RowBounds, key: cutlass.Int32):
    """Return whether one of a thread's rows does not see all of the block from ``key`` on."""
    first, last = bounds.first, bounds.last
    return (
        (cutlass.max(first[0], first[1]) > key)
        | (cutlass.min(last[0], last[1]) < key + (BLOCK - 1))
    )  # fmt: skip


@cute.jit
def block_list(ranges: cute.Tensor, m: cutlass.Int32, column: cutlass.Int32):
    """Return the `BlockList` of query block ``m`` (by a whole warp); empty beyond the last row."""
    least, most = cutlass.Int32(FAR), cutlass.Int32(0)
    for part in cutlass.range_constexpr(BLOCK // WARP):
        row = m * BLOCK + part * WARP + cute.arch.lane_idx()
        first, end = seen(ranges, row, column)
        sees = (row < ranges.shape[0]) & (first < end)
        least = cutlass.min(least, first if sees else cutlass.Int32(FAR))
        most = cutlass.max(most, end if sees else cutlass.Int32(0))
    least = cute.arch.warp_redux_sync(least, "min")
    most = cute.arch.warp_redux_sync(most, "max")
    block = least // BLOCK
    count = (most + BLOCK - 1) // BLOCK - block if least < most else cutlass.Int32(0)
    return BlockList(count, BlockRange(block), None)
