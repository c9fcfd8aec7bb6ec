"""Whole tensors and checkpoints of DTensors whose ranks have parts of pieces (shards.py).

Such a part is several blocks of the whole tensor.  torch reads its placement as another layout:

=============================================  ====================================================
``DTensor.__create_write_items__`` and others  one block: ``torch.distributed.checkpoint`` refuses
                                               to save it, and loads wrong values into it
``_state_dict_utils._distribute_tensors``      one block: ``set_model_state_dict`` of a full state
                                               dict loads wrong values
``DTensorSpec._normalize_placements_...``      an order of mesh dimensions: torch 2.11 refuses
                                               ``full_tensor`` and ``redistribute``
=============================================  ====================================================

`install` replaces those functions, in this process, by ones that are right for such a placement
and call torch's for every other.  They reach what torch makes of a parameter: gradients, states of
optimizers, the parameters of ``fully_shard``.
"""

from __future__ import annotations

import functools

import torch

from ...runtime.optional import wrap
from . import checks, shards


@functools.cache
def install() -> list[str]:
    """Replace torch's functions, once a process; if it lacks some, return their names instead."""
    from torch.distributed import _state_dict_utils as state_dicts
    from torch.distributed.tensor import DTensor, _dtensor_spec

    functions = [
        (DTensor, "__create_write_items__", _write_items),
        (DTensor, "__create_chunk_list__", _chunks),
        (DTensor, "__get_tensor_shard__", _shard),
        (state_dicts, "_distribute_tensors", _distribute),
    ]
    if not hasattr(_dtensor_spec, "_StridedShardNotDecodableError"):
        # Later releases raise it, and then gather one mesh dimension after the other.
        spec = _dtensor_spec.DTensorSpec
        functions.append((spec, "_normalize_placements_into_shard_order", _shard_order))
    missing = [f"{cls.__name__}.{name}" for cls, name, _ in functions if not hasattr(cls, name)]
    if not missing:
        for cls, name, function in functions:
            wrap(cls, name, function)
    return missing


def _boxes(tensor: torch.Tensor, name: str = "DTensor") -> list[shards.Box]:
    """Blocks of a DTensor of parts of pieces; of another, none.

    Raises:
        PatchError: ``fully_shard`` has cut the pieces.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.get_coordinate() is None or any(p.is_partial() for p in placements):
        return []  # torch refuses the latter
    # A dimension of one rank cuts nothing.
    cuts = [p for i, p in enumerate(placements) if mesh.size(i) > 1]
    if all(getattr(placement, "split_factor", 1) == 1 for placement in cuts):
        return []
    boxes = shards.boxes(tensor.shape, mesh, placements)
    if shards.packed_axis(cuts) is None:
        if len(boxes) > 1:  # else torch reads it right
            checks.packed_alone(name, cuts)
        return []
    return boxes


def _chunk(box: shards.Box):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


# ---- torch.distributed.checkpoint ---------------------------------------------------------------


def _write_items(original, self, fqn, object):
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    boxes = _boxes(self, fqn)
    if not boxes:
        return original(self, fqn, object)
    properties = TensorProperties.create_from_tensor(self.to_local())
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(_chunk(box), properties, self.size()),
        )
        for box in boxes
    ]


def _chunks(original, self):
    return [_chunk(box) for box in _boxes(self)] or original(self)


def _shard(original, self, index):
    boxes = _boxes(self)
    if not boxes:
        return original(self, index)
    by_offset = {box.offsets: box for box in boxes}
    return by_offset[tuple(index.offset)].view(self.to_local())


# ---- torch.distributed.checkpoint.state_dict ----------------------------------------------------


def _distribute(original, local_state_dict, keys, *args, **kwargs):
    others = []
    for key in keys:
        pair = local_state_dict.get(key)  # (DTensor to fill, whole tensor)
        if not isinstance(pair, tuple) or not _boxes(pair[0], key):
            others.append(key)
            continue
        target, whole = pair
        checks.whole_shape(key, target, whole.shape)
        part = shards.from_whole(whole, target.device_mesh, target.placements)
        if not target.is_meta:
            target.to_local().copy_(part.to_local())
        local_state_dict[key] = part if target.is_meta else target
    return original(local_state_dict, others, *args, **kwargs)


# ---- redistribute and full_tensor ---------------------------------------------------------------


def _shard_order(original, placements, mesh, use_strided_shard_as_shard_order=True):
    decodes = use_strided_shard_as_shard_order and shards.packed_axis(placements) is None
    return original(placements, mesh, decodes)
