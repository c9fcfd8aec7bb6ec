"""Parts of a tensor that a rank has: slices of one dimension, or the same slice of each half of it.

The latter is the layout of experts' gate and up, which are one parameter: torch calls it
``_StridedShard``, and so does transformers.  torch reads it wrong in some places (dtensor.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh


class Box(NamedTuple):
    """A block of a whole tensor that a rank has.

    first: offsets of the block in the rank's part.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: tuple[int, ...]

    def slices(self) -> tuple[slice, ...]:
        """Index of the block in the whole tensor."""
        return _slices(self.offsets, self.sizes)

    def view(self, part: torch.Tensor) -> torch.Tensor:
        """The block in the rank's part, which shares memory."""
        return part[_slices(self.first, self.sizes)]


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    pairs = zip(offsets, sizes, strict=True)
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
    """Blocks of a whole tensor that this rank has, at least one.

    Sizes need not be even: chunks are those of ``torch.chunk``.  A part without elements is one
    block at the end.
    """
    ranges = [[(0, size)] for size in shape]
    for axis, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        number = getattr(placement, "split_factor", 1)
        pieces = [_chunk(ranges[dim], i, number) for i in range(number)]
        rank, size = mesh.get_local_rank(axis), mesh.size(axis)
        ranges[dim] = _merged([r for piece in pieces for r in _chunk(piece, rank, size)])
    placed = []
    for size, of_dim in zip(shape, ranges, strict=True):
        lengths = [length for _, length in of_dim]
        firsts = itertools.accumulate(lengths, initial=0)
        placed.append([(*r, first) for r, first in zip(of_dim, firsts, strict=False)])
        placed[-1] = placed[-1] or [(size, 0, 0)]
    return [Box(*zip(*block, strict=True)) for block in itertools.product(*placed)]


def _chunk(ranges: list[tuple[int, int]], index: int, number: int) -> list[tuple[int, int]]:
    """(Offset, size) of each range of chunk ``index`` of ``number``."""
    length = -(-sum(size for _, size in ranges) // number)
    start, end = index * length, (index + 1) * length
    chunk = []
    for offset, size in ranges:
        first, last = max(start, 0), min(end, size)
        if first < last:
            chunk.append((offset + first, last - first))
        start, end = start - size, end - size
    return chunk


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent ranges."""
    merged = ranges[:1]
    for offset, size in ranges[1:]:
        first, length = merged[-1]
        if first + length == offset:
            merged[-1] = first, length + size
        else:
            merged.append((offset, size))
    return merged


def joined(pieces: Sequence[torch.Tensor], blocks: Sequence[Box]) -> torch.Tensor:
    """A rank's part, a copy, of its blocks."""
    ends = [[f + n for f, n in zip(box.first, box.sizes, strict=True)] for box in blocks]
    part = pieces[0].new_empty([max(dim) for dim in zip(*ends, strict=True)])
    for piece, box in zip(pieces, blocks, strict=True):
        box.view(part).copy_(piece)
    return part


def replace_tensors(
    dicts: Iterable[dict[str, torch.Tensor | None]],
    replacement: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Replace each tensor of modules' dictionaries, and keep ties."""
    by_id: dict[int, torch.Tensor] = {}
    for tensors in dicts:
        for name, tensor in tensors.items():
            if tensor is not None:
                if id(tensor) not in by_id:
                    by_id[id(tensor)] = replacement(tensor)
                tensors[name] = by_id[id(tensor)]


def from_whole(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence) -> torch.Tensor:
    """DTensor of this rank's part of a tensor that it has whole.  The part is a copy."""
    from torch.distributed.tensor import DTensor

    tensor, blocks = tensor.detach(), boxes(tensor.shape, mesh, placements)
    local = joined([tensor[box.slices()] for box in blocks], blocks)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    sizes = {"shape": tensor.shape, "stride": whole.stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **sizes)
