"""One aligned access to a few neighbours in global memory, with 64-bit offsets."""

import cutlass
from cutlass import cute


@cute.jit
def vector(tensor: cute.Tensor, at: tuple, count: cutlass.Constexpr) -> cute.Tensor:
    """The ``count`` elements of ``tensor`` from the coordinate ``at`` on, along its last mode.

    They lie at a multiple of their own bytes, and the last stride is 1: launchers see to it.
    """
    # In 64 bits before the product: a tensor may have more than 2^31 elements.
    offset = cutlass.Int64(at[0]) * tensor.stride[0]
    for mode in cutlass.range_constexpr(1, len(at) - 1):
        offset += cutlass.Int64(at[mode]) * tensor.stride[mode]
    return aligned(tensor, offset + at[len(at) - 1], count)


@cute.jit
def aligned(tensor: cute.Tensor, offset, count: cutlass.Constexpr) -> cute.Tensor:
    """The ``count`` elements from ``offset`` on, a 64-bit number of elements, as in ``vector``."""
    element = tensor.element_type
    pointer = cute.make_ptr(
        element,
        tensor.iterator.toint() + offset * (element.width // 8),
        cute.AddressSpace.gmem,
        assumed_align=count * element.width // 8,
    )
    return cute.make_tensor(pointer, cute.make_layout(count))
