"""Rows of a swizzled operand in shared memory, 16 bytes at a time, without TMA or a tiled copy."""

import cutlass
from cutlass import cute

#: Bytes that a thread moves at once, and that a swizzle keeps together.
CHUNK = 16


def piece_bytes(dtype, contiguous: int) -> int:
    """Bytes of a row that lie side by side in a `smem.operand_layout`: its swizzle atom's."""
    size = contiguous * dtype.width // 8
    return next(width for width in (128, 64, 32) if size % width == 0)


@cute.jit
def chunk(tile: cute.Pointer, rows: cutlass.Constexpr, width: cutlass.Constexpr, row, number):
    """The ``number``-th 16 bytes of a row of one stage of a `smem.operand_layout`, as four int32s.

    tile: where the stage begins; rows: how many it has; width: its `piece_bytes`.
    """
    per_row = width // CHUNK
    offset = ((number // per_row * rows + row) * per_row + number % per_row) * CHUNK
    # Bits 4 and on of an address, exclusive or bits 7 and on: as many as choose a chunk of a row.
    place = offset ^ ((offset >> 3) & (width - CHUNK))
    pointer = cute.make_ptr(
        cutlass.Int32, tile.toint() + place, cute.AddressSpace.smem, assumed_align=CHUNK
    )
    return cute.make_tensor(pointer, cute.make_layout(CHUNK // 4))
