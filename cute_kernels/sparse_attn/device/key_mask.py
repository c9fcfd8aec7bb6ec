"""Element masks on scores with the keys as rows: a warpgroup's 64 keys against a tile of queries.

A thread holds two keys, ``key`` and ``key + 8`` of the block, of an accumulator of
``wgmma.m64nNk16`` (layout: see ``slope``).
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl.softmax import ROWS
from ..masks import FAR
from . import mask, walk
from .backward_state import Scalars, Tensors
from .block_union import BLOCK


@dataclass(frozen=True)
class ScoreCoord:
    """Position of a thread's scores.

    entry: index of the visit's entry; partial: whether its block is partial; q_block: its query
    block; row: the first of the tile's rows in it; block: the key block; key: this thread's first
    key in it; lane: this thread in its warpgroup.
    """

    entry: cutlass.Int32
    partial: cutlass.Int32
    q_block: cutlass.Int32
    row: cutlass.Int32
    block: cutlass.Int32
    key: cutlass.Int32
    lane: cutlass.Int32

    @classmethod
    def of(
        cls,
        visit: walk.Visit,
        column: walk.Column,
        tile_m: int,
        key: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> "ScoreCoord":
        """Return the position of a thread's scores in a visit."""
        entry, row = visit.entry, visit.number * tile_m
        return cls(visit.index, entry & 1, entry >> 1, row, column.block, key, lane)


@cute.jit
def keep(
    scores: cute.Tensor,
    form: cutlass.Constexpr,
    tile_m: cutlass.Constexpr,
    tensors: Tensors,
    scalars: Scalars,
    kv_len: cutlass.Int32,
    coord: ScoreCoord,
):
    """Set scores to -inf of keys from ``kv_len`` on, and of those that a partial block leaves out.

    form: "none", "band" or "bits".
    """
    block, key, row = coord.block, coord.key, coord.row
    inside = kv_len - block * BLOCK
    masked = inside < BLOCK
    if cutlass.const_expr(form != "none"):
        masked = (coord.partial != 0) | masked
    if masked:
        if cutlass.const_expr(form == "bits"):
            tile = tensors.mTile[coord.entry]
            bits = words_of(tile_m, coord.partial, tile, tensors.mWords, row, key)
            for half in cutlass.range_constexpr(ROWS):
                if key + 8 * half >= inside:
                    bits[None, half].fill(0)
            mask.keep_bits(scores, coord.lane, bits)
        else:
            first, last = [cutlass.Int32(0)] * 2, [cutlass.Int32(tile_m - 1)] * 2
            if cutlass.const_expr(form == "band"):
                # lo <= kv - q <= hi, as rows of the tile; a full block has them all.
                low = scalars.lo if coord.partial != 0 else cutlass.Int32(-FAR)
                high = scalars.hi if coord.partial != 0 else cutlass.Int32(FAR)
                diagonal = (block - coord.q_block) * BLOCK + key - row
                first = [diagonal - high, diagonal + 8 - high]
                last = [diagonal - low, diagonal + 8 - low]
            for half in cutlass.range_constexpr(ROWS):
                last[half] = last[half] if key + 8 * half < inside else cutlass.Int32(-1)
            mask.keep_between(scores, coord.lane, first, last)


@cute.jit
def words_of(
    tile_m: cutlass.Constexpr,
    partial: cutlass.Int32,
    tile: cutlass.Int32,
    mWords: cute.Tensor,
    row: cutlass.Int32,
    key: cutlass.Int32,
):
    """Return the mask words of this thread's keys over the tile's rows; all set if full."""
    count = tile_m // mask.WORD
    rWords = cute.make_rmem_tensor((count, ROWS), cutlass.Int32)
    rWords.fill(-1)
    if partial != 0:
        for half in cutlass.range_constexpr(ROWS):
            first = row // mask.WORD
            words = mask.words_of(mWords, tile, key + 8 * half, first, count)
            rWords[None, half].store(words)
    return rWords
