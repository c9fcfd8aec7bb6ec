"""Names, tensors and bytes of the ops that run in a dispatch mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def name_of(op: torch._ops.OpOverload) -> tuple[str, str]:
    """Return (namespace, name) of an op."""
    space, _, name = op._schema.name.partition("::")
    return space, name


def tensors(values: object) -> list[torch.Tensor]:
    """Return the tensors in arguments or results."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, Sequence) and not isinstance(values, str):
        return [t for value in values for t in tensors(value)]
    return []


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8 [n]."""
    return t.contiguous().flatten().view(torch.uint8)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one shape and the same bytes."""
    return one.shape == other.shape and bytes_of(one).equal(bytes_of(other))
