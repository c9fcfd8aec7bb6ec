"""Sequences of one query each whose keys are consecutive rows of a buffer [N, S, Hkv, D].

Sequence n has its keys in the rows of buffer n.  With ranges it has those that its query's range
names, and key 0 is where ``kv_ranges`` has it, so that a key's block follows from its position in
the sequence; without ranges, key 0 is row 0.  A block is a box of 128 rows, of which some may be no
keys of the sequence, or no rows of the buffer.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from . import kv_ranges
from .paged_tiles import BLOCK, Tile


@dataclass(frozen=True)
class KeyBuffer:
    """Sequences of a launch, in place of a `Batch`.

    mSpans: int32 [N, 1, 4] (``kv_ranges``), or None where all see the keys from ``first`` to before
    ``end``.  count: N; rows: S.
    """

    mSpans: cute.Tensor | None
    first: cutlass.Int32
    end: cutlass.Int32
    count: cutlass.Int32
    rows: cutlass.Int32


@dataclass(frozen=True)
class BufferTile(Tile):
    """Rows of a unit; column: row of the buffer that key 0 is, which may lie before the first."""

    column: cutlass.Int32


@cute.jit
def keys_of(buffer: KeyBuffer, sequence: cutlass.Int32):
    """Return (first, end) of the keys that a sequence's query sees, and the row of key 0."""
    if cutlass.const_expr(buffer.mSpans is None):
        return buffer.first, buffer.end, cutlass.Int32(0)
    else:
        ranges = buffer.mSpans[sequence, None, None]
        column = kv_ranges.column_of_key_0(ranges)
        first, end = kv_ranges.seen(ranges, cutlass.Int32(0), column)
        # Nothing checks ranges on a GPU: a wrong begin or end must not lead beyond the scratch.
        rows = buffer.rows - cutlass.max(column, 1 - BLOCK)
        return cutlass.max(first, 0), cutlass.min(end, rows), column


@cute.jit
def tile_of(buffer: KeyBuffer, sequence: cutlass.Int32, group: cutlass.Int32):
    """Return the `BufferTile` of a sequence's query."""
    first_key, end_key, column = keys_of(buffer, sequence)
    end_key = cutlass.max(end_key, first_key)
    first_block = first_key // BLOCK
    end_block = (end_key + BLOCK - 1) // BLOCK if end_key > first_key else first_block
    # At position 0, so that the band is the keys themselves.
    position, lo, hi, length = cutlass.Int32(0), first_key, end_key - 1, end_key
    return BufferTile(
        *(sequence, sequence, cutlass.Int32(0), group, group),
        *(first_key, end_key, first_block, end_block),
        *(position, lo, hi, length, column),
    )


def rows_of(tile: BufferTile, block: cutlass.Int32):
    """Return, in lane n, the first row of the n-th block from ``block`` on; by a warp."""
    return tile.column + (block + cute.arch.lane_idx()) * BLOCK
