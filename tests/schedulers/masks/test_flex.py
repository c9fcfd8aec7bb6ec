"""``from_flex`` on the masks of PyTorch's FlexAttention tutorials equals ``from_dense``."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import (
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)

from cute_kernels.errors import MaskError
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks import flex as module
from tests.schedulers.masks import oracle

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


@pytest.mark.parametrize(
    "lengths",
    [(500, 129), *(pytest.param(n, marks=pytest.mark.nightly) for n in ((500, 500), (384, 500)))],
)
@pytest.mark.parametrize("name", MASKS)
def test_tutorial_masks(name, lengths):
    captured_as_it_is(name, lengths)


#: What is replaced in flex.py, by what.
MUTANTS = {
    "full blocks forgotten": (
        "capture",
        lambda grid, heads, row, col, full, elements, original=module.capture: original(
            grid, heads, row[~full], col[~full], full[~full], elements
        ),
    ),
    "nothing evaluated": (
        "_evaluate",
        lambda mod, grid, b, h, m, n: torch.ones(m.numel(), *grid.tile, dtype=torch.bool),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(monkeypatch, name):
    monkeypatch.setattr(module, *MUTANTS[name])
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError)):
        captured_as_it_is("document causal", (384, 500))


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
    size = (1 << 30, 1 << 30)
    flex = create_block_mask(noop_mask, 1, 1, 5, 9, device="cpu", BLOCK_SIZE=128)
    flex.BLOCK_SIZE = size
    mask = BlockMask.from_flex(flex)
    assert mask.num_full == 1 and mask.to_dense().shape == (1, 1, 5, 9)
    for ids in (torch.arange(9).flip(0), torch.tensor([3, 1, 3, 1, 3, 3, 1, 1, 3])):
        same = ids[:, None] == ids
        for mask in (
            BlockMask.from_dense(same, block_size=size),
            BlockMask.document(ids, block_size=size),
        ):
            oracle.check_exact(mask, same[None, None].numpy(), size)
    with pytest.raises(MaskError):  # a sliced one cannot be read
        BlockMask.from_flex(create_block_mask(causal, 1, 1, 512, 512, device="cpu")[:, :, :2])
