"""Dense views of a block mask, for tests and pictures; sizes above the limits are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cute_kernels.errors import MaskError, expected

from .build import ragged
from .rules import CHUNK, EMPTY, FULL, PARTIAL, indices

if TYPE_CHECKING:
    from .mask import BlockMask

# Limits in elements of one byte.
MAX_BLOCKS = 1 << 26
MAX_ELEMENTS = 1 << 28


def dense_blocks(mask: BlockMask) -> Tensor:
    """Return uint8 [B, H, Mb, Nb]: 0 empty, 1 partial, 2 full."""
    shape = (*mask.kv_count.shape, mask.num_kv_blocks)
    _refuse_above(MAX_BLOCKS, shape, "blocks")
    row, col, full = ragged(mask.kv_count, mask.kv_index, mask.kv_full)
    dense = torch.full(shape, EMPTY, dtype=torch.uint8, device=mask.device)
    dense.view(-1)[row * mask.num_kv_blocks + col] = torch.where(full, FULL, PARTIAL).byte()
    return dense


def dense_elements(mask: BlockMask) -> Tensor:
    """Return bool [B, H, q_len, kv_len] from the lists, and from the rule inside partial blocks."""
    shape = (*mask.shape, mask.q_len, mask.kv_len)
    _refuse_above(MAX_ELEMENTS, shape, "elements")
    places = [indices(size, mask.device) for size in shape]
    kind = dense_blocks(mask)[:, :, places[2] // mask.block_size[0]]
    kind = kind[..., places[3] // mask.block_size[1]]
    b, h, q_idx, kv_idx = (
        index.view([-1 if i == d else 1 for i in range(4)]) for d, index in enumerate(places)
    )
    rule = mask.partial_rule
    value = torch.zeros(shape, dtype=torch.bool, device=mask.device)
    rows = max(1, CHUNK // max(1, mask.shape[0] * mask.shape[1] * mask.kv_len))
    for start in range(0, mask.q_len, rows):
        part = slice(start, start + rows)
        value[:, :, part] = rule.evaluate(b, h, q_idx[:, :, part], kv_idx)
    return (kind == FULL) | ((kind == PARTIAL) & value)


def _refuse_above(most: int, shape: tuple[int, ...], unit: str) -> None:
    size = torch.Size(shape).numel()
    if size > most:
        raise MaskError(expected("mask", f"at most {most} {unit} to make dense", size))
