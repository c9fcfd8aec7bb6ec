"""The ranks that FlashAttention-4 takes beside its lists, from an order of writers."""

from __future__ import annotations

import torch

from cute_kernels.schedulers.order.ranks import column_order, ranks


def write_ranks(block_mask, write_order: object) -> torch.Tensor:
    """int32 shaped as ``block_mask.q_index``: the rank of each listed block, 0 beyond the count.

    write_order: columns [N] from first to last writer.  On the mask's device; it is what
    ``to_fa4(..., write_order=)`` takes.
    """
    blocks = block_mask.dense_blocks()
    if blocks.numel() == 0:
        return torch.zeros_like(block_mask.q_index)
    order = torch.from_numpy(column_order("write_order", write_order, blocks.shape[3], 1))
    rank_table = ranks(blocks.flatten(0, 1), order).view(blocks.shape)
    listed = torch.gather(rank_table.transpose(2, 3), 3, block_mask.q_index.long())
    position = torch.arange(listed.shape[3], dtype=torch.int64, device=listed.device)
    return listed.masked_fill(position >= block_mask.q_count[..., None], 0)
