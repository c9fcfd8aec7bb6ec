"""Masks as FA4's lists, and checks of what comes back and of what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cute_kernels.errors import MaskError
from cute_kernels.schedulers import BlockMask, from_fa4, to_fa4
from tests.schedulers.masks import oracle as oracle

S = 700


def masks(block_size):
    rng = np.random.default_rng(9)
    size = {"block_size": block_size}
    ids = torch.from_numpy(np.sort(rng.integers(0, 5, (2, S)), axis=1))
    random = torch.from_numpy(rng.random((2, 3, S, S)) < 0.0008)
    causal = BlockMask.causal(S, S, **size)
    return {
        "causal": causal,
        "window": BlockMask.sliding_window(S, S, left=100, right=20, **size),
        "document": BlockMask.document(ids, **size) & causal,
        "prefix": BlockMask.prefix_lm(S, S, prefix=300, **size),
        "random": BlockMask.from_dense(random, **size),
        "full": BlockMask.full(S, S, **size),
        "nothing": BlockMask.from_dense(torch.zeros(S, S, dtype=torch.bool), **size),
    }


def ranks(mask: BlockMask, descending: bool) -> torch.Tensor:
    """FA4's dQ write order over the merged lists, by loops: the place of n among the sorted
    contributors of query block m."""
    out = torch.zeros_like(mask.q_index)
    for index in np.ndindex(*mask.q_count.shape):
        b, h, n = index
        for i in range(int(mask.q_count[index])):
            m = int(mask.q_index[index][i])
            row = mask.kv_index[b, h, m][: int(mask.kv_count[b, h, m])].tolist()
            out[index][i] = sorted(row, reverse=descending).index(n)
    return out


def padded(tensor, length):
    """Copy of a list, not compact, with rubbish behind the count."""
    if tensor is None:
        return None
    return torch.nn.functional.pad(tensor, (0, length - tensor.shape[-1]), value=123456)


def listed(blocks: np.ndarray) -> dict[str, torch.Tensor]:
    """FA4's forward fields of blocks [B, H, Mb, Nb]: 1 a mask block, 2 a full one, 3 both."""
    out = {}
    for name, bit in (("mask", 1), ("full", 2)):
        present = torch.from_numpy(blocks & bit > 0)
        index = present.int().argsort(dim=3, descending=True, stable=True)
        out[f"{name}_block_cnt"] = present.sum(3, dtype=torch.int32)
        out[f"{name}_block_idx"] = index.int()
    return out


def write_orders_come_back(spt):
    for name, mask in masks((64, 128)).items():
        order = ranks(mask, spt)
        lists = to_fa4(mask, "backward", write_order=order, spt=spt)
        assert lists.dq_write_order.shape == lists.mask_block_idx.shape
        assert lists.dq_write_order_full.shape == lists.full_block_idx.shape
        assert lists.dq_write_order.dtype == torch.int32 and lists.spt is spt
        wide = lists._replace(
            mask_block_idx=padded(lists.mask_block_idx, 15),
            dq_write_order=padded(lists.dq_write_order, 15),
        )
        for fa4_lists in (lists, wide):
            back, again, flag = from_fa4(fa4_lists, S, S, rule=mask.rule, direction="backward")
            assert flag is spt and again.dtype == torch.int32
            assert back.q_index.tolist() == mask.q_index.tolist(), name
            assert again.tolist() == order.tolist(), name


def denied_claims_are_refused(direction):
    """Drawn lists against a drawn window, block by block: taken if no block is in both lists and
    every full block is full; else the error names such a block."""
    rng = np.random.default_rng(17)
    size, seen = 8, {"taken": 0, "shared": 0, "overclaimed": 0}
    for draw in range(90):
        left, right = (int(side) for side in rng.integers(0, 24, 2))
        window = BlockMask.sliding_window(30, 30, left=left, right=right, block_size=size)
        exact = window.dense_blocks().numpy()
        blocks = np.minimum(exact, rng.integers(0, 3, (2, 3, 4, 4))).astype(np.uint8)
        at = tuple(rng.integers(0, n) for n in blocks.shape)
        blocks[at] = rng.choice([blocks[at], 2, 3])
        both = blocks == 3
        over = (blocks == 2) & (exact != 2)
        facts = listed(blocks if direction == "forward" else blocks.swapaxes(2, 3))
        lists = SimpleNamespace(**facts, block_size=(size, size))
        case = "shared" if both.any() else "overclaimed" if over.any() else "taken"
        seen[case] += 1
        if case == "taken":
            mask, _, _ = from_fa4(lists, 30, 30, rule=window.rule, direction=direction)
            want = np.where(blocks > 0, exact, 0)
            assert np.array_equal(mask.dense_blocks().numpy(), want), draw
            continue
        with pytest.raises(MaskError) as caught:
            from_fa4(lists, 30, 30, rule=window.rule, direction=direction)
        if case == "shared":
            assert "no block that mask_block_idx lists too" in str(caught.value), draw
        else:
            b, h, m, n = at
            named = f"got block (q {m}, kv {n}) of batch {b}, head {h}"
            assert str(caught.value).startswith("full_block_idx: expected blocks that the rule")
            assert str(caught.value).endswith(named), draw
    assert min(seen.values()) > 10, seen
