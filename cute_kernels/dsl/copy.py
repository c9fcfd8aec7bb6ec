"""Vector views of global memory at 64-bit offsets: one aligned access to neighbouring elements."""

import cutlass
from cutlass import cute


@cute.jit
def vector(tensor: cute.Tensor, coord: cute.Coord, count: cutlass.Constexpr[int]) -> cute.Tensor:
    """View of ``count`` elements of ``tensor`` from ``coord`` on, along its last mode.

    The first element is aligned to the vector's size, and the last stride is 1: launchers check
    both.
    """
    # Computed by hand: the cast to 64 bits must come before the product, as a tensor may have more
    # than 2^31 elements.
    offset = cutlass.Int64(coord[0]) * tensor.stride[0]
    for mode in cutlass.range_constexpr(1, len(coord) - 1):
        offset += cutlass.Int64(coord[mode]) * tensor.stride[mode]
    return aligned(tensor, offset + coord[len(coord) - 1], count)


@cute.jit
def aligned(
    tensor: cute.Tensor, offset: cutlass.Int64, count: cutlass.Constexpr[int]
) -> cute.Tensor:
    """View of ``count`` elements from element ``offset`` on, aligned to the vector's size."""
    element = tensor.element_type
    pointer = cute.make_ptr(
        element,
        tensor.iterator.toint() + offset * (element.width // 8),
        cute.AddressSpace.gmem,
        assumed_align=count * element.width // 8,
    )
    return cute.make_tensor(pointer, cute.make_layout(count))
