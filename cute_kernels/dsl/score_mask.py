"""Element masks on the scores of one warpgroup's WGMMA accumulator (layout: see ``softmax``).

Masked scores become -inf by selection, never by arithmetic: what a masked key holds, NaN included,
does not reach the row.
"""

import cutlass
from cutlass import cute

from .softmax import ROWS

#: Keys per word of a bit mask.
WORD = 32


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
    """Keeps the columns whose bit is set; ``words`` [4, 2]: each row's words, 32 columns each."""
    offset = 2 * (lane % 4)
    for half in cutlass.range_constexpr(ROWS):
        for w in cutlass.range_constexpr(cute.size(scores) // 4 * 8 // WORD):
            word = words[w, half] >> offset
            for i in cutlass.range_constexpr(4):
                for side in cutlass.range_constexpr(2):
                    at = 4 * (4 * w + i) + 2 * half + side
                    kept = (word & (1 << (8 * i + side))) != 0
                    scores[at] = scores[at] if kept else -cutlass.Float32.inf
