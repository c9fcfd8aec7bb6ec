"""Block masks: every constructor is exact, on every size, in compact lists, both ways."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import schedulers
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks import rules
from cute_kernels.schedulers.masks.bits import unpack
from tests.schedulers.masks import oracle as oracle
from tests.steps import lines


@pytest.mark.parametrize("count", [4, pytest.param(12, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("block_size", oracle.BLOCK_SIZES)
@pytest.mark.parametrize("chunk", [rules.CHUNK, 700])
def test_every_constructor_equals_brute_force(monkeypatch, block_size, count, chunk):
    monkeypatch.setattr(rules, "CHUNK", chunk)
    oracle.battery(block_size, seed=7, count=count if chunk > 700 else 1)


@pytest.mark.parametrize("left", [None, 2])
@pytest.mark.parametrize(("right", "causal"), [(None, False), (1, False), (1, True)])
def test_packs(left, right, causal):
    lengths = [5, 0, 1, 20, 7]
    ids = np.repeat(np.arange(5), lengths)
    distance = np.arange(33) - np.arange(33)[:, None]
    want = ids[:, None] == ids
    want &= (distance >= -33) if left is None else (distance >= -left)
    bound = 0 if causal else right
    want &= (distance <= 33) if bound is None else (distance <= bound)
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    mask = BlockMask.from_cu_seqlens(
        offsets, causal=causal, window_size=(left, right), block_size=(4, 8)
    )
    oracle.check_exact(mask, want[None, None], (4, 8))


@pytest.mark.parametrize("block_size", oracle.BLOCK_SIZES)
def test_and_or_equal_the_dense_ones(block_size):
    for q_len, _, rng in oracle.draw_sizes(11, 3, block_size, square=True):
        size = {"block_size": block_size}
        dense = torch.from_numpy(rng.random((1, 2, q_len, q_len)) < rng.choice([0.01, 0.6, 0.999]))
        ids = torch.from_numpy(np.sort(rng.integers(0, 5, (2, q_len)), axis=1))
        masks = [
            BlockMask.causal(q_len, q_len, **size),
            BlockMask.sliding_window(q_len, q_len, left=37, right=5, **size),
            BlockMask.dilated_window(q_len, q_len, left=90, right=0, dilation=3, **size),
            BlockMask.document(ids, **size),
            BlockMask.prefix_lm(q_len, q_len, prefix=q_len // 3, **size),
            BlockMask.from_dense(dense, **size),
        ]
        for i, a in enumerate(masks):
            for b in masks[i + 1 :]:
                both, either = a.to_dense() & b.to_dense(), a.to_dense() | b.to_dense()
                oracle.check_exact(a & b, both.numpy(), block_size)
                oracle.check_exact(a | b, either.numpy(), block_size)
        x, y, z = masks[0], masks[3], masks[5]
        dense = (x.to_dense() & y.to_dense()) | z.to_dense()
        oracle.check_exact((x & y) | z, dense.numpy(), block_size)


@pytest.mark.parametrize("other", [(64, 128), (32, 32), (48, 80), (256, 512)])
def test_reblock_keeps_the_elements(other):
    rng = np.random.default_rng(3)
    dense = rng.random((1, 2, 300, 410)) < 0.01
    dense[:, 1, 64:192] = True
    mask = BlockMask.from_dense(torch.from_numpy(dense), block_size=(128, 128))
    oracle.check_exact(mask.reblock(other), dense, other)
    again = BlockMask.from_dense(torch.from_numpy(dense), block_size=other)
    assert mask.reblock(other).hash() == again.hash()
    assert mask.reblock(other).reblock((128, 128)).hash() == mask.hash()
    joined = mask | BlockMask.causal(300, 410)
    oracle.check_exact(joined.reblock(other), joined.to_dense().numpy(), other)


def test_lengths_of_zero_and_empty_rows_and_columns():
    for q_len, kv_len in ((0, 0), (0, 300), (300, 0)):
        masks = [
            BlockMask.causal(q_len, kv_len),
            BlockMask.prefix_lm(q_len, kv_len, prefix=0),
            BlockMask.dilated_window(q_len, kv_len, left=5, right=5, dilation=2),
            BlockMask.from_dense(torch.zeros(q_len, kv_len, dtype=torch.bool)),
        ]
        for mask in masks:
            oracle.check_exact(mask, np.zeros((1, 1, q_len, kv_len), dtype=bool), (128, 128))
        oracle.check_exact(masks[0] & masks[3], masks[0].to_dense().numpy(), (128, 128))
    empty = BlockMask.document(cu_seqlens=torch.tensor([0, 0, 0]))
    oracle.check_exact(empty, np.zeros((1, 1, 0, 0), dtype=bool), (128, 128))
    oracle.check_exact(
        BlockMask.document(torch.zeros(2, 0, dtype=torch.int64)),
        np.zeros((2, 1, 0, 0), dtype=bool),
        (128, 128),
    )
    # 300 queries, 40 keys: the first 260 queries see nothing.
    short = BlockMask.causal(300, 40, block_size=(64, 16))
    assert short.kv_count.flatten().tolist() == [0, 0, 0, 0, 3]
    holes = torch.zeros(200, 200, dtype=torch.bool)
    holes[:64, 130:140] = True
    mask = BlockMask.from_dense(holes, block_size=64)
    assert mask.kv_count.flatten().tolist() == [1, 0, 0, 0]
    assert mask.q_count.flatten().tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("block_size", oracle.BLOCK_SIZES)
def test_chosen_blocks_with_and_without_a_rule(block_size):
    for q_len, kv_len, rng in oracle.draw_sizes(5, 4, block_size):
        grid = rules.Grid(q_len, kv_len, block_size)
        is_allowed = rng.random((2, 3, grid.num_q_blocks, grid.num_kv_blocks)) < 0.5
        dense = is_allowed.repeat(block_size[0], axis=2)[:, :, :q_len]
        dense = dense.repeat(block_size[1], axis=3)[..., :kv_len]
        count = torch.from_numpy(is_allowed.sum(-1)).int()
        index = torch.full((*count.shape, grid.num_kv_blocks + 2), 77, dtype=torch.int32)
        for at in np.ndindex(*count.shape):
            cols = np.flatnonzero(is_allowed[at])
            index[at][: len(cols)] = torch.from_numpy(cols)
        mask = BlockMask.from_blocks(count, index, q_len, kv_len, block_size=block_size)
        oracle.check_exact(mask, dense, block_size)
        assert mask.num_full == mask.num_blocks

        causal = BlockMask.causal(q_len, kv_len, block_size)
        both = BlockMask.from_blocks(
            count, index, q_len, kv_len, block_size=block_size, rule=causal.rule
        )
        oracle.check_exact(both, dense & causal.to_dense().numpy(), block_size)
        # Inside a partial block nothing but the rule is left to evaluate.
        assert both.partial_rule.digest() == causal.rule.digest()


def test_tiles_point_at_the_bits_of_each_entry():
    rng = np.random.default_rng(6)
    dense = torch.from_numpy(rng.random((2, 1, 200, 330)) < 0.995)
    dense[0, :, :64, :96] = True
    dense[1, :, 64:128, 32:] = False
    mask = BlockMask.from_dense(dense, block_size=(64, 32))
    both = mask & BlockMask.causal(200, 330, (64, 32))
    (bits,) = (part for part in both.rule.parts if part.tensors())
    for side, masks in (("kv", (mask, both)), ("q", (mask, both))):
        for at in masks:
            tiles = at.tiles(bits, side)
            count, index, _ = at.lists(side)
            assert tiles.shape == index.shape and tiles.dtype == torch.int32
            recorded = set()
            for b, h, r, i in np.ndindex(*index.shape):
                tile = int(tiles[b, h, r, i])
                if i >= int(count[b, h, r]):
                    assert tile == -1
                    continue
                m, n = (r, int(index[b, h, r, i]))[:: 1 if side == "kv" else -1]
                block = dense[b, h, 64 * m : 64 * m + 64, 32 * n : 32 * n + 32]
                assert (tile == -1) == bool(block.all())
                if tile >= 0:
                    rows, cols = block.shape
                    stored = unpack(bits.words[tile][None], 32)[0]
                    assert np.array_equal(stored[:rows, :cols].numpy(), block.numpy())
                    recorded.add(tile)
            if at is mask:
                assert recorded == set(range(bits.words.shape[0]))


def test_hash_is_of_the_mask_and_not_of_how_it_was_written():
    causal = BlockMask.causal(300, 420)
    ids = torch.tensor([5] * 100 + [9] * 120 + [-1] * 80)
    document = BlockMask.document(ids)
    square = BlockMask.causal(300, 300)
    same = [
        (causal, BlockMask.causal(300, 420, (128, 128), device="cpu")),
        (causal, BlockMask.sliding_window(300, 420, left=None, right=0)),
        (causal, causal & BlockMask.full(300, 420)),
        (causal, BlockMask.dilated_window(300, 420, left=None, right=0, dilation=1)),
        (document, BlockMask.document(cu_seqlens=torch.tensor([0, 100, 220, 220, 300]))),
        (document & square, square & document),
        (document | square, square | document),
        (
            BlockMask.prefix_lm(300, 420, prefix=17),
            BlockMask.prefix_lm(300, 420, prefix=torch.tensor([17])),
        ),
    ]
    for a, b in same:
        assert a.hash() == b.hash() and a.block_hash() == b.block_hash()
    dense = causal.to_dense()
    flipped = dense.clone()
    flipped[0, 0, 200, 300] ^= True
    different = [
        causal,
        BlockMask.causal(300, 421),
        BlockMask.causal(300, 420, (64, 128)),
        BlockMask.sliding_window(300, 420, left=None, right=1),
        BlockMask.prefix_lm(300, 420, prefix=17),
        BlockMask.prefix_lm(300, 420, prefix=18),
        BlockMask.prefix_lm(300, 420, prefix=torch.tensor([17, 17])),
        document,
        document & square,
        document | square,
        BlockMask.from_dense(dense),
        BlockMask.from_dense(flipped),
        BlockMask.from_dense(dense.expand(2, 1, -1, -1)),
    ]
    assert len({mask.hash() for mask in different}) == len(different)
    # Schedules depend on the blocks only: a rule that moves no block moves no block hash.
    assert different[4].block_hash() == different[5].block_hash()
    assert causal.block_hash() == BlockMask.from_dense(dense).block_hash()


def test_hash_is_the_documented_serialisation():
    mask = BlockMask.causal(300, 420)
    rows = oracle.block_lists(mask.to_dense().numpy(), (128, 128))
    entries = [entry for row in rows for entry in row]
    text = b"cute_kernels.BlockMask 1 (300, 420, (128, 128), (1, 1))"
    text += struct.pack(f"<{len(rows)}i", *(len(row) for row in rows))
    text += struct.pack(f"<{len(entries)}i", *(col for col, _ in entries))
    text += bytes(full for _, full in entries)
    assert mask.block_hash() == hashlib.sha256(text).hexdigest()
    text += hashlib.sha256(b"Band(lo=None, hi=120)").digest()
    assert mask.hash() == hashlib.sha256(text).hexdigest()


class Tensors(TorchDispatchMode):
    """Elements of all tensors that operations return, and of the largest of them."""

    def __init__(self):
        super().__init__()
        self.numel = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.numel += value.numel()
                # Expanded views have no memory of their own.
                stored = value.untyped_storage().nbytes() // value.itemsize
                self.largest = max(self.largest, stored)
        return out


def test_no_temporary_above_the_stated_size():
    with Tensors() as out:
        mask = BlockMask.sliding_window(1 << 19, 1 << 19, left=1024, right=0)
    assert mask.num_q_blocks * mask.num_kv_blocks == 4 * rules.CHUNK
    assert mask.num_blocks == 4096 * 9 - 36
    assert out.largest <= rules.CHUNK
    with Tensors() as out:
        ids = torch.arange(1 << 17) // 1000
        mask = BlockMask.document(ids) & BlockMask.causal(1 << 17, 1 << 17)
    # 248 blocks hold a document's edge on the diagonal: 4 M elements looked at, in chunks.
    assert 1000 < mask.num_blocks < 10000
    assert out.largest <= rules.CHUNK


@pytest.mark.parametrize("size", [8192, 65536])
def test_a_causal_mask_is_little_work_for_each_block(size):
    """512 x 512 blocks take 50 ms of one core."""
    with Tensors() as out:
        mask = BlockMask.causal(size, size)
    blocks = size // 128
    assert mask.num_blocks == blocks * (blocks + 1) // 2
    assert out.numel <= 128 * mask.num_blocks
    package = str(Path(schedulers.__file__).parent)
    assert lines(lambda: BlockMask.causal(size, size), package) <= 500
