"""Masks of flex_attention's tutorial, and the check of what is captured of them."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import (
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)

from cute_kernels.schedulers import BlockMask
from tests.schedulers.masks import oracle as oracle

S = 500

_SEEDED = torch.Generator().manual_seed(4)

DOCUMENT = torch.sort(torch.randint(0, 6, (3, 2 * S), generator=_SEEDED), dim=1).values

PREFIX = torch.tensor([0, 130, 333])

RANDOM = torch.rand(2 * S, 2 * S, generator=_SEEDED) < 0.003

SLOPE = torch.tensor([40, 170])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= 100


def document(b, h, q_idx, kv_idx):
    return DOCUMENT[b, q_idx] == DOCUMENT[b, kv_idx]


def prefix(b, h, q_idx, kv_idx):
    return kv_idx <= PREFIX[b]


def dilated(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) % 4 == 0) & ((q_idx - kv_idx).abs() <= 200)


def natten(b, h, q_idx, kv_idx):
    """Neighbourhood attention on a canvas 25 wide, kernel 7 x 7."""
    q_x, q_y = q_idx // 25, q_idx % 25
    kv_x, kv_y = kv_idx // 25, kv_idx % 25
    centre_x, centre_y = q_x.clamp(3, 16), q_y.clamp(3, 21)
    return ((centre_x - kv_x).abs() <= 3) & ((centre_y - kv_y).abs() <= 3)


def random(b, h, q_idx, kv_idx):
    return RANDOM[q_idx, kv_idx]


def per_head(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= SLOPE[h]


def nothing(b, h, q_idx, kv_idx):
    return q_idx < -kv_idx


MASKS = {
    "causal": causal,
    "sliding window causal": and_masks(causal, sliding_window),
    "document": document,
    "document causal": and_masks(causal, document),
    "prefix lm": or_masks(causal, prefix),
    "dilated": dilated,
    "natten": natten,
    "random": random,
    "per head": and_masks(causal, per_head),
    "everything": noop_mask,
    "nothing": nothing,
}


def captured_as_it_is(name, lengths):
    mod = MASKS[name]
    batch = 3 if mod in (document, prefix) or "document" in name or "prefix" in name else 1
    heads = 2 if name == "per head" else 1
    dense = create_mask(mod, batch, heads, *lengths, device="cpu").expand(batch, heads, *lengths)
    for block_size in oracle.BLOCK_SIZES:
        for separate in (True, False):
            flex = create_block_mask(
                mod,
                batch,
                heads,
                *lengths,
                device="cpu",
                BLOCK_SIZE=block_size,
                separate_full_blocks=separate,
            )
            mask = BlockMask.from_flex(flex)
            oracle.check_exact(mask, dense.numpy(), block_size)
            want = BlockMask.from_dense(dense, block_size=block_size)
            assert mask.hash() == want.hash()
    assert bool(dense.any()) == (name != "nothing")
