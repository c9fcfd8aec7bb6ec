"""Blocks of a rank's part: of any placements, even or not, those of torch's own splits."""

from __future__ import annotations

import itertools
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from cute_kernels.model.parallel import shards
from tests.contract import same_bytes

SHAPES = ((3, 8, 5), (2, 10, 4), (5, 7, 3), (1, 4, 4))
PLACEMENTS = (
    [Replicate(), Partial(), *map(Shard, range(3))]
    + [shards.packed(1, pieces) for pieces in (2, 3, 4)]
    + [shards.packed(0, 2)]
)


class Mesh(NamedTuple):
    """What `shards` reads of a mesh, without ranks."""

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    def size(self, axis: int) -> int:
        return self.sizes[axis]

    def get_local_rank(self, axis: int) -> int:
        return self.coordinate[axis]


def split_by_torch(tensor: torch.Tensor, mesh: Mesh, placements: tuple) -> torch.Tensor:
    for axis, placement in enumerate(placements):
        if hasattr(placement, "dim"):
            pieces, _ = placement._split_tensor(tensor, mesh.size(axis), with_padding=False)
            tensor = pieces[mesh.get_local_rank(axis)]
    return tensor


def differing() -> list[str]:
    """Layouts of which a rank's part, or a block of it, is another than torch's."""
    wrong = []
    for shape, sizes in itertools.product(SHAPES, ((2, 2), (4, 1))):
        whole = torch.randn(shape)
        for placements in itertools.product(PLACEMENTS, repeat=2):
            for coordinate in itertools.product(*map(range, sizes)):
                mesh = Mesh(sizes, coordinate)
                want = split_by_torch(whole, mesh, placements)
                boxes = shards.boxes(shape, mesh, placements)
                blocks = [whole[box.slices()] for box in boxes]
                part = shards.joined(blocks, boxes)
                views = [box.view(part) for box in boxes]
                if not same_bytes(part, want) or not all(map(same_bytes, views, blocks)):
                    wrong.append(f"{shape} {sizes} {placements} {coordinate}")
    return wrong


def test_parts_are_those_of_torch():
    assert differing() == []


def rounded_down(ranges: list, index: int, number: int) -> list:
    """Chunks as of an even size."""
    length = sum(size for _, size in ranges) // number
    return [(ranges[0][0] + index * length, length)] if length else []


def without_order(shape: tuple, mesh: Mesh, placements: tuple) -> list[shards.Box]:
    """Later dimensions of the mesh first."""
    sizes, coordinate = mesh
    return TRUE_BOXES(shape, Mesh(sizes[::-1], coordinate[::-1]), placements[::-1])


TRUE_BOXES = shards.boxes


@pytest.mark.parametrize("mutant", [{"_chunk": rounded_down}, {"boxes": without_order}])
def test_mutants_are_killed(mutant):
    with mock.patch.multiple(shards, **mutant):
        assert differing()
