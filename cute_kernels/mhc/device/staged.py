"""Operands in shared memory that threads write and read by hand: wide accesses, swizzled rows."""

import cutlass
from cutlass import cute

from . import matrix
from .vector import ACCESS, subview, to_fp32


@cute.jit
def neighbours(sX: cute.Tensor, first: cutlass.Int32, count: cutlass.Constexpr[int]) -> cute.Tensor:
    """View of ``count`` elements of shared memory from element ``first`` on, in wide accesses."""
    size = sX.element_type.width // 8
    return view(sX, first * size, count)


@cute.jit
def swizzled(
    sX: cute.Tensor,
    offset: cutlass.Int32,
    row_bytes: cutlass.Constexpr[int],
    base: cutlass.Int32,
    count: cutlass.Constexpr[int],
) -> cute.Tensor:
    """View of ``count`` elements at byte ``offset`` of the swizzled tile at byte ``base`` of sX.

    The swizzle of rows of 16 s bytes exchanges pieces of 16 bytes: the number of the 128 bytes that
    a piece lies in, modulo s, is combined with the piece's number.
    """
    offset = offset ^ (offset // 128 % (row_bytes // 16) * 16)
    return view(sX, base + offset, count)


@cute.jit
def view(sX: cute.Tensor, offset: cutlass.Int32, count: cutlass.Constexpr[int]) -> cute.Tensor:
    """View of ``count`` elements at byte ``offset`` of sX, aligned to their size.

    Computed by hand: the cast asserts the alignment, which one wide access needs.
    """
    element = sX.element_type
    pointer = cute.make_ptr(
        element,
        sX.iterator.toint() + offset,
        cute.AddressSpace.smem,
        assumed_align=min(count * element.width // 8, ACCESS),
    )
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def clear(pointer: cute.Pointer, count: cutlass.Constexpr[int], threads: cutlass.Constexpr[int]):
    """Set ``count`` bf16 elements to zero, by all threads of a CTA."""
    tidx, _, _ = cute.arch.thread_idx()
    words = count // 2
    sWords = cute.make_tensor(
        cute.recast_ptr(pointer, dtype=cutlass.Int32), cute.make_layout(words)
    )
    for i in cutlass.range(tidx, words, threads):
        sWords[i] = cutlass.Int32(0)


@cute.jit
def read(sX: cute.Tensor) -> cute.Tensor:
    """Load a view from shared memory, in fp32."""
    rX = cute.make_rmem_tensor(cute.make_layout(cute.size(sX)), sX.element_type)
    rX.store(sX.load())
    return to_fp32(rX)


@cute.jit
def store_terms(
    sX: cute.Tensor,
    row: cutlass.Int32,
    column: cutlass.Int32,
    values: cute.Tensor,
    shape: cutlass.Constexpr[tuple[int, int, int]],
):
    """Write bf16 terms of fp32 values to neighbouring columns of a row.

    ``shape``: (rows, columns, terms) of sX, K-major and swizzled.  ``column`` and the number of
    values are multiples of 4.
    """
    rows, columns, count = shape
    row_bytes = columns * sX.element_type.width // 8
    for b, rTerm in enumerate(matrix.terms(values, count)):
        rPieces = cute.recast_tensor(rTerm, sX.element_type)
        for a in cutlass.range_constexpr(cute.size(values) // 4):
            offset = row * row_bytes + (column + 4 * a) * (sX.element_type.width // 8)
            sAccess = swizzled(sX, offset, row_bytes, b * rows * row_bytes, 4)
            sAccess.store(subview(rPieces, 4 * a, 4).load())
