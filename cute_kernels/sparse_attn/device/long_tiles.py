"""Units of the kernels for few sequences with long contexts: a token and a KV head each.

A unit's rows are the query heads of its KV head.  Between the two kernels lie, for each unit and
each block of 128 keys that some query of the sequence sees, in fp32

    scores   [tokens Hkv, blocks, 1024 halves], a block in the order of the accumulator's
             fragments: of each half of 8 rows, vector v (of 8) of lane l of the first warp is at
             32 v + l, values 4 i + 2 half + side of i = 2 v and 2 v + 1; those of lanes without a
             row are not written
    maxima   [tokens Hkv, group, blocks], the largest score of a row in a block, NaN ignored

A block is given by its index from key 0 on.
"""

from dataclasses import dataclass, replace

import cutlass
from cutlass import cute

from ...dsl import copy
from . import key_buffer, paged_tiles
from .key_buffer import BufferTile, KeyBuffer
from .paged_tiles import BLOCK, WARP, Batch, Tile, sequence_of

#: Rows of a unit at most: those of the first warp of an accumulator.
MOST_GROUP = 16
#: Values of a vector, vectors of a row's lane in a block, rows of a fragment's half.
VECTOR, VECTORS, HALF = 4, 8, 8


@dataclass(frozen=True)
class Range:
    """Blocks that queries of a sequence see, and how many queries it has."""

    queries: cutlass.Int32
    first_block: cutlass.Int32
    blocks: cutlass.Int32

    def items(self, kv_heads: cutlass.Int32):
        """Return the number of (query, KV head, block) of the sequence."""
        return self.queries * kv_heads * self.blocks


