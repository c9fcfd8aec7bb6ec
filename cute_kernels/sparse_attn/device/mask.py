"""Masks of a forward: the lists of a tile, and the element rule on the scores of a block.

Masked scores become -inf by selection, never by arithmetic: a masked key, even a NaN, does not
reach the row.  Scores are one warpgroup's WGMMA accumulator (layout: see ``softmax``).
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import copy
from ...dsl.softmax import ROWS
from ..masks import SPANS
from . import block_union, kv_ranges, varlen
from .block_union import BLOCK, Step
from .forward_state import Scalars, Tensors
from .kv_ranges import RowPair

#: Columns per word of a bit mask, and words per row of its tiles [T, 128, 4].
WORD = 32
WORDS = 4


@dataclass(frozen=True)
class ThreadMask:
    """Mask of a consumer thread's rows on its list.

    form: of the mask; mWords: words of the mask tiles (form "bits"); lo, hi: the band of partial
    blocks (form "band"); bounds: the keys that the rows see, where they are known; kv_len: end of
    the keys.  m: the block of the mask; row: the first row in it, the second is 8 below; lane: in
    the warpgroup.  steps: of the list, see ``block_union``; bits: registers for mask words.
    """

    form: str
    mWords: cute.Tensor | None
    lo: cutlass.Int32
    hi: cutlass.Int32
    bounds: kv_ranges.RowBounds | None
    kv_len: cutlass.Int32
    m: cutlass.Int32
    row: cutlass.Int32
    lane: cutlass.Int32
    steps: cute.Tensor
    bits: cute.Tensor

    @cute.jit
    def load_bits(self, step: Step, stage: cutlass.Int32):
        """Load the mask words of this thread's rows, in flight before the scores are issued."""
        if cutlass.const_expr(self.form == "bits"):
            if step.is_partial:
                for half in cutlass.range_constexpr(ROWS):
                    tile, row = self.steps[1, stage], self.row + 8 * half
                    words = words_of(self.mWords, tile, row, 0, WORDS)
                    self.bits[None, half].store(words)

    @cute.jit
    def apply(self, tSrS: cute.Tensor, step: Step):
        """Set the scores of one block to -inf where a key is not allowed."""
        lane, bounds = self.lane, self.bounds
        key = step.block * BLOCK
        partial = step.is_partial
        last = self.kv_len - 1 - key
        if cutlass.const_expr(bounds is not None):
            if kv_ranges.hides(bounds, key):
                # first <= kv <= last of each row, as columns of the block
                first = (bounds.first[0] - key, bounds.first[1] - key)
                until = (bounds.last[0] - key, bounds.last[1] - key)
                keep_between(tSrS, lane, first, until)
        elif cutlass.const_expr(self.form == "band"):
            if partial or last < BLOCK - 1:
                # kv - q in [lo, hi] and kv < Sk, as columns of the block
                lo, hi, diagonal = self.lo, self.hi, self.m * BLOCK + self.row - key
                first = (diagonal + lo, diagonal + 8 + lo)
                until = (cutlass.min(diagonal + hi, last), cutlass.min(diagonal + 8 + hi, last))
                keep_between(tSrS, lane, first, until)
        else:
            if cutlass.const_expr(self.form == "bits"):
                if partial:
                    keep_bits(tSrS, lane, self.bits)
            if last < BLOCK - 1:
                keep_between(tSrS, lane, (0, 0), (last, last))


@cute.jit
def lists_of(
    tensors: Tensors,
    scalars: Scalars,
    form: cutlass.Constexpr,
    consumers: cutlass.Constexpr,
    tile: cutlass.Int32,
    head: cutlass.Int32,
    batch: cutlass.Int32,
):
    """Return (column of key 0, a `BlockList` of each block of the mask that a tile has rows of)."""
    # Two consumers share a block of the mask, three have rows of two.
    blocks = [tile * consumers // 2 + n for n in range(consumers - 1)]
    column = cutlass.Int32(0)
    if cutlass.const_expr(form == SPANS):
        ranges = tensors.mRanges[batch, None, None]
        column = kv_ranges.column_of_key_0(ranges)
        lists = [kv_ranges.block_list(ranges, m, column) for m in blocks]
    elif cutlass.const_expr(tensors.mTable is not None):
        lists = [varlen.block_list(tensors.mTable, m, scalars.lo, scalars.hi) for m in blocks]
    else:
        # A mask of one batch or one head serves all of them.
        mask_batch = cutlass.min(batch, tensors.mCount.shape[0] - 1)
        mask_head = cutlass.min(head, tensors.mCount.shape[1] - 1)
        counts = tensors.mCount[mask_batch, mask_head, None]
        entries = tensors.mEntry[mask_batch, mask_head, None, None]
        tiles = tensors.mTile[mask_batch, mask_head, None, None] if form == "bits" else None
        lists = [block_union.load_list(counts, entries, tiles, m) for m in blocks]
    return column, lists


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
