"""``masks.lower``: the tensors that kernels read say what the mask says, element by element."""

from __future__ import annotations

import random

import pytest
import torch

from cute_kernels.schedulers import BlockMask, kinds
from cute_kernels.schedulers.mask_bits import unpack
from cute_kernels.schedulers.mask_rules import Band
from cute_kernels.sparse_attn import masks
from tests.sparse_attn import cases

SIZES = ((300, 300), (129, 383), (383, 129), (1, 1), (2, 200), (128, 256), (65, 64))
KINDS = [kind for kind in cases.KINDS if kind != "none"]


def drawn(kind: str) -> list[BlockMask]:
    rng = random.Random(kind)
    sizes = [(q, kv) for q, kv in SIZES if q == kv or kind not in ("document", "scattered")]
    return [cases.make_mask(kind, rng, 2, 3, q, kv) for q, kv in sizes]


def block_of(low: masks.LoweredMask, m: int, n: int, entry: int, tile: int) -> torch.Tensor:
    """Bool [128, 128]: what a kernel allows in one block, ends included."""
    q, kv = torch.arange(m * 128, m * 128 + 128)[:, None], torch.arange(n * 128, n * 128 + 128)
    inside = (q < low.q_len) & (kv < low.kv_len)
    if entry & 1 == 0:
        return inside
    assert low.form != "none"
    if low.form == "band":
        return inside & (low.lo <= kv - q) & (kv - q <= low.hi)
    value = unpack(low.words[tile], 128)
    # Bits outside the lengths are 0: a kernel may leave out the bounds here.
    assert (value <= inside).all()
    return value


