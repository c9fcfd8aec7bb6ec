"""The masks of the published schedules at any length."""

from __future__ import annotations

import numpy as np
import torch

from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.masks.rules import indices

SEED = 0


def full(rows: int, columns: int) -> np.ndarray:
    """Blocks of a mask that allows everything."""
    return np.full((rows, columns), 2, np.uint8)


def usual_masks(seqlen: int, block_size: tuple[int, int] = (64, 128)) -> dict[str, BlockMask]:
    """Return masks by name at a length; windows and prefixes are cut to it."""
    size = {"block_size": block_size, "device": "cpu"}
    masks = {
        "full": BlockMask.full(seqlen, seqlen, **size),
        "causal": BlockMask.causal(seqlen, seqlen, **size),
        "window 1024": BlockMask.sliding_window(seqlen, seqlen, left=1023, right=0, **size),
    }
    for split in range(3):
        ids = _documents(seqlen, split)
        masks[f"8 documents, split {split}"] = BlockMask.document(ids, block_size=block_size)
    prefix = min(2048, seqlen // 2)
    masks["prefix-LM 2048"] = BlockMask.prefix_lm(seqlen, seqlen, prefix=prefix, **size)
    masks["random 25%"] = _random(seqlen, block_size)
    return masks


def _documents(seqlen: int, split: int) -> torch.Tensor:
    """Return ids of int64 [seqlen]: 8 documents with 7 drawn cuts."""
    random = torch.Generator(device="cpu").manual_seed(SEED + split)
    cuts = torch.randperm(seqlen - 1, generator=random, dtype=torch.int64, device="cpu")[:7] + 1
    return torch.searchsorted(cuts.sort().values, indices(seqlen, cuts.device), right=True)


def _random(seqlen: int, block_size: tuple[int, int]) -> BlockMask:
    """Mask with a quarter of all blocks, drawn one by one."""
    random = torch.Generator(device="cpu").manual_seed(SEED)
    rows, columns = -(-seqlen // block_size[0]), -(-seqlen // block_size[1])
    drawn = torch.rand(rows, columns, generator=random, dtype=torch.float32, device="cpu")
    is_present = drawn < 0.25
    count = is_present.sum(1).int()
    index = torch.argsort((~is_present).int(), dim=1, stable=True).int()
    index[indices(columns, index.device) >= count[:, None]] = 0
    return BlockMask.from_blocks(
        count[None, None], index[None, None], seqlen, seqlen, block_size=block_size
    )
