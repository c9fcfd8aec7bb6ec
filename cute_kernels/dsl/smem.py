"""Shared-memory layouts that WGMMA and TMA both understand, and 16-byte accesses to their rows."""

import cutlass
from cutlass import cute
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

#: Alignment of the buffers that WGMMA and 128-byte-swizzled TMA need, in bytes.
ALIGN = 1024
#: Bytes that a thread moves at once, and that a swizzle keeps together.
CHUNK = 16


def tiles(dtype: type[cutlass.Numeric], layout: cute.ComposedLayout) -> cute.struct.Align:
    """Field of a struct of shared memory: tiles of ``layout``."""
    return cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], ALIGN]


def struct(**fields: cute.struct.MemRange | cute.struct.Align) -> type:
    """Struct of shared memory with these fields, in this order; host code."""
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def major_of(name: str) -> LayoutEnum:
    """Translate ``"k"`` (reduction dimension contiguous) or ``"mn"`` to the DSL's enum."""
    return LayoutEnum.ROW_MAJOR if name == "k" else LayoutEnum.COL_MAJOR


def operand_layout(
    dtype: type[cutlass.Numeric],
    rows: int,
    k: int,
    major: str,
    stages: int,
    part: int | None = None,
) -> cute.ComposedLayout:
    """Return the layout of a staged, swizzled [rows, k, stages] operand.

    The swizzle follows the contiguous extent, or ``part`` of it where an instruction takes no more:
    an instruction begins with a whole atom of the swizzle.
    """
    contiguous = part or (k if major == "k" else rows)
    atom = hopper_helpers.get_smem_layout_atom(major_of(major), dtype, contiguous)
    order = (0, 1, 2) if major == "k" else (1, 0, 2)
    layout_atom = cute.nvgpu.warpgroup.make_smem_layout_atom(atom, dtype)
    return cute.tile_to_shape(layout_atom, (rows, k, stages), order=order)


def piece_bytes(dtype: type[cutlass.Numeric], contiguous: int) -> int:
    """Contiguous bytes of a row in an `operand_layout`: the width of its swizzle atom."""
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
    """Chunk ``number`` (16 bytes, four int32s) of a row of one stage of an `operand_layout`.

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