def elements(low: masks.LoweredMask, side: str) -> torch.Tensor:
    """Bool [B, H, q_len, kv_len] from the lists of one side."""
    count, entry, tile = (getattr(low, f"{side}_{name}") for name in ("count", "entry", "tile"))
    tile = tile.expand_as(entry)
    rows, cols = -(-low.q_len // 128), -(-low.kv_len // 128)
    dense = torch.zeros(*count.shape[:2], rows * 128, cols * 128, dtype=torch.bool)
    for b, h, row in torch.cartesian_prod(*(torch.arange(size) for size in count.shape)).tolist():
        seen = -1
        for place in range(int(count[b, h, row])):
            e, t = int(entry[b, h, row, place]), int(tile[b, h, row, place])
            assert e >> 1 > seen
            seen = e >> 1
            assert (t >= 0) == (low.form == "bits" and e & 1 == 1)
            m, n = (row, seen) if side == "kv" else (seen, row)
            block = block_of(low, m, n, e, t)
            dense[b, h, m * 128 : m * 128 + 128, n * 128 : n * 128 + 128] = block
    return dense[:, :, : low.q_len, : low.kv_len]


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_are_the_mask(kind):
    for mask in drawn(kind):
        low, want = masks.lower(mask), mask.to_dense()
        assert (low.q_len, low.kv_len) == (mask.q_len, mask.kv_len)
        assert low.mask.block_size == masks.BLOCK and low.words.shape[1:] == (128, 4)
        for side in ("kv", "q"):
            assert torch.equal(elements(low, side), want), (kind, side, mask)
        for tensor in low.tensors():
            assert tensor.dtype == torch.int32 and tensor.is_contiguous()


def test_forms():
    dense = torch.rand(300, 300, generator=torch.Generator().manual_seed(1)) < 0.5
    blocks = torch.ones(300, 300, dtype=torch.bool)
    blocks[:128, 128:] = False
    found = {
        "full": BlockMask.full(300, 300),
        "causal": BlockMask.causal(300, 200),
        "window": BlockMask.sliding_window(300, 300, left=10, right=5),
        "whole blocks": BlockMask.from_dense(blocks),
        "a band cut by blocks": BlockMask.from_dense(blocks) & BlockMask.causal(300, 300),
        "dense": BlockMask.from_dense(dense),
        "or": BlockMask.causal(300, 300) | BlockMask.prefix_lm(300, 300, prefix=9),
        "wide band": BlockMask.from_rule(Band(-(2**40), 2**40), 300, 300),
    }
    forms = {name: masks.lower(mask).form for name, mask in found.items()}
    assert forms == {
        "full": "none",
        "causal": "band",
        "window": "band",
        "whole blocks": "none",
        "a band cut by blocks": "band",
        "dense": "bits",
        "or": "bits",
        "wide band": "none",
    }
    low = masks.lower(found["causal"])
    assert (low.lo, low.hi) == (-masks.FAR, -100)
    low = masks.lower(found["window"])
    assert (low.lo, low.hi) == (-10, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_and_numbers_are_all_of_it(kind):
    low = masks.lower(drawn(kind)[0])
    again = masks.restored(low.tensors(), low.numbers())
    for name in low.__dataclass_fields__:
        if name != "mask":
            mine, theirs = getattr(low, name), getattr(again, name)
            assert mine is theirs or mine == theirs


@pytest.mark.parametrize("kind", ["dense", "by head", "by batch and head", "document", "or"])
@pytest.mark.parametrize("shared", [True, False])
def test_tiles_of_a_schedule(kind, shared):
    """Each entry of each head finds the words of its own block."""
    batch, heads = 2, 3
    for mask in drawn(kind):
        low = masks.lower(mask)
        if low.form != "bits":
            continue
        count = batch * (1 if shared and mask.shape[1] == 1 else heads)
        schedule = kinds.permutation(
            low.mask, order=list(range(low.mask.num_kv_blocks))[::-1], heads=count, walk="cyclic"
        )
        order, dense = masks.order_of(low, schedule), mask.to_dense()
        dense = dense.expand(batch, count // batch, -1, -1)
        lists, offset, entry, tile = (
            t.tolist() for t in (order.list_of_head, order.offset, order.entry, order.tile)
        )
        for head, n in order.order.tolist():
            which = lists[head] * schedule.num_kv_blocks + n
            for e in range(*offset[which : which + 2]):
                m = entry[e] >> 1
                rows, cols = slice(m * 128, m * 128 + 128), slice(n * 128, n * 128 + 128)
                want = dense[head // (count // batch), head % (count // batch), rows, cols]
                got = block_of(low, m, n, entry[e], tile[e])[: want.shape[0], : want.shape[1]]
                assert torch.equal(got, want)


def test_lowered_once_per_content():
    one, two = (BlockMask.sliding_window(400, 400, left=71, right=2) for _ in range(2))
    assert masks.lower(one) is masks.lower(one) is masks.lower(two)
    other = BlockMask.sliding_window(400, 400, left=72, right=2)
    assert masks.lower(other) is not masks.lower(one)


MUTANTS = {
    "tiles by column": lambda low: {"kv_tile": low.kv_tile.flip(3)},
    "flags swapped": lambda low: {"kv_entry": low.kv_entry ^ 1},
    "words of the next tile": lambda low: {"words": low.words.roll(1, 0)},
    "one key to the left": lambda low: {"words": low.words >> 1},
    "a block forgotten": lambda low: {"kv_count": (low.kv_count - 1).clamp(min=0)},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_tensors_are_seen(name):
    """Control of ``elements``: it reads each of the tensors."""
    mask = BlockMask.causal(300, 300) & BlockMask.from_dense(
        torch.rand(300, 300, generator=torch.Generator().manual_seed(2)) < 0.6
    )
    low = masks.lower(mask)
    assert low.form == "bits"
    values = {field: getattr(low, field) for field in low.__dataclass_fields__}
    wrong = masks.LoweredMask(**(values | MUTANTS[name](low)))
    assert not says(wrong, mask)
    assert says(low, mask)


def says(low: masks.LoweredMask, mask: BlockMask) -> bool:
    """Whether the lists are well formed and say what the mask says."""
    try:
        return torch.equal(elements(low, "kv"), mask.to_dense())
    except AssertionError:
        return False
