"""Tiles of ``kernel_paged_sm90``: which rows and keys a CTA has.

Packed row r of a sequence is query r / group, query head r mod group of a KV head; a tile is 64 of
them, ascending.  Tile i < N is the first one of sequence i.  Any other one begins at a packed row
of the whole batch, o_n + 64 k with k >= 1, where sequence n begins at o_n: tile N + j is the one
that begins from 64 j on and before 64 (j + 1).  There is at most one: those of a sequence are 64
apart, and the first one of the next sequence begins at least 64 behind the last one's begin.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import copy, mma, softmax, tma
from ...dsl.smem import CHUNK, chunk, piece_bytes
from .block_union import BLOCK
from .kv_ranges import RowBounds
from .mask import keep_between

#: Query rows of a tile.
ROWS = 64
WARP = 32
#: Bits of a tile's number in the grid's second dimension.
TILE_BITS = 15


@dataclass(frozen=True)
class Batch:
    """Sequences of a launch.

    mTable: int32 [N, pages of a sequence]; mLengths: int32 [N], keys; mStarts: int32 [N + 1], first
    tokens.  lo, hi: the band, of key less query position; rows: those of a page.
    """

    mTable: cute.Tensor
    mLengths: cute.Tensor
    mStarts: cute.Tensor
    lo: cutlass.Int32
    hi: cutlass.Int32
    rows: cutlass.Int32


@dataclass(frozen=True)
class Tile:
    """Rows of a CTA.

    sequence; token: the first one of its sequence; first_row: packed row of row 0; rows: how many,
    0 for no tile; group: query heads of a KV head.  first_key, end_key: the keys that some row
    sees; first_block, end_block: their blocks.  position: that of the first query; lo, hi: the
    band; length: keys.
    """

    sequence: cutlass.Int32
    token: cutlass.Int32
    first_row: cutlass.Int32
    rows: cutlass.Int32
    group: cutlass.Int32
    first_key: cutlass.Int32
    end_key: cutlass.Int32
    first_block: cutlass.Int32
    end_block: cutlass.Int32
    position: cutlass.Int32
    lo: cutlass.Int32
    hi: cutlass.Int32
    length: cutlass.Int32


def grid(kv_heads: cutlass.Int32, tiles: cutlass.Int32):
    """Return the grid of a launch: KV heads, and tiles over two dimensions."""
    return kv_heads, cutlass.min(tiles, 1 << TILE_BITS), (tiles >> TILE_BITS) + 1


def coord():
    """Return (KV head, tile) of this CTA; there may be no such tile."""
    head, low, high = cute.arch.block_idx()
    return head, (high << TILE_BITS) + low


@cute.jit
def tile_of(batch: Batch, index: cutlass.Int32, tokens: cutlass.Int32, group: cutlass.Int32):
    """Return tile ``index`` of a batch, with the keys that its rows see."""
    count = batch.mLengths.shape[0]
    sequence, first_row = index, cutlass.Int32(0)
    if index >= count:
        begin = cutlass.min((index - count) * ROWS, tokens * group)
        sequence = sequence_of(batch.mStarts, count, begin // group)
        sequence = cutlass.min(sequence, count - 1)
        of_sequence = begin - batch.mStarts[sequence] * group
        # k >= 1; before the sequence's first tile there is none of it.
        first_row = cutlass.max((of_sequence + ROWS - 1) // ROWS, 0) * ROWS
    token = batch.mStarts[sequence]
    queries = batch.mStarts[sequence + 1] - token
    if index >= count and first_row == 0:
        queries = cutlass.Int32(0)
    length = batch.mLengths[sequence]
    position = length - queries
    rows = cutlass.max(cutlass.min(queries * group - first_row, ROWS), 0)
    # The keys of the first query and those of the last one.
    lo, hi = batch.lo, batch.hi
    first_key = cutlass.max(position + first_row // group + lo, 0)
    end_key = position + (first_row + cutlass.max(rows, 1) - 1) // group + hi + 1
    end_key = cutlass.min(end_key, length)
    end_key = cutlass.max(end_key, first_key)
    first_block = first_key // BLOCK
    end_block = (end_key + BLOCK - 1) // BLOCK if end_key > first_key else first_block
    return Tile(
        *(sequence, token, first_row, rows, group, first_key, end_key, first_block, end_block),
        *(position, lo, hi, length),
    )


@cute.jit
def sequence_of(mStarts: cute.Tensor, count: cutlass.Int32, token: cutlass.Int32):
    """Return the sequence of a token, or ``count``: as many as end at or before it; by a warp."""
    sequence, base = cutlass.Int32(0), cutlass.Int32(0)
    while base < count:
        lane = base + cute.arch.lane_idx()
        end = mStarts[cutlass.min(lane, count - 1) + 1]
        before = cute.arch.vote_ballot_sync((lane < count) & (end <= token))
        ended = cute.arch.popc(before)
        sequence += ended
        base = base + WARP if ended == WARP else count
    return sequence


def bounds_of(tile: Tile, row: cutlass.Int32):
    """Return the `RowBounds` of a thread whose first row is ``row``; the second is 8 below."""
    rows = (row, row + 8)
    positions = [tile.position + (tile.first_row + r) // tile.group for r in rows]
    first = tuple(cutlass.max(p + tile.lo, 0) for p in positions)
    return RowBounds(first, tuple(cutlass.min(p + tile.hi, tile.length - 1) for p in positions))


@cute.jit
def mask_scores(scores: cute.Tensor, bounds: RowBounds, key: cutlass.Int32, lane: cutlass.Int32):
    """Set the scores of the block from ``key`` on to -inf where a row does not see a key."""
    first = (bounds.first[0] - key, bounds.first[1] - key)
    last = (bounds.last[0] - key, bounds.last[1] - key)
    if (
        (cutlass.max(first[0], first[1]) > 0)
        | (cutlass.min(last[0], last[1]) < BLOCK - 1)
    ):  # fmt: skip
        keep_between(scores, lane, first, last)


@cute.jit
def token_of(tile: Tile, row: cutlass.Int32, head: cutlass.Int32):
    """Return (token, query head) of a row of a tile of a KV head; 64 bits, for addresses."""
    packed = tile.first_row + row
    token = tile.token + packed // tile.group
    q_head = cutlass.Int64(head) * tile.group + packed % tile.group
    return cutlass.Int64(token), q_head


@cute.jit
def pages_of(batch: Batch, config: cutlass.Constexpr, tile: Tile, block: cutlass.Int32):
    """Return, in lane n, where box n of a block lies: the page, and the box in it; by a warp.

    A box without keys that the tile sees takes the place of one that has some.
    """
    box = block * (BLOCK // config.keys_per_load) + cute.arch.lane_idx()
    last = cutlass.max(tile.end_key - 1, 0) // config.keys_per_load
    box = cutlass.max(cutlass.min(box, last), tile.first_key // config.keys_per_load)
    if cutlass.const_expr(config.row_bits > 0):
        # A page of one or of two boxes.
        is_double = cutlass.Int32(batch.rows > config.keys_per_load)
        page = copy.vector(batch.mTable, (tile.sequence, box >> is_double), 1)[0]
        return (page << config.row_bits) + (box & is_double)
    else:
        return copy.vector(batch.mTable, (tile.sequence, box), 1)[0]


def place(pages: cutlass.Int32, n: cutlass.Int32, config: cutlass.Constexpr):
    """Return (page, row in it) of box ``n``; pages: the places of boxes, by lane (`pages_of`)."""
    box, bits = cute.arch.shuffle_sync(pages, n), config.row_bits
    return box >> bits, (box & ((1 << bits) - 1)) * config.keys_per_load


def load_box(
    matrix: tma.Source,
    offset: tuple[cutlass.Int32, cutlass.Int32],
    index: tuple[cutlass.Int32 | None, cutlass.Int32 | None],
    sBox: cute.Tensor,
    full: cute.Pointer,
):
    """Load box ``index`` of K or V of one page, counted from ``offset`` on; by a warp."""
    shape = tuple(cute.size(n) for n in cute.shape(sBox)[:2])
    gBox = cute.local_tile(cute.domain_offset(offset, matrix.tensor), shape, index)
    tXsX, tXgX = tma.partition(matrix.atom, 0, cute.make_layout(1), sBox, gBox)
    cute.copy(matrix.atom, tXgX[None, 0], tXsX[None, 0], tma_bar_ptr=full)


@cute.jit
def load_q(
    mQ: cute.Tensor,
    pQ: cute.Pointer,
    tile: Tile,
    head: cutlass.Int32,
    lane: cutlass.Int32,
    head_dim: cutlass.Constexpr,
):
    """Copy a tile of Q to shared memory, zeros beyond its rows; by the consumer."""
    dtype = mQ.element_type
    per_row, elements = head_dim * dtype.width // 8 // CHUNK, CHUNK * 8 // dtype.width
    piece = piece_bytes(dtype, head_dim)
    values = cute.make_rmem_tensor(CHUNK // 4, cutlass.Int32)
    for number in cutlass.range(lane, ROWS * per_row, mma.WARPGROUP, unroll=1):
        row, part = number // per_row, number % per_row
        values.fill(0)
        if row < tile.rows:
            coord = token_of(tile, row, head)
            gRow = copy.vector(mQ, (*coord, part * elements), elements)
            cute.autovec_copy(cute.recast_tensor(gRow, cutlass.Int32), values)
        cute.autovec_copy(values, chunk(pQ, ROWS, piece, row, part))
    cute.arch.fence_proxy("async.shared", space="cta")
    await_consumer()


@cute.jit
def clean(
    stage: cute.Pointer,
    first: cutlass.Int32,
    end: cutlass.Int32,
    thread: cutlass.Int32,
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr,
):
    """Zero the rows of a block of V before ``first`` and from ``end`` on; by the consumer."""
    piece = piece_bytes(dtype, columns)
    zeros = cute.make_rmem_tensor(CHUNK // 4, cutlass.Int32)
    zeros.fill(0)
    # A thread has a row.
    if thread < first or thread >= end:
        for number in cutlass.range_constexpr(columns * dtype.width // 8 // CHUNK):
            cute.autovec_copy(zeros, chunk(stage, BLOCK, piece, thread, number))
    cute.arch.fence_proxy("async.shared", space="cta")
    await_consumer()


def await_consumer():
    """Wait for the other threads of the consumer warpgroup."""
    cute.arch.barrier(barrier_id=1, number_of_threads=mma.WARPGROUP)


@cute.jit
def start_at_sinks(
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    mSinks: cute.Tensor,
    tile: Tile,
    head: cutlass.Int32,
    row: cutlass.Int32,
    lane: cutlass.Int32,
    c: cutlass.Float32,
):
    """Begin the state of a thread's rows with their sinks."""
    for half in cutlass.range_constexpr(2):
        _, q_head = token_of(tile, row + 8 * half, head)
        sink = copy.aligned(mSinks, q_head, 1)[0]
        softmax.start_row_at_sink(row_max, row_sum, half, sink, lane, c)


