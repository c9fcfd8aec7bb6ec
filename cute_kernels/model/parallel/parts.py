"""Parts of a tensor that a rank has: slices of one dimension, or the same slice of each half of it.

The latter is the layout of experts' gate and up, which are one parameter: torch calls it
``_StridedShard``, and so does transformers.  torch reads it wrong in some places (dtensor.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh


class Box(NamedTuple):
    """A block of a whole tensor that a rank has."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def slices(self) -> tuple[slice, ...]:
        """Index of the block in the whole tensor."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(offset, offset + size) for offset, size in pairs)


def packed(dim: int, pieces: int):
    """Placement of a dimension of so many pieces, of each of which a rank has its part."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=pieces)


def packed_axis(placements: Sequence) -> int | None:
    """Mesh dimension whose ranks have parts of pieces; None: there is none.

    ``fully_shard`` uses the same placement for another purpose: of a dimension that a later
    dimension of the mesh cuts too.
    """
    dims = [getattr(placement, "dim", None) for placement in placements]
    for axis, placement in enumerate(placements):
        if getattr(placement, "split_factor", 1) > 1 and dims.count(placement.dim) == 1:
            return axis
    return None


def boxes(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence) -> list[Box]:
    """Blocks of a whole tensor that this rank has, in the order in which its part has them."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    axis = packed_axis(placements)
    others = [Replicate() if i == axis else placement for i, placement in enumerate(placements)]
    sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, others)
    if axis is None:
        return [Box(tuple(offsets), tuple(sizes))]
    dim, pieces = placements[axis].dim, placements[axis].split_factor
    piece = shape[dim] // pieces
    length = piece // mesh.size(axis)
    first = mesh.get_local_rank(axis) * length
    return [
        Box(
            (*offsets[:dim], first + i * piece, *offsets[dim + 1 :]),
            (*sizes[:dim], length, *sizes[dim + 1 :]),
        )
        for i in range(pieces)
    ]


def joined(pieces: list[torch.Tensor], placements: Sequence) -> torch.Tensor:
    """A rank's part, a copy, of its blocks."""
    axis = packed_axis(placements)
    return torch.cat(pieces, 0 if axis is None else placements[axis].dim)


def from_whole(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence) -> torch.Tensor:
    """DTensor of this rank's part of a tensor that it has whole.  The part is a copy."""
    from torch.distributed.tensor import DTensor

    own = boxes(tensor.shape, mesh, placements)
    local = joined([tensor[box.slices()] for box in own], placements)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    sizes = {"shape": tensor.shape, "stride": whole.stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **sizes)
