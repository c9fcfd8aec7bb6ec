"""Element masks on the scores of one warpgroup's WGMMA accumulator (layout: see ``softmax``).

Masked scores become -inf by selection, never by arithmetic: what a masked key holds, NaN included,
does not reach the row.
"""

import cutlass
from cutlass import cute

from ...dsl import copy
from ...dsl.softmax import ROWS

#: Columns per word of a bit mask, and words per row of its tiles [T, 128, 4].
WORD = 32
WORDS = 4


@cute.jit
def keep_between(scores: cute.Tensor, lane, first, last):
    """Keeps the block's columns ``first[half]`` to ``last[half]`` of each row, both included."""
    offset = 2 * (lane % 4)
    for half in cutlass.range_constexpr(ROWS):
        low, high = first[half] - offset, last[half] - offset
        for i in cutlass.range_constexpr(cute.size(scores) // 4):
            for side in cutlass.range_constexpr(2):
                at = 4 * i + 2 * half + side
                column = 8 * i + side
                kept = (low <= column) & (column <= high)
                scores[at] = scores[at] if kept else -cutlass.Float32.inf


@cute.jit
def keep_bits(scores: cute.Tensor, lane, words):
    """Keeps the columns whose bit is set; ``words`` [columns / 32, 2]: the words of each row."""
    offset = 2 * (lane % 4)
    for half in cutlass.range_constexpr(ROWS):
        for w in cutlass.range_constexpr(cute.size(scores) // 4 * 8 // WORD):
            word = words[w, half] >> offset
            for i in cutlass.range_constexpr(4):
                for side in cutlass.range_constexpr(2):
                    at = 4 * (4 * w + i) + 2 * half + side
                    kept = (word & (1 << (8 * i + side))) != 0
                    scores[at] = scores[at] if kept else -cutlass.Float32.inf


@cute.jit
def words_of(tiles: cute.Tensor, tile, row, first, count: cutlass.Constexpr):
    """``count`` words of one row of a tile from word ``first`` on, as one aligned load."""
    offset = (cutlass.Int64(tile) * tiles.shape[1] + row) * WORDS + first
    return copy.aligned(tiles, offset, count).load()