@cute.jit
def clear(
    batch: Batch,
    mO: cute.Tensor,
    mLse: cute.Tensor,
    index: cutlass.Int32,
    head: cutlass.Int32,
    group: cutlass.Int32,
    thread: cutlass.Int32,
):
    """Write O = 0 and LSE = -inf of tokens of no sequence, of one KV head.

    By the consumer of the CTA of tile N + j, of packed rows 64 j to 64 j + 63 of the batch.
    """
    count, tokens = batch.mLengths.shape[0], mO.shape[0]
    begin = (index - count) * ROWS
    if index >= count and (begin + ROWS - 1) // group >= batch.mStarts[count]:
        elements = CHUNK * 8 // mO.element_type.width
        zeros = cute.make_rmem_tensor((elements,), mO.element_type)
        zeros.fill(0.0)
        parts = mO.shape[2] // elements
        for number in cutlass.range(thread, ROWS * parts, mma.WARPGROUP, unroll=1):
            packed, part = begin + number // parts, number % parts
            token = packed // group
            q_head = cutlass.Int64(head) * group + packed % group
            if token >= batch.mStarts[count] and token < tokens:
                copy.vector(mO, (token, q_head, part * elements), elements).store(zeros.load())
                if part == 0:
                    copy.vector(mLse, (q_head, token), 1)[0] = -cutlass.Float32.inf
