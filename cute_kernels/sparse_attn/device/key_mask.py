"""Element masks on scores with the keys as rows: a warpgroup's 64 keys against a tile of queries.

A thread holds two keys, ``key`` and ``key + 8`` of the block, of an accumulator of
``wgmma.m64nNk16`` (layout: see ``slope``).
"""

import cutlass
from cutlass import cute

from ...dsl.softmax import ROWS
from ..masks import FAR
from . import score_mask

#: Keys, and query rows, of a block of the mask.
BLOCK = score_mask.WORD * score_mask.WORDS


@cute.jit
def keep(
    scores,
    form: cutlass.Constexpr,
    tile_m: cutlass.Constexpr,
    mask,
    kv_len,
    place,
):
    """A key beyond ``kv_len``, or one that the rule of a partial block leaves out, becomes -inf.

    form: "none", "band" or "bits"; mask: (tile of each entry, mask words, lo, hi); place: (entry,
    is it partial, block of the queries, where these ``tile_m`` rows begin in it, block of the keys,
    this thread's first key in it, its lane).
    """
    tiles, words, lo, hi = mask
    entry, partial, q_block, row, block, key, lane = place
    inside = kv_len - block * BLOCK
    masked = inside < BLOCK
    if cutlass.const_expr(form != "none"):
        masked = (partial != 0) | masked
    if masked:
        if cutlass.const_expr(form == "bits"):
            bits = words_of(tile_m, partial, tiles[entry], words, row, key)
            for half in cutlass.range_constexpr(ROWS):
                if key + 8 * half >= inside:
                    bits[None, half].fill(0)
            score_mask.keep_bits(scores, lane, bits)
        else:
            first, last = [cutlass.Int32(0)] * 2, [cutlass.Int32(tile_m - 1)] * 2
            if cutlass.const_expr(form == "band"):
                # lo <= kv - q <= hi, as rows of the tile; a full block has them all.
                low = lo if partial != 0 else cutlass.Int32(-FAR)
                high = hi if partial != 0 else cutlass.Int32(FAR)
                at = (block - q_block) * BLOCK + key - row
                first, last = [at - high, at + 8 - high], [at - low, at + 8 - low]
            for half in cutlass.range_constexpr(ROWS):
                last[half] = last[half] if key + 8 * half < inside else cutlass.Int32(-1)
            score_mask.keep_between(scores, lane, first, last)


@cute.jit
def words_of(tile_m: cutlass.Constexpr, partial, tile, words, row, key):
    """The mask words of this thread's keys over the tile's rows; a full block has them all."""
    count = tile_m // score_mask.WORD
    found = cute.make_rmem_tensor((count, ROWS), cutlass.Int32)
    found.fill(-1)
    if partial != 0:
        for half in cutlass.range_constexpr(ROWS):
            place = (tile, key + 8 * half, row // score_mask.WORD)
            found[None, half].store(score_mask.words_of(words, *place, count))
    return found
