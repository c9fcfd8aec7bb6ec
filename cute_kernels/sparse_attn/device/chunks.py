"""16-byte accesses to rows of a swizzled operand in shared memory, without TMA or a tiled copy."""

import cutlass
from cutlass import cute

#: Bytes that a thread moves at once, and that a swizzle keeps together.
CHUNK = 16


def piece_bytes(dtype: type[cutlass.Numeric], contiguous: int) -> int:
    """Contiguous bytes of a row in a `smem.operand_layout`: the width of its swizzle atom."""
    size = contiguous * dtype.width // 8
    return next(width for width in (128, 64, 32) if size % width == 0)


@cute.jit
def chunk(
    tile: cute.Pointer,
    rows: cutlass.Constexpr,
    width: cutlass.Constexpr,
    row: cutlass.Int32,
    number: cutlass.Int32,
):
    """Chunk ``number`` (16 bytes, four int32s) of a row of one stage of a `smem.operand_layout`.

    tile: first byte of the stage; rows: its number of rows; width: its `piece_bytes`.
    """
    # By hand: `partition_S` of a tiled copy would fix which threads have which rows, and callers
    # take any range of rows.
    per_row = width // CHUNK
    offset = ((number // per_row * rows + row) * per_row + number % per_row) * CHUNK
    # Swizzle: bits 4 and on of an address, exclusive or bits 7 and on: as many as choose a chunk.
    offset = offset ^ ((offset >> 3) & (width - CHUNK))
    pointer = cute.make_ptr(
        cutlass.Int32, tile.toint() + offset, cute.AddressSpace.smem, assumed_align=CHUNK
    )
    return cute.make_tensor(pointer, cute.make_layout(CHUNK // 4))
