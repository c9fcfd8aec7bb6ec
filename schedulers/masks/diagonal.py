"""Masks that share no block, one after another on the diagonal of a larger one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from . import bits as mask_bits
from .algebra import all_of
from .mask import BlockMask
from .rules import Grid, Rule


class Lists(NamedTuple):
    """Lists (count, index, full) of a mask of one head, by query block and by key block."""

    kv: tuple[np.ndarray, ...]
    q: tuple[np.ndarray, ...]


def lists_of(mask: BlockMask) -> Lists:
    """Lists of a mask of one head on the CPU."""
    return Lists(*(tuple(t[0, 0].numpy() for t in mask.lists(side)) for side in ("kv", "q")))


def diagonal(
    parts: Sequence[tuple[int, Lists]], length: int, block_size: tuple[int, int], rule: Rule
) -> BlockMask:
    """Build the mask [length, length] of one head with exactly the blocks of ``parts``.

    parts: (first block, lists): their query and key blocks are those from the first on; ascending,
        without overlap.
    rule: what holds in partial blocks, by positions in the whole.

    Only lists are read, so that a varlen batch of known parts costs little.
    """
    grid = Grid(length, length, block_size)
    by_query, by_key = (
        _joined([(begin, lists[side]) for begin, lists in parts], blocks)
        for side, blocks in enumerate((grid.num_q_blocks, grid.num_kv_blocks))
    )
    count, index, _ = by_query
    row, position = np.nonzero(np.arange(index.shape[1]) < count[:, None])
    listed = (torch.from_numpy(each) for each in (row, index[row, position].astype(np.int64)))
    full_rule = all_of(mask_bits.pattern(grid, (1, 1), *listed), rule)
    tensors = (torch.from_numpy(each)[None, None] for each in (*by_query, *by_key))
    return BlockMask(length, length, block_size, *tensors, full_rule)


def _joined(parts: list[tuple[int, tuple[np.ndarray, ...]]], blocks: int) -> tuple:
    """Join the lists (count, index, full) of one side."""
    longest = max(index.shape[1] for _, (_, index, _) in parts)
    first, count = np.zeros((2, blocks), np.int32)
    index, full = np.zeros((blocks, longest), np.int32), np.zeros((blocks, longest), bool)
    for begin, (counts, indices, fulls) in parts:
        rows, width = slice(begin, begin + len(counts)), indices.shape[1]
        first[rows], count[rows] = begin, counts
        index[rows, :width], full[rows, :width] = indices, fulls
    listed = np.arange(longest) < count[:, None]
    return count, np.where(listed, index + first[:, None], 0).astype(np.int32), full
