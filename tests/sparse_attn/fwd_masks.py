"""The masks that the SM90 forward is tested with, by name."""

from __future__ import annotations

import torch

from cute_kernels.schedulers import BlockMask


def dense(q_len, kv_len, batch=1, heads=1):
    """Random elements in random blocks: empty rows, empty lists, full and partial blocks."""
    generator = torch.Generator().manual_seed(q_len + kv_len)
    blocks = torch.randint(0, 3, (batch, heads, 5, 5), generator=generator)
    blocks[..., 0, :] = 0
    share = (blocks / 2).repeat_interleave(128, 2).repeat_interleave(128, 3)
    share = share[..., -q_len:, :kv_len]
    allowed = torch.rand(share.shape, generator=generator) < share
    allowed[..., q_len // 2, :] = False
    return BlockMask.from_dense(allowed)


def document(q_len, kv_len):
    length = max(q_len, kv_len)
    ids = torch.arange(length) * 7 // 300
    whole = ids[None, :] == ids[:, None]
    return BlockMask.from_dense(whole[:q_len, :kv_len])


MASKS = {
    "full": BlockMask.full,
    "causal": BlockMask.causal,
    "window": lambda q, k: BlockMask.sliding_window(q, k, left=100, right=20),
    "document": document,
    "prefix": lambda q, k: BlockMask.prefix_lm(q, k, prefix=k // 3),
    "random": dense,
}
