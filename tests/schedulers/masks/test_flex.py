"""``from_flex`` on the masks of PyTorch's FlexAttention tutorials equals ``from_dense``."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask as FlexBlockMask,
)
from torch.nn.attention.flex_attention import (
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)

from cute_kernels.errors import MaskError
from cute_kernels.schedulers import BlockMask
from tests.schedulers.masks import oracle as oracle
from tests.schedulers.masks.flex_checks import (
    DOCUMENT,
    MASKS,
    PREFIX,
    S,
    captured_as_it_is,
    causal,
    dilated,
    document,
    nothing,
    prefix,
    sliding_window,
)


@pytest.mark.parametrize(
    "lengths",
    [(500, 129), *(pytest.param(n, marks=pytest.mark.nightly) for n in ((500, 500), (384, 500)))],
)
@pytest.mark.parametrize("name", MASKS)
def test_tutorial_masks(name, lengths):
    captured_as_it_is(name, lengths)


def test_captured_tensors_as_long_as_the_sequences():
    """Indexed in every way: no position past a length reaches them."""
    q_len, kv_len = 50, 75
    generator = torch.Generator().manual_seed(8)
    of_q = torch.randint(0, 4, (2, q_len), generator=generator)
    of_kv = torch.randint(0, 4, (2, kv_len), generator=generator)
    table = torch.rand(2, 3, q_len, kv_len, generator=generator) < 0.4
    mods = {
        "by query and by key": lambda b, h, q, kv: of_q[b, q] == of_kv[b, kv],
        "one tensor after another": lambda b, h, q, kv: of_q[b][q] >= of_kv[1][kv],
        "four indices": lambda b, h, q, kv: table[b, h, q, kv],
        "a number first": lambda b, h, q, kv: table[1][h, q][kv],
        "a slice first": lambda b, h, q, kv: table[..., kv][b, h][q],
    }
    for name, mod in mods.items():
        dense = create_mask(mod, 2, 3, q_len, kv_len, device="cpu").expand(2, 3, q_len, kv_len)
        flex = create_block_mask(mod, 2, 3, q_len, kv_len, device="cpu", BLOCK_SIZE=(16, 32))
        mask = BlockMask.from_flex(flex)
        assert 0 < int(dense.sum()) < dense.numel() and torch.equal(mask.to_dense(), dense), name


def test_named_constructors_have_the_blocks_of_flex():
    pairs = [
        (causal, BlockMask.causal(S, S)),
        (
            and_masks(causal, sliding_window),
            BlockMask.sliding_window(S, S, left=100, right=0),
        ),
        (dilated, BlockMask.dilated_window(S, S, left=200, right=200, dilation=4)),
        (document, BlockMask.document(DOCUMENT[:, :S])),
        (
            and_masks(causal, document),
            BlockMask.document(DOCUMENT[:, :S]) & BlockMask.causal(S, S),
        ),
        (or_masks(causal, prefix), BlockMask.prefix_lm(S, S, prefix=PREFIX + 1)),
    ]
    for mod, mask in pairs:
        flex = create_block_mask(mod, mask.shape[0], 1, S, S, device="cpu")
        assert BlockMask.from_flex(flex).block_hash() == mask.block_hash()


def test_mask_mod_is_called_in_partial_blocks_only():
    """Full blocks are taken at their word, as FlexAttention takes them."""
    recorded = []

    def watched(b, h, q_idx, kv_idx):
        recorded.append(1)
        return q_idx >= kv_idx

    flex = create_block_mask(causal, 1, 1, 512, 512, device="cpu")
    blocks = int(flex.kv_num_blocks.sum())
    for mask_mod, full in ((noop_mask, 4 + 6), (nothing, 6)):
        flex.mask_mod = mask_mod
        assert BlockMask.from_flex(flex).num_full == full
    assert blocks == 4
    flex.mask_mod = watched
    assert (
        BlockMask.from_flex(flex).hash()
        == BlockMask.from_dense(torch.ones(512, 512, dtype=torch.bool).tril()).hash()
    )
    # One call maps over all blocks.
    assert len(recorded) == 1


def test_chosen_blocks_without_a_mask_mod():
    count = torch.tensor([[[2, 0, 1]]], dtype=torch.int32)
    index = torch.tensor([[[[0, 2, 9], [0, 0, 0], [1, 5, 5]]]], dtype=torch.int32)
    flex = FlexBlockMask.from_kv_blocks(
        count, index, BLOCK_SIZE=64, seq_lengths=(150, 180), compute_q_blocks=False
    )
    mask = BlockMask.from_flex(flex)
    assert mask.kv_count.tolist() == [[[2, 0, 1]]] and mask.num_full == 3
    assert mask.hash() == BlockMask.from_dense(mask.to_dense(), block_size=64).hash()


def test_a_block_size_larger_than_the_sequence():
    flex = create_block_mask(noop_mask, 1, 1, 5, 9, device="cpu", BLOCK_SIZE=128)
    flex.BLOCK_SIZE = (1 << 30, 1 << 30)
    mask = BlockMask.from_flex(flex)
    assert mask.num_full == 1 and mask.to_dense().shape == (1, 1, 5, 9)
    for ids in (torch.arange(9).flip(0), torch.tensor([3, 1, 3, 1, 3, 3, 1, 1, 3])):
        same = ids[:, None] == ids
        for mask in (
            BlockMask.from_dense(same, block_size=1 << 30),
            BlockMask.document(ids, block_size=1 << 30),
        ):
            oracle.check_exact(mask, same[None, None].numpy(), (1 << 30, 1 << 30))


def test_a_sliced_flex_mask_says_why_it_cannot_be_read():
    flex = create_block_mask(causal, 1, 1, 512, 512, device="cpu")[:, :, :2]
    with pytest.raises(MaskError):
        BlockMask.from_flex(flex)
