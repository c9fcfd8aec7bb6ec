"""Masks by query head under GQA: the cases, for a CPU and for a card."""

from __future__ import annotations

import torch

from cute_kernels.schedulers import BlockMask

S, HEADS, KV_HEADS = 200, 4, 2
NAMES = ("out", "lse", "dq", "dk", "dv")


def dense(batch: int, seed: int = 3) -> torch.Tensor:
    """Other blocks for each head, some of them empty, rows without keys, a causal rule in two."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.rand(batch, HEADS, S, S, generator=generator) < 0.3
    out[:, 0, :, 128:] = False
    out[:, 1] = torch.ones(S, S).tril() > 0
    out[:, 2, 30:40] = out[:, 2, 128:] = False
    out[:, 3] &= torch.ones(S, S).tril() > 0
    return out


def windows() -> BlockMask:
    """A band, in blocks that each head chose for itself."""
    count = torch.tensor([[[1, 2], [1, 1], [1, 2], [1, 1]]], dtype=torch.int32)
    index = torch.tensor([[[[0, 0], [0, 1]], [[0, 0], [1, 0]]] * 2], dtype=torch.int32)
    blocks = BlockMask.from_blocks(count, index, S, S)
    return blocks & BlockMask.sliding_window(S, S, left=90, right=0)


MASKS = {
    "bits of one batch": lambda: BlockMask.from_dense(dense(1)),
    "bits of each batch": lambda: BlockMask.from_dense(dense(2)),
    "windows": windows,
}
