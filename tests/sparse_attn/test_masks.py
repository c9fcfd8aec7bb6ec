"""``masks.lower``: the tensors that kernels read say what the mask says, element by element."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.bits import unpack
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.schedulers.order import kinds
from cute_kernels.sparse_attn import masks
from tests.anchors import planted
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
        for position in range(int(count[b, h, row])):
            e, t = int(entry[b, h, row, position]), int(tile[b, h, row, position])
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


def half_of_blocks() -> BlockMask:
    blocks = torch.ones(300, 300, dtype=torch.bool)
    blocks[:128, 128:] = False
    return BlockMask.from_dense(blocks)


def of_bits() -> BlockMask:
    return BlockMask.from_dense(torch.rand(300, 300, generator=torch.Generator()) < 0.5)


CAUSAL = BlockMask.causal(300, 300)
FORMS = {
    "full": (BlockMask.full(300, 300), "none", None),
    "causal": (BlockMask.causal(300, 200), "band", (-masks.FAR, -100)),
    "window": (BlockMask.sliding_window(300, 300, left=10, right=5), "band", (-10, 5)),
    "whole blocks": (half_of_blocks(), "none", None),
    "a band cut by blocks": (half_of_blocks() & CAUSAL, "band", None),
    "dense": (of_bits(), "bits", None),
    "or": (CAUSAL | BlockMask.prefix_lm(300, 300, prefix=9), "bits", None),
    "wide band": (BlockMask.from_rule(Band(1 - 2**31, 2**31 - 1), 300, 300), "none", None),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    mask, form, bounds = FORMS[name]
    low = masks.lower(mask)
    assert low.form == form and bounds in (None, (low.lo, low.hi))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_and_numbers_are_all_of_it(kind):
    low = masks.lower(drawn(kind)[0])
    again = masks.restored(low.tensors(), low.numbers())
    for name in low.__dataclass_fields__:
        if name not in ("mask", "block_tile"):
            mine, theirs = getattr(low, name), getattr(again, name)
            assert mine is theirs or mine == theirs


BITS = ("dense", "by head", "by batch and head", "document", "or")


def scheduled(low: masks.LoweredMask, batch: int, heads: int, lists: str) -> kinds.Schedule:
    """A schedule for batch x heads with lists per mask, or per head: an order of columns each."""
    columns, count = low.mask.num_kv_blocks, batch * heads
    rows = count if lists == "per head" else 1
    order = np.random.default_rng(count).permuted(np.tile(np.arange(columns), (rows, 1)), axis=1)
    return kinds.permutation(low.mask, order=order, heads=count, walk="cyclic")


def assert_tiles(low: masks.LoweredMask, schedule, order: masks.Order, allowed) -> None:
    """Each entry of each head finds the words of its own block; ``allowed`` [B, heads, Sq, Sk]."""
    heads = allowed.shape[1]
    entry, tile = order.entry.tolist(), order.tile.tolist()
    assert len(tile) == len(entry) == len(schedule.q_block)
    for head, n, begin, end in order.ticket.tolist():
        for e in range(begin, end):
            m = entry[e] >> 1
            assert (tile[e] >= 0) == (entry[e] & 1 == 1)
            rows, cols = slice(m * 128, m * 128 + 128), slice(n * 128, n * 128 + 128)
            want = allowed[head // heads, head % heads, rows, cols]
            got = block_of(low, m, n, entry[e], tile[e])[: want.shape[0], : want.shape[1]]
            assert torch.equal(got, want)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("lists", ["per mask", "per head"])
def test_tiles_of_a_schedule(kind, shared, lists):
    batch, sets = 2, set()
    for mask in drawn(kind):
        low = masks.lower(mask)
        if low.form != "bits":
            continue
        heads = 1 if shared and mask.shape[1] == 1 else 3
        schedule = scheduled(low, batch, heads, lists)
        sets.add(schedule.num_lists - math.prod(low.mask.shape))
        allowed = mask.to_dense().expand(batch, heads, -1, -1)
        assert_tiles(low, schedule, masks.order_of(low, schedule), allowed)
    # Lists are the masks of the table, one by one, or more than those.
    assert sets == {0} if lists == "per mask" else max(sets) >= 0


def test_an_order_waits_for_nothing():
    """On the meta device nothing can be read back: the one way is up, in one copy."""
    for kind, lists, most in (("causal", "per mask", 1), *((k, "per mask", 1) for k in BITS[:3])):
        check_that_nothing_is_read(drawn(kind)[0], lists, most)
    check_that_nothing_is_read(drawn("dense")[0], "per head", 1)


def check_that_nothing_is_read(mask, lists: str, copies: int) -> None:
    """``order_of`` of a mask whose tensors have no elements copies ``copies`` times, upwards."""
    low = masks.lower(mask)
    schedule, copied = scheduled(low, 2, 3, lists), []
    tensors = {name: getattr(low, name) for name in (*masks.TENSORS, "block_tile")}
    away = {name: None if t is None else t.to("meta") for name, t in tensors.items()}

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            copied.extend([op] if "copy" in op.name() else [])
            return op(*args, **kwargs or {})

    with Copies():
        out = masks.order_of(replace(low, **away), schedule)
    assert len(copied) == copies and all(t.is_meta for t in out)
    want = masks.order_of(low, schedule)
    assert [(t.shape, t.dtype) for t in out] == [(t.shape, t.dtype) for t in want]


@pytest.mark.parametrize("kind", ["causal", "dense"])
@pytest.mark.parametrize("lists", ["per mask", "per head"])
def test_the_mean_of_key_blocks(kind, lists):
    """Whether heads share lists or have their own; and without a block."""
    low = masks.lower(drawn(kind)[0])
    order = masks.order_of(low, scheduled(low, 2, 3, lists))
    want = low.kv_count.double().mean()
    assert order.mean_key_blocks(low.q_len, low.kv_len) == pytest.approx(float(want))
    none = masks.lower(BlockMask.from_dense(torch.zeros(1, 1, 200, 300, dtype=torch.bool)))
    order = masks.order_of(none, scheduled(none, 2, 3, lists))
    assert order.mean_key_blocks(200, 300) == 0


def test_an_order_without_entries():
    nothing = BlockMask.from_dense(torch.zeros(2, 1, 200, 300, dtype=torch.bool))
    low = masks.lower(nothing)
    order = masks.order_of(low, scheduled(low, 2, 2, "per mask"))
    assert order.ticket[:, 2:].tolist() == [[0, 0]] * 12 and order.tile.shape == (1,)
    assert order.entry.numel() == order.rank.numel() == 0
    # In a mask of bits, too, some heads may have none.
    some = torch.zeros(2, 1, 200, 300, dtype=torch.bool)
    some[1, :, 5:150, 7:280:3] = True
    low = masks.lower(BlockMask.from_dense(some))
    schedule = scheduled(low, 2, 1, "per mask")
    order = masks.order_of(low, schedule)
    begin, end = order.ticket[order.ticket[:, 0] == 0, 2:].unbind(1)
    assert low.form == "bits" and (begin == end).all() and order.tile.numel() > 0
    assert_tiles(low, schedule, order, some)


WORDS, DEVICE = "_whole_tiles(bits.words)", "    device = lowered.words.device\n"
LIST, TILES = "return tuple(of_list.tolist())", "lowered.block_tile.view(-1).index_select(0, place)"
COUNT = "mask.kv_count.clone(memory_format=torch.contiguous_format)"
#: The check that sees it, with its arguments -> what: (old text, new text).
TABLES: dict[tuple, dict[str, tuple[str, str]]] = {
    (test_both_sides_are_the_mask, "dense"): {
        "tiles by column": ("tiles[0].contiguous()", "tiles[0].flip(3)"),
        "flags swapped": ("(~full).int()", "full.int()"),
        "words of the next tile": (WORDS, f"{WORDS}.roll(1, 0)"),
        "one key to the left": (WORDS, f"{WORDS} >> 1"),
        "a block forgotten": (COUNT, "mask.kv_count - 1"),
    },
    (test_tiles_of_a_schedule, "per mask", False, "by batch and head"): {
        "the mask of every list is the first": (LIST, "return (0,) * schedule.num_lists"),
        "the mask of the next list": (LIST, "return tuple(np.roll(of_list, 1).tolist())"),
        "tiles of other blocks": (TILES, f"{TILES}.flip(0)"),
    },
    (test_tiles_of_a_schedule, "per head", False, "document"): {
        "masks by head first": ("if heads == 1 else", "if heads == 0 else"),
    },
    (test_an_order_waits_for_nothing,): {
        "an order that reads": (DEVICE, f"{DEVICE}    int(lowered.kv_count.max())\n"),
        "an order that copies": (TILES, f'torch.zeros({TILES}.shape, device="cpu").to("meta")'),
    },
}
MUTANTS = {name: (*key, edit) for key, edits in TABLES.items() for name, edit in edits.items()}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name):
    check, *arguments, edit = MUTANTS[name]
    with planted(masks, edit), pytest.raises((AssertionError, RuntimeError)):
        check(*arguments[::-1])
