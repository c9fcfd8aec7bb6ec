"""TMA: atoms for tiles of a matrix, and their partition over a cluster."""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync


@dataclass(frozen=True)
class Source:
    """A tensor in global memory as TMA addresses it, for loads or for stores.

    atom: the copy, with its descriptor; tensor: the coordinates of its elements.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor

    def matrix(self, head: cutlass.Int32, batch: cutlass.Int32) -> "Source":
        """Return one head's matrix of a source [rows, columns, heads, batches]."""
        return Source(self.atom, self.tensor[None, None, head, batch])


def shifted(source: Source, coord: cute.Coord) -> Source:
    """Source whose origin is ``coord`` of another one."""
    return Source(source.atom, cute.domain_offset(coord, source.tensor))


def sliced(source: Source, index: cutlass.Int32) -> Source:
    """Matrix ``index`` of a source of three modes."""
    return Source(source.atom, source.tensor[None, None, index])


def view(tensor: cute.Tensor, modes: list[int]) -> cute.Tensor:
    """Return the same memory with its modes reordered: those of the TMA box come first."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


def load(
    tensor: cute.Tensor, staged: cute.ComposedLayout, tile: tuple[int, int], multicast: int
) -> Source:
    """Return the source of loads of [tile] boxes, which ``multicast`` CTAs share."""
    op = cpasync.CopyBulkTensorTileG2SOp()
    if multicast > 1:
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    one_stage = cute.slice_(staged, (None, None, 0))
    return Source(
        *cpasync.make_tiled_tma_atom(op, tensor, one_stage, tile, num_multicast=multicast)
    )


def store(tensor: cute.Tensor, staged: cute.ComposedLayout, tile: tuple[int, int]) -> Source:
    """Return the target of stores of [tile] boxes; TMA clips what lies outside the tensor."""
    one_stage = cute.slice_(staged, (None, None, 0))
    op = cpasync.CopyBulkTensorTileS2GOp()
    return Source(*cpasync.make_tiled_tma_atom(op, tensor, one_stage, tile))


def partition(
    atom: cute.CopyAtom, rank: cutlass.Int32, ranks: cute.Layout, sX: cute.Tensor, gX: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """(tXsX, tXgX), whose first mode is one box, for CTA ``rank`` of a multicast group."""
    return cpasync.tma_partition(
        atom, rank, ranks, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )
