"""Grid of a mask, and the ranks of its dQ writers.

Everything else in this package works on a ``BlockGrid``; ``block_grid`` is the door that turns a
``BlockMask`` (or a plain array of blocks) into one.  Ranks are built where the mask's tensors are.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from cute_kernels.errors import ScheduleError, expected


@dataclass(frozen=True, eq=False)
class BlockGrid:
    """Blocks of a mask, for ``heads`` (batch, head) pairs with index b * H + h.

    blocks    uint8 tensor [G, M, N]: 0 empty, 1 partial, 2 full; G distinct masks
    mask_of   int32 array [heads]: which of the G masks a head uses
    """

    blocks: torch.Tensor
    mask_of: np.ndarray
    block_size: tuple[int, int] | None

    @property
    def heads(self) -> int:
        return len(self.mask_of)

    @property
    def num_q_blocks(self) -> int:
        return self.blocks.shape[1]

    @property
    def num_kv_blocks(self) -> int:
        return self.blocks.shape[2]

    @cached_property
    def host(self) -> np.ndarray:
        """Blocks on the host, [G, M, N]."""
        return self.blocks.cpu().numpy()


def integer(name: str, value: object, least: int = 1) -> int:
    """Check for an int of at least ``least``; a bool is refused."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ScheduleError(expected(name, f"an int >= {least}", repr(value)))
    return value


def block_grid(block_mask: object, heads: int | None) -> BlockGrid:
    """Make a grid of a ``BlockMask`` or of blocks uint8 [M, N], [G, M, N] or [B, H, M, N].

    ``heads`` counts (batch, head) pairs; None means those of the mask.  A mask of one batch is
    used by every batch, a mask of one head by every head.
    """
    size = getattr(block_mask, "block_size", None)
    is_mask = hasattr(block_mask, "dense_blocks")
    blocks = block_mask.dense_blocks() if is_mask else block_mask
    if isinstance(blocks, np.ndarray) and blocks.dtype == np.uint8:
        blocks = torch.from_numpy(np.array(blocks))
    if not isinstance(blocks, torch.Tensor) or blocks.dtype != torch.uint8:
        dtype = getattr(blocks, "dtype", type(blocks).__name__)
        raise ScheduleError(expected("block_mask", "a BlockMask or uint8 blocks", dtype))
    if blocks.dim() not in (2, 3, 4):
        raise ScheduleError(
            expected("block_mask", "blocks [M, N], [G, M, N] or [B, H, M, N]", list(blocks.shape))
        )
    shape = (1,) * (4 - blocks.dim()) + tuple(blocks.shape)
    blocks = blocks.reshape(shape)
    if not is_mask and blocks.numel() and int(blocks.max()) > 2:
        raise ScheduleError(expected("block_mask", "blocks of 0, 1 or 2", int(blocks.max())))
    group = _groups(shape[0], shape[1], heads)
    return BlockGrid(blocks.flatten(0, 1), group, size)


def mask_key(block_mask: object) -> str:
    """Hash the blocks, their size and their shape: equal for equal scheduling problems."""
    if hasattr(block_mask, "block_hash"):
        return block_mask.block_hash()
    blocks = block_grid(block_mask, None).blocks
    size = getattr(block_mask, "block_size", None)
    digest = hashlib.sha256(repr((tuple(block_mask.shape), size)).encode())
    digest.update(blocks.cpu().numpy().tobytes())
    return digest.hexdigest()


def _groups(batch: int, mask_heads: int, heads: int | None) -> np.ndarray:
    """Return the mask of each (batch, head) pair, int32 [heads]."""
    masks = batch * mask_heads
    heads = integer("heads", masks if heads is None else heads)
    if masks == 0 or heads % masks:
        want = f"a multiple of the mask's {batch} x {mask_heads} (batch, head) pairs"
        raise ScheduleError(expected("heads", want, heads))
    if batch > 1 and mask_heads > 1 and heads != masks:
        want = f"{masks}, one for each of the mask's {batch} x {mask_heads} pairs"
        raise ScheduleError(expected("heads", want, heads))
    index = np.arange(heads, dtype=np.int32)
    return index // (heads // batch) if mask_heads == 1 else index % masks


def ranks(blocks: torch.Tensor, write_order: torch.Tensor) -> torch.Tensor:
    """Return each block's rank among the writers of its row, int32 [S, M, N]; -1 where empty.

    blocks: [S, M, N], non-zero where there is work.  write_order: integers [S or 1, N], or
    [S or 1, M, N] for an order of each row's own; columns from first to last writer.  Runs on the
    device of ``blocks``.
    """
    order = write_order.to(blocks.device, torch.int64)
    index = (order[:, None] if order.dim() == 2 else order).expand(blocks.shape)
    present = torch.gather(blocks != 0, 2, index)
    position = torch.cumsum(present, dim=2, dtype=torch.int32).mul_(present).sub_(1)
    return torch.empty_like(position).scatter_(2, index, position)


def column_order(name: str, columns_given: object, columns: int, heads: int) -> np.ndarray:
    """Convert a list, array or tensor to int64 [1 or heads, N]: each row a permutation."""
    if isinstance(columns_given, torch.Tensor):
        columns_given = columns_given.cpu().numpy()
    try:
        order = np.asarray(columns_given)
    except ValueError:
        raise ScheduleError(expected(name, f"{columns} columns", "a ragged list")) from None
    if order.dtype.kind not in "iu" and order.size:
        raise ScheduleError(expected(name, "integers", order.dtype))
    if order.ndim not in (1, 2) or order.shape[-1] != columns:
        want = f"shape [{columns}] or [{heads}, {columns}]"
        raise ScheduleError(expected(name, want, list(order.shape)))
    order = order.reshape(-1, columns) if columns else np.zeros((1, 0))
    if len(order) not in (1, heads):
        raise ScheduleError(expected(name, f"1 or {heads} heads", f"{len(order)} rows"))
    order = order.astype(np.int64)
    wrong = np.flatnonzero((np.sort(order, axis=1) != np.arange(columns)).any(axis=1))
    if len(wrong):
        row = order[wrong[0]]
        values, times = np.unique(row, return_counts=True)
        outside = row[(row < 0) | (row >= columns)]
        fault = f"{outside[0]}" if len(outside) else f"column {values[times > 1][0]} twice"
        want = f"a permutation of 0..{columns - 1}"
        raise ScheduleError(expected(f"{name} (head {wrong[0]})", want, fault))
    return order