@dataclass(frozen=True)
class Cursor:
    """Items that a CTA has, of all sequences: how many, and where the first one is.

    sequence; offset: the item's index in its sequence; remaining: items.
    """

    sequence: cutlass.Int32
    offset: cutlass.Int32
    remaining: cutlass.Int32


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of a unit: ``count`` from ``block`` on.

    query: its index in the sequence; head: KV head; after: items of the sequence behind these.
    """

    query: cutlass.Int32
    head: cutlass.Int32
    block: cutlass.Int32
    count: cutlass.Int32
    after: cutlass.Int32


@cute.jit
def range_of(batch: Batch | KeyBuffer, sequence: cutlass.Int32):
    """Return the `Range` of a sequence."""
    if cutlass.const_expr(isinstance(batch, KeyBuffer)):
        queries = cutlass.Int32(1)
        first_key, end_key, _ = key_buffer.keys_of(batch, sequence)
    else:
        token = batch.mStarts[sequence]
        queries = batch.mStarts[sequence + 1] - token
        length = batch.mLengths[sequence]
        first_key = cutlass.max(length - queries + batch.lo, 0)
        end_key = cutlass.min(length + batch.hi, length)
    first_block = first_key // BLOCK
    blocks = (end_key + BLOCK - 1) // BLOCK - first_block
    seen = (queries > 0) & (end_key > first_key)
    return Range(queries, first_block, blocks if seen else cutlass.Int32(0))


@cute.jit
def tile_of(
    batch: Batch | KeyBuffer,
    sequence: cutlass.Int32,
    query: cutlass.Int32,
    group: cutlass.Int32,
):
    """Return the `Tile` of one query of a sequence."""
    if cutlass.const_expr(isinstance(batch, KeyBuffer)):
        return key_buffer.tile_of(batch, sequence, group)
    else:
        token = batch.mStarts[sequence]
        queries = batch.mStarts[sequence + 1] - token
        length = batch.mLengths[sequence]
        position = length - queries + query
        first_key = cutlass.max(position + batch.lo, 0)
        end_key = cutlass.max(cutlass.min(position + batch.hi + 1, length), first_key)
        first_block = first_key // BLOCK
        end_block = (end_key + BLOCK - 1) // BLOCK if end_key > first_key else first_block
        return Tile(
            *(sequence, token + query, cutlass.Int32(0), group, group),
            *(first_key, end_key, first_block, end_block),
            *(position, batch.lo, batch.hi, length),
        )


@cute.jit
def tile_of_token(batch: Batch | KeyBuffer, token: cutlass.Int32, group: cutlass.Int32):
    """Return the `Tile` of a token of the batch; one of no sequence has no rows; by a warp."""
    if cutlass.const_expr(isinstance(batch, KeyBuffer)):
        return key_buffer.tile_of(batch, token, group)
    else:
        count = batch.mLengths.shape[0]
        sequence = sequence_of(batch.mStarts, count, token)
        last = cutlass.min(sequence, count - 1)
        tile = tile_of(batch, last, token - batch.mStarts[last], group)
        rows = group if sequence < count else cutlass.Int32(0)
        return replace(tile, rows=rows)


def count_of(batch: Batch | KeyBuffer):
    """Return the number of sequences."""
    return batch.count if isinstance(batch, KeyBuffer) else batch.mLengths.shape[0]


@cute.jit
def boxes_of(batch: Batch | KeyBuffer, config: cutlass.Constexpr, tile: Tile, block: cutlass.Int32):
    """Return, in lane n, where box n of a block lies, for `place`; by a warp."""
    if cutlass.const_expr(isinstance(batch, KeyBuffer)):
        return key_buffer.rows_of(tile, block)
    else:
        return paged_tiles.pages_of(batch, config, tile, block)


def place(tile: Tile, boxes: cutlass.Int32, n: cutlass.Int32, config: cutlass.Constexpr):
    """Return (page, row in it) of box ``n``; boxes: what `boxes_of` returned."""
    if isinstance(tile, BufferTile):
        return tile.sequence, cute.arch.shuffle_sync(boxes, n)
    return paged_tiles.place(boxes, n, config)


def row_of(tile: Tile, row: cutlass.Int32, rows: cutlass.Int32):
    """Return the row that is read for ``row`` of a page or buffer: one of its ``rows``."""
    if isinstance(tile, BufferTile):
        return cutlass.max(cutlass.min(row, rows - 1), 0)
    return row


@cute.jit
def cursor_of(
    batch: Batch | KeyBuffer, kv_heads: cutlass.Int32, cta: cutlass.Int32, ctas: cutlass.Int32
):
    """Return the `Cursor` of a CTA: items cta / ctas to (cta + 1) / ctas of all; by a warp."""
    count, lane = count_of(batch), cute.arch.lane_idx()
    total = cutlass.Int32(0)
    for base in cutlass.range(0, count, WARP, unroll=1):
        total += cute.arch.warp_redux_sync(items_of(batch, kv_heads, base + lane), "add")
    begin = cutlass.Int32(cutlass.Int64(total) * cta // ctas)
    end = cutlass.Int32(cutlass.Int64(total) * (cta + 1) // ctas)
    # The sequence that has item ``begin``, and the items before it.
    sequence, passed, base = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    while base < count:
        own = items_of(batch, kv_heads, base + lane)
        inclusive = own
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync(inclusive, cutlass.max(lane - (1 << step), 0))
            inclusive += below if lane >= 1 << step else cutlass.Int32(0)
        before = (base + lane < count) & (passed + inclusive <= begin)
        ended = cute.arch.popc(cute.arch.vote_ballot_sync(before))
        last = cute.arch.shuffle_sync(inclusive, cutlass.max(ended - 1, 0))
        passed += last if ended > 0 else cutlass.Int32(0)
        sequence += ended
        base = base + WARP if ended == WARP else count
    return Cursor(sequence, begin - passed, end - begin)


@cute.jit
def items_of(batch: Batch | KeyBuffer, kv_heads: cutlass.Int32, sequence: cutlass.Int32):
    """Return `Range.items` of a sequence; 0 of one beyond the last."""
    count = count_of(batch)
    items = range_of(batch, cutlass.min(sequence, count - 1)).items(kv_heads)
    return items if sequence < count else cutlass.Int32(0)


@cute.jit
def segment_of(batch: Batch | KeyBuffer, kv_heads: cutlass.Int32, cursor: Cursor):
    """Return the `Segment` at a cursor: what is left of a unit; no blocks behind a sequence."""
    of_sequence = range_of(batch, cursor.sequence)
    items = of_sequence.items(kv_heads)
    blocks = cutlass.max(of_sequence.blocks, 1)
    unit, block = cursor.offset // blocks, cursor.offset % blocks
    left = blocks - block if cursor.offset < items else cutlass.Int32(0)
    count = cutlass.min(left, cursor.remaining)
    after = items - cursor.offset - count
    return Segment(
        *(unit // kv_heads, unit % kv_heads),
        *(of_sequence.first_block + block, count, after),
    )


@cute.jit
def next_of(cursor: Cursor, segment: Segment):
    """Return the `Cursor` behind a segment."""
    ends = segment.after <= 0
    sequence = cursor.sequence + cutlass.Int32(ends)
    offset = cutlass.Int32(0) if ends else cursor.offset + segment.count
    return Cursor(sequence, offset, cursor.remaining - segment.count)


def scores_vector(
    mScores: cute.Tensor,
    unit: cutlass.Int64,
    block: cutlass.Int32,
    half: int,
    number: int,
    lane: cutlass.Int32,
):
    """View of vector ``number`` of a lane, of one half of a block's scores."""
    element = (half * VECTORS + number) * WARP * VECTOR + lane * VECTOR
    return copy.vector(mScores, (unit, block, element), VECTOR)
