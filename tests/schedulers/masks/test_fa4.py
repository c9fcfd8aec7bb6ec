"""FA4's field names, both ways, with write orders, in compact and in padded lists."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cute_kernels.schedulers import BlockMask, from_fa4, to_fa4
from tests.schedulers.masks import oracle as oracle
from tests.schedulers.masks.fa4_checks import (
    S,
    denied_claims_are_refused,
    masks,
    padded,
    ranks,
    write_orders_come_back,
)


@pytest.mark.parametrize("block_size", [(64, 128), (128, 128)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_round_trip(block_size, direction):
    for name, mask in masks(block_size).items():
        lists = to_fa4(mask, direction)
        side = "kv" if direction == "forward" else "q"
        check = {"partial": (lists[0], lists[1]), "full": (lists[2], lists[3])}
        for kind, (count, index) in check.items():
            longest = max(1, int(count.max()))
            assert index.shape == (*getattr(mask, f"{side}_count").shape, longest), name
            for at in np.ndindex(*count.shape):
                row = getattr(mask, f"{side}_index")[at][: int(getattr(mask, f"{side}_count")[at])]
                full = getattr(mask, f"{side}_full")[at][: row.numel()]
                want = row[full if kind == "full" else ~full].tolist()
                assert index[at][: int(count[at])].tolist() == want
        assert lists.block_size == block_size and lists.spt is None
        assert lists.dq_write_order is None and lists.dq_write_order_full is None
        wide = lists._replace(
            mask_block_idx=padded(lists.mask_block_idx, 17),
            full_block_idx=padded(lists.full_block_idx, 17),
        )
        for fa4_lists in (lists, wide, SimpleNamespace(**lists._asdict())):
            back, order, spt = from_fa4(fa4_lists, S, S, rule=mask.rule, direction=direction)
            assert (order, spt) == (None, None)
            assert back.block_hash() == mask.block_hash()
        oracle.check_exact(back, mask.to_dense().numpy(), block_size)


@pytest.mark.parametrize("spt", [False, True])
def test_write_orders_are_compact_and_come_back(spt):
    write_orders_come_back(spt)


@pytest.mark.parametrize("spt", [False, True])
def test_pytorchs_write_order_is_ours(spt):
    """PyTorch's lists are not compact and its ranks are its own: both come in unchanged."""
    rng = np.random.default_rng(1)
    blob = torch.from_numpy(rng.random((S, S)) < 0.0004)

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= 90

    def scattered(b, h, q_idx, kv_idx):
        return blob[q_idx, kv_idx] | (q_idx // 128 == kv_idx // 128)

    for mod in (window, scattered):
        flex = create_block_mask(
            mod, 1, 1, S, S, device="cpu", compute_dq_write_order=True, dq_kv_order=spt
        )
        mask = BlockMask.from_flex(flex)
        lists = SimpleNamespace(
            mask_block_cnt=flex.q_num_blocks,
            mask_block_idx=flex.q_indices,
            full_block_cnt=flex.full_q_num_blocks,
            full_block_idx=flex.full_q_indices,
            block_size=flex.BLOCK_SIZE,
            dq_write_order=flex.dq_write_order,
            dq_write_order_full=flex.dq_write_order_full,
            spt=spt,
        )
        back, order, flag = from_fa4(lists, S, S, rule=mask.rule, direction="backward")
        assert back.block_hash() == mask.block_hash() and flag is spt
        assert order.tolist() == ranks(mask, spt).tolist()


def test_tail_blocks_can_be_reported_as_flex_reports_them():
    for kv_len in (384, 500):
        flex = create_block_mask(lambda b, h, q, kv: q >= -kv, 1, 1, 500, kv_len, device="cpu")
        mask = BlockMask.full(500, kv_len)
        for direction, side in (("forward", "kv"), ("backward", "q")):
            lists = to_fa4(mask, direction, tail_partial=True)
            assert lists.mask_block_cnt.tolist() == getattr(flex, f"{side}_num_blocks").tolist()
            count = getattr(flex, f"full_{side}_num_blocks")
            assert lists.full_block_cnt.tolist() == count.tolist()
            assert int(to_fa4(mask, direction).mask_block_cnt.sum()) == 0


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_claims_that_the_rule_or_the_other_list_denies_are_refused(direction):
    denied_claims_are_refused(direction)


def test_absent_full_lists_and_broadcast_heads():
    mask = BlockMask.causal(S, S, block_size=(64, 128))
    lists = to_fa4(mask)
    only = SimpleNamespace(
        mask_block_cnt=mask.kv_count, mask_block_idx=mask.kv_index, block_size=None
    )
    back, _, _ = from_fa4(only, S, S, rule=mask.rule, block_size=(64, 128))
    assert back.block_hash() == mask.block_hash()
    # Without a rule every listed block is allowed entirely.
    whole, _, _ = from_fa4(only, S, S, block_size=(64, 128))
    assert whole.num_full == whole.num_blocks == mask.num_blocks
    wide = lists._replace(
        full_block_cnt=lists.full_block_cnt.expand(2, 3, -1),
        full_block_idx=lists.full_block_idx.expand(2, 3, -1, -1),
    )
    back, _, _ = from_fa4(wide, S, S, rule=mask.rule)
    assert back.shape == (2, 3)
    oracle.check_exact(back, mask.to_dense().expand(2, 3, -1, -1).numpy(), (64, 128))


def test_a_rule_per_batch_over_lists_for_all():
    mask = masks((64, 128))["document"]
    order_of = BlockMask.full(S, S, block_size=(64, 128))
    lists = to_fa4(order_of, "backward")
    lists = lists._replace(
        mask_block_cnt=lists.full_block_cnt,
        mask_block_idx=lists.full_block_idx,
        full_block_cnt=None,
        full_block_idx=None,
    )
    back, _, _ = from_fa4(lists, S, S, rule=mask.rule, direction="backward")
    assert back.shape == (2, 1)
    assert back.block_hash() == mask.block_hash()
