"""Parts of a tensor that a rank has: slices of one dimension, or the same slice of each half of it.

The latter is the layout of experts' gate and up, which are one parameter: torch calls it
``_StridedShard``, and so does transformers.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh


def packed(dim: int, pieces: int):
    """Placement of a dimension of so many pieces, of each of which a rank has its part."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=pieces)


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a DTensor has parts of pieces."""
    return any(hasattr(placement, "split_factor") for placement in tensor.placements)


def spans(size: int, mesh: DeviceMesh, placement) -> list[slice]:
    """Indices of this rank's part of a dimension of ``size``."""
    pieces = getattr(placement, "split_factor", 1)
    length = size // (pieces * mesh.size())
    starts = range(mesh.get_local_rank() * length, size, size // pieces)
    return [slice(start, start + length) for start in starts]


def from_whole(tensor: torch.Tensor, mesh: DeviceMesh, placement) -> torch.Tensor:
    """DTensor of this rank's part of a tensor that it has whole.  The part is a copy."""
    from torch.distributed.tensor import DTensor

    dim = placement.dim
    pieces = [
        tensor.narrow(dim, span.start, span.stop - span.start)
        for span in spans(tensor.shape[dim], mesh, placement)
    ]
    local = torch.cat(pieces, dim)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    sizes = {"shape": tensor.shape, "stride": whole.stride()}
    return DTensor.from_local(local, mesh, [placement], run_check=False, **sizes)
