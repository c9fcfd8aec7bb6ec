"""Queries that see one run of keys each: the key blocks of a query block, from what its rows see.

``ranges`` says what spans are.  Keys are counted as there: key 0 is at the multiple of 128
before the first key of the sequence that the buffer holds, so that a key's block follows from its
position alone.  In the buffer it may be a column of another sequence, or lie in front of them all;
no row sees it then.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import copy
from ...dsl.softmax import ROWS
from .walk import BLOCK

#: The numbers of a span.
BEGIN, POSITION, FIRST, END = FIELDS = range(4)
#: A key beyond all keys.
FAR = 2**30
WARP = 32


@dataclass(frozen=True)
class Run:
    """A list of consecutive blocks from ``first`` on.

    Whether a block is partial is for each row to say (``hides``), and not in its entries.
    """

    first: cutlass.Int32

    def entry(self, place):
        """2 * block, as in lists that are stored."""
        return 2 * (self.first + place)


@cute.jit
def column_of_key_0(spans: cute.Tensor):
    """The column of key 0 of a sequence [T, 4], below 0 if it lies in front of the buffer."""
    span = copy.vector(spans, (0, 0), len(FIELDS)).load()
    return span[BEGIN] - span[POSITION] % BLOCK


@cute.jit
def seen(spans: cute.Tensor, row, column):
    """(first, end) of the keys that a row sees; rows beyond the last see what it sees."""
    at = cutlass.min(row, spans.shape[0] - 1)
    span = copy.vector(spans, (at, 0), len(FIELDS)).load()
    return span[FIRST] - column, span[END] - column


@cute.jit
def between(spans: cute.Tensor, row):
    """([first, first], [last, last]) of the keys that a thread's rows see; the second is 8 on."""
    column = column_of_key_0(spans)
    both = [seen(spans, row + 8 * half, column) for half in range(ROWS)]
    return [first for first, _ in both], [end - 1 for _, end in both]


def hides(first, last, key):
    """Whether one of a thread's rows, which see keys first to last, does not see all of a block."""
    return (
        (cutlass.max(first[0], first[1]) > key)
        | (cutlass.min(last[0], last[1]) < key + (BLOCK - 1))
    )  # fmt: skip


@cute.jit
def listing(spans: cute.Tensor, m, column):
    """(how many, the list, no mask tiles) of query block ``m``; none beyond the last row.

    By a whole warp.
    """
    least, most = cutlass.Int32(FAR), cutlass.Int32(0)
    for part in cutlass.range_constexpr(BLOCK // WARP):
        row = m * BLOCK + part * WARP + cute.arch.lane_idx()
        first, end = seen(spans, row, column)
        sees = (row < spans.shape[0]) & (first < end)
        least = cutlass.min(least, first if sees else cutlass.Int32(FAR))
        most = cutlass.max(most, end if sees else cutlass.Int32(0))
    least = cute.arch.warp_redux_sync(least, "min")
    most = cute.arch.warp_redux_sync(most, "max")
    block = least // BLOCK
    count = (most + BLOCK - 1) // BLOCK - block if least < most else cutlass.Int32(0)
    return count, Run(block), None
