"""TMA: atoms for tiles of a matrix, and their partition over a cluster."""

from cutlass import cute
from cutlass.cute.nvgpu import cpasync


def view(tensor: cute.Tensor, modes: list[int]) -> cute.Tensor:
    """The same memory with its modes in another order: what is loaded or stored comes first."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


def load(tensor: cute.Tensor, staged: cute.ComposedLayout, tile: tuple[int, int], multicast: int):
    """The atom and the coordinate tensor that load [tile] boxes, shared by ``multicast`` CTAs."""
    op = cpasync.CopyBulkTensorTileG2SOp()
    if multicast > 1:
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    one_stage = cute.slice_(staged, (None, None, 0))
    return cpasync.make_tiled_tma_atom(op, tensor, one_stage, tile, num_multicast=multicast)


def store(tensor: cute.Tensor, staged: cute.ComposedLayout, tile: tuple[int, int]):
    """The atom and the coordinate tensor that store [tile] boxes; what lies outside is clipped."""
    one_stage = cute.slice_(staged, (None, None, 0))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, one_stage, tile)


def partition(atom: cute.CopyAtom, rank, ranks: cute.Layout, s: cute.Tensor, g: cute.Tensor):
    """(shared, global) views whose first mode is one box, for CTA ``rank`` of a multicast group."""
    return cpasync.tma_partition(
        atom, rank, ranks, cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
    )
