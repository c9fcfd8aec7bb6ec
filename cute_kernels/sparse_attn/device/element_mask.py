"""Masks of a forward: the lists of a tile, and the element rule on the scores of a block."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl.softmax import ROWS
from ..masks import SPANS
from . import merge, packed, score_mask, spans
from .forward_tiles import BLOCK


@dataclass(frozen=True)
class MaskTensors:
    """Mask of a launch: stored lists, ranges of keys, or a varlen batch's table and band.

    mCount, mEntry, mTile: as ``LoweredMask`` has them; mRanges: int32 [B, Sq, 4], see ``spans``;
    lo, hi: the band.  What the form does not need is None.
    """

    mCount: cute.Tensor | None
    mEntry: cute.Tensor | None
    mTile: cute.Tensor | None
    mRanges: cute.Tensor | None
    mTable: cute.Tensor | None
    lo: cutlass.Int32
    hi: cutlass.Int32


@dataclass(frozen=True)
class ElementRule:
    """Which elements of a block are allowed.

    mWords: words of the mask tiles (form "bits"); lo, hi: the band of partial blocks (form
    "band"); bounds: the keys that this thread's rows see, where they are known; kv_len: end of the
    keys.
    """

    mWords: cute.Tensor | None
    lo: cutlass.Int32
    hi: cutlass.Int32
    bounds: spans.RowBounds | None
    kv_len: cutlass.Int32


@dataclass(frozen=True)
class TileMask:
    """Mask of a tile: the words of its lists' steps, the ranges of its rows, the element rule."""

    words: cute.Tensor
    ranges: cute.Tensor | None
    rule: ElementRule


@dataclass(frozen=True)
class ListCoord:
    """Position of a consumer thread on its list.

    m: the block of the mask; row: this thread's first row in it; words: of the list's steps;
    first_step: ring position of step 0.
    """

    consumer: cutlass.Int32
    lane: cutlass.Int32
    m: cutlass.Int32
    row: cutlass.Int32
    words: cute.Tensor
    first_step: cutlass.Int32


@cute.jit
def lists_of(
    mask: MaskTensors,
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
        ranges = mask.mRanges[batch, None, None]
        column = spans.column_of_key_0(ranges)
        lists = [spans.listing(ranges, m, column) for m in blocks]
    elif cutlass.const_expr(mask.mTable is not None):
        lists = [packed.listing(mask.mTable, m, mask.lo, mask.hi) for m in blocks]
    else:
        # A mask of one batch or one head serves all of them.
        mask_batch = cutlass.min(batch, mask.mCount.shape[0] - 1)
        mask_head = cutlass.min(head, mask.mCount.shape[1] - 1)
        counts = mask.mCount[mask_batch, mask_head, None]
        entries = mask.mEntry[mask_batch, mask_head, None, None]
        tiles = mask.mTile[mask_batch, mask_head, None, None] if form == "bits" else None
        lists = [merge.listing(counts, entries, tiles, m) for m in blocks]
    return column, lists


@cute.jit
def fetch(
    bits: cute.Tensor,
    form: cutlass.Constexpr,
    word: cutlass.Int32,
    coord: ListCoord,
    stage: cutlass.Int32,
    rule: ElementRule,
):
    """Load the mask words of this thread's rows, in flight before the scores are issued."""
    if cutlass.const_expr(form == "bits"):
        if word & merge.PARTIAL != 0:
            for half in cutlass.range_constexpr(ROWS):
                tile, row = coord.words[1, stage], coord.row + 8 * half
                words = score_mask.words_of(rule.mWords, tile, row, 0, score_mask.WORDS)
                bits[None, half].store(words)


@cute.jit
def apply(
    acc_s: cute.Tensor,
    form: cutlass.Constexpr,
    word: cutlass.Int32,
    bits: cute.Tensor,
    coord: ListCoord,
    rule: ElementRule,
):
    """Set the scores of one block to -inf where a key is not allowed."""
    lane, bounds = coord.lane, rule.bounds
    key = (word >> merge.BLOCK_SHIFT) * BLOCK
    partial = word & merge.PARTIAL != 0
    last = rule.kv_len - 1 - key
    if cutlass.const_expr(bounds is not None):
        if spans.hides(bounds, key):
            # first <= kv <= last of each row, as columns of the block
            first = (bounds.first[0] - key, bounds.first[1] - key)
            until = (bounds.last[0] - key, bounds.last[1] - key)
            score_mask.keep_between(acc_s, lane, first, until)
    elif cutlass.const_expr(form == "band"):
        if partial or last < BLOCK - 1:
            # kv - q in [lo, hi] and kv < Sk, as columns of the block
            lo, hi, diagonal = rule.lo, rule.hi, coord.m * BLOCK + coord.row - key
            first = (diagonal + lo, diagonal + 8 + lo)
            until = (cutlass.min(diagonal + hi, last), cutlass.min(diagonal + 8 + hi, last))
            score_mask.keep_between(acc_s, lane, first, until)
    else:
        if cutlass.const_expr(form == "bits"):
            if partial:
                score_mask.keep_bits(acc_s, lane, bits)
        if last < BLOCK - 1:
            score_mask.keep_between(acc_s, lane, (0, 0), (last, last))
