"""TMA: atoms for tiles of a matrix, and their partition over a cluster."""

from dataclasses import dataclass

from cutlass import cute
from cutlass.cute.nvgpu import cpasync


@dataclass(frozen=True)
class Source:
    """A tensor in global memory as TMA sees it, to load from or to store to.

    atom: the copy, with its descriptor; tensor: the coordinates of its elements.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor


def view(tensor: cute.Tensor, modes: list[int]) -> cute.Tensor:
    """The same memory with its modes in another order: what is loaded or stored comes first."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


def load(
    tensor: cute.Tensor, staged: cute.ComposedLayout, tile: tuple[int, int], multicast: int
) -> Source:
    """For loads of [tile] boxes that ``multicast`` CTAs share."""
    op = cpasync.CopyBulkTensorTileG2SOp()
    if multicast > 1:
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    one_stage = cute.slice_(staged, (None, None, 0))
    return Source(
        *cpasync.make_tiled_tma_atom(op, tensor, one_stage, tile, num_multicast=multicast)
    )


def store(tensor: cute.Tensor, staged: cute.ComposedLayout, tile: tuple[int, int]) -> Source:
    """For stores of [tile] boxes; what lies outside the tensor is clipped."""
    one_stage = cute.slice_(staged, (None, None, 0))
    op = cpasync.CopyBulkTensorTileS2GOp()
    return Source(*cpasync.make_tiled_tma_atom(op, tensor, one_stage, tile))


def partition(atom: cute.CopyAtom, rank, ranks: cute.Layout, s: cute.Tensor, g: cute.Tensor):
    """(shared, global) views whose first mode is one box, for CTA ``rank`` of a multicast group."""
    return cpasync.tma_partition(
        atom, rank, ranks, cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
    )
