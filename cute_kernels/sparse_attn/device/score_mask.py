"""Element masks on the scores of one warpgroup's WGMMA accumulator (layout: see ``softmax``).

Masked scores become -inf by selection, never by arithmetic: a masked key, even a NaN, does not
reach the row.
"""

import cutlass
from cutlass import cute

from ...dsl import copy
from ...dsl.softmax import ROWS

#: Columns per word of a bit mask, and words per row of its tiles [T, 128, 4].
WORD = 32
WORDS = 4
#: One value for each of a thread's two rows of an accumulator, ``row`` and ``row + 8``.
RowPair = tuple[cutlass.Int32, cutlass.Int32]


@cute.jit
def keep_between(scores: cute.Tensor, lane: cutlass.Int32, first: RowPair, last: RowPair):
    """Keep the block's columns ``first[half]`` to ``last[half]`` of each row, both included."""
    offset = 2 * (lane % 4)
    for half in cutlass.range_constexpr(ROWS):
        low, high = first[half] - offset, last[half] - offset
        for i in cutlass.range_constexpr(cute.size(scores) // 4):
            for side in cutlass.range_constexpr(2):
                index = 4 * i + 2 * half + side
                column = 8 * i + side
                kept = (low <= column) & (column <= high)
                scores[index] = scores[index] if kept else -cutlass.Float32.inf


@cute.jit
def keep_bits(scores: cute.Tensor, lane: cutlass.Int32, words: cute.Tensor):
    """Keep the columns whose bit is set; ``words`` [columns / 32, 2]: the words of each row."""
    offset = 2 * (lane % 4)
    for half in cutlass.range_constexpr(ROWS):
        for w in cutlass.range_constexpr(cute.size(scores) // 4 * 8 // WORD):
            word = words[w, half] >> offset
            for i in cutlass.range_constexpr(4):
                for side in cutlass.range_constexpr(2):
                    index = 4 * (4 * w + i) + 2 * half + side
                    kept = (word & (1 << (8 * i + side))) != 0
                    scores[index] = scores[index] if kept else -cutlass.Float32.inf


@cute.jit
def words_of(
    mWords: cute.Tensor,
    tile: cutlass.Int32,
    row: cutlass.Int32,
    first: cutlass.Int32,
    count: cutlass.Constexpr,
):
    """Load ``count`` mask words of one row of a tile, from word ``first`` on, at once."""
    # By hand, in 64 bits: T * 128 * 4 words may be more than 2^31, and one load must be aligned.
    offset = (cutlass.Int64(tile) * mWords.shape[1] + row) * WORDS + first
    return copy.aligned(mWords, offset, count).load()
