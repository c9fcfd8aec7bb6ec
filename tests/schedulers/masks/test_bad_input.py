"""Refusals of a block mask: the message names the argument, what was expected and what came."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cute_kernels.errors import MaskError, MaskTypeError
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.algebra import And
from cute_kernels.schedulers.masks.rules import Band, Dilated, Prefix

NAN = float("nan")
GOOD_COUNT, GOOD_INDEX = [2, 0, 1], [[0, 2], [0, 0], [1, 0]]
TRUE = torch.eye(64, dtype=torch.bool)
MASK = BlockMask.causal(150, 180, block_size=64)
OF = BlockMask.from_rule


def ints(*values, dtype=torch.int32, **kwargs):
    return torch.tensor(*values, dtype=dtype, **kwargs)


def blocks(count=GOOD_COUNT, index=GOOD_INDEX, dtype=torch.int32, **kwargs):
    """from_blocks with 3 x 3 blocks of 64; rows as Python lists."""
    count = ints([[count]], dtype=dtype)
    return BlockMask.from_blocks(count, ints([[index]]), 150, 180, block_size=64, **kwargs)


def flex(**changes):
    out = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 150, 180, device="cpu", BLOCK_SIZE=64)
    for name, value in changes.items():
        setattr(out, name, value)
    return BlockMask.from_flex(out)


def causal(**kwargs):
    return BlockMask.causal(**{"q_len": 64, "kv_len": 64, **kwargs})


def window(**kwargs):
    return BlockMask.dilated_window(64, 64, **{"left": 4, "right": 0, "dilation": 1, **kwargs})


def prefix(length):
    return BlockMask.prefix_lm(64, 64, prefix=length)


def offsets(cu_seqlens, **kwargs):
    return BlockMask.from_cu_seqlens(cu_seqlens, **kwargs)


def packed(**kwargs):
    return offsets(ints([0, 3, 64]), **kwargs)


def of_batch(batch):
    return BlockMask.from_dense(TRUE.expand(batch, 1, -1, -1))


def fields(change, *names):
    """A mask whose tensors are given anew."""
    return replace(MASK, **{name: change(getattr(MASK, name)) for name in names})


# (call, what the message must say)
VALUES = [
    (lambda: causal(q_len=-1), "q_len: got -1"),
    (lambda: causal(kv_len=2**31), "kv_len: got 2147483648"),
    (lambda: causal(block_size=0), "block_size: 1 <= got 0"),
    (lambda: causal(block_size=(64, -8)), "block_size[1]: got -8"),
    (lambda: causal(block_size=(1, 2, 3)), "block_size: pair (1, 2, 3)"),
    (lambda: causal(device="meta"), "device: holds data got meta"),
    (lambda: causal(device="gpu9"), "device: got 'gpu9'"),
    (lambda: window(left=-1), "left: None for no bound got -1"),
    (lambda: window(right=10**12), "right: 0 to 2147483647, or None got 1000000000000"),
    (lambda: window(dilation=0), "dilation: got 0"),
    (lambda: packed(window_size=(1, 2, 3)), "window_size: (1, 2, 3)"),
    (lambda: packed(window_size=(None, 10**12)), "window_size[1]: 2147483647 got 1000000000000"),
    (lambda: offsets(ints([0, 2**31], dtype=torch.int64)), "cu_seqlens: got 2147483648"),
    (lambda: offsets(ints([1, 5])), "cu_seqlens: start with 0 got [1]"),
    (lambda: offsets(ints([0, 9, 5])), "cu_seqlens: 9 then 5 at 1"),
    (lambda: offsets(ints([[0, 9]])), "cu_seqlens: dimensions got 2"),
    (lambda: OF(Band(None, 2**70), 64, 64), f"rule.hi: None got {2**70}"),
    (
        lambda: OF(And((Band(-(2**31), 0), Prefix(ints([3])))), 64, 64),
        "rule.lo: None got -2147483648",
    ),
    (lambda: OF(Dilated(0, 0), 64, 64), "rule.step: got 0"),
    (lambda: OF(Dilated(3, 3), 64, 64), "rule.phase: got 3"),
    (lambda: prefix(65), "prefix: 64 got 65"),
    (lambda: prefix(ints([3, -2])), "prefix: got -2 at 1"),
    (lambda: BlockMask.document(ints([[[1, 2]]])), "ids: 1 or 2 dimensions got 3"),
    (lambda: BlockMask.document(ints([1, 2], device="meta")), "ids: data got meta"),
    (lambda: BlockMask.document(ints([]).view(0, 5)), "ids: batch got [0, 5]"),
    (lambda: BlockMask.document(), "ids, cu_seqlens: one got neither"),
    (
        lambda: BlockMask.document(ints([1]), cu_seqlens=ints([0, 1])),
        "ids, cu_seqlens: one got both",
    ),
    (lambda: BlockMask.from_dense(TRUE[None]), "dense: 2 or 4 dimensions got 3"),
    (lambda: BlockMask.from_dense(TRUE.expand(1, 0, 64, 64)), "dense: got [1, 0,"),
    (lambda: blocks([3, 0, 1]), "kv_count: [0, 2] got 3"),
    (lambda: blocks([2, -1, 1]), "kv_count: got -1 at [0, 0, 1]"),
    (lambda: blocks(index=[[0, 3], [0, 0], [1, 0]]), "kv_index: [0, 3) got 3 at [0, 0, 0, 1]"),
    (lambda: blocks(index=[[-1, 2], [0, 0], [1, 0]]), "kv_index: got -1 at [0, 0, 0, 0]"),
    (lambda: blocks(index=[[2, 0], [0, 0], [1, 0]]), "kv_index: ascending got 0 at [0, 0, 0, 1]"),
    (lambda: blocks(index=[[2, 2], [0, 0], [1, 0]]), "kv_index: repeated got 2 at [0, 0, 0, 1]"),
    (lambda: blocks([2, 0], GOOD_INDEX[:2]), "kv_count: 3 rows got 2"),
    (lambda: blocks([2, 0]), "kv_index: [1, 1, 2, L]"),
    (
        lambda: blocks(rule=BlockMask.document(ints([1, 1])).rule),
        "rule: 2 tokens got lengths (150, 180)",
    ),
    (lambda: blocks(rule=BlockMask.from_dense(TRUE).rule), "rule: (64, 64) got (150, 180)"),
    (lambda: causal() & causal(q_len=65), "other.q_len: 64 got 65"),
    (lambda: causal() & causal(block_size=(64, 128)), "other.block_size: (128, 128) got (64, 128)"),
    (lambda: of_batch(2) | of_batch(3), "other.shape: (2, 1) got (3, 1)"),
    (lambda: MASK.to("meta"), "device: got meta"),
    (
        lambda: BlockMask.sliding_window(1 << 17, 1 << 17, left=9, right=0).to_dense(),
        "mask: at most 268435456 elements got 17179869184",
    ),
    (lambda: fields(lambda t: t[..., :1], "kv_full"), "kv_full: [1, 1, 3, 3] got [1, 1, 3, 1]"),
    (lambda: fields(lambda t: t[:, :, :2], "q_count", "q_index"), "q_count: 3 rows got 2"),
    (
        lambda: fields(lambda t: torch.cat((t, t)), "q_count", "q_index", "q_full"),
        "q_count: (1, 1) got (2, 1)",
    ),
    (lambda: flex(seq_lengths=(300, 180)), "kv_num_blocks: 5 rows got 3"),
    (lambda: flex(kv_num_blocks=ints([[[9, 0, 0]]])), "kv_num_blocks: [0, 3] got 9"),
    (
        lambda: flex(
            full_kv_num_blocks=ints([[[1, 0, 0]]]), full_kv_indices=ints([[[[0], [0], [0]]]])
        ),
        "full_kv_indices: kv_indices got a block in both",
    ),
    (
        lambda: flex(mask_mod=lambda b, h, q, k: TRUE[q, k, k]),
        "flex.mask_mod: torch.vmap got",
    ),
]
TYPES = [
    (lambda: causal(q_len=True), "q_len: int got True"),
    (lambda: causal(block_size=64.0), "block_size: int got 64.0"),
    (lambda: window(left=NAN), "left: int got nan"),
    (lambda: packed(causal="False"), "causal: True got 'False'"),
    (lambda: packed(window_size=7), "window_size: pair got 7"),
    (lambda: OF(max, 64, 64), "rule: BlockMask.from_dense BlockMask.from_flex got builtin"),
    (lambda: OF(Band("a", 1), 64, 64), "rule.lo: int got 'a'"),
    (lambda: OF(Prefix(torch.tensor([3.0])), 64, 64), "rule.length: torch.int32 got torch.float32"),
    (lambda: prefix(torch.tensor([NAN])), "prefix: dtype got torch.float32"),
    (lambda: BlockMask.document([0, 0, 1]), "ids: tensor got list"),
    (lambda: BlockMask.document(torch.tensor([True])), "ids: torch.bool"),
    (lambda: BlockMask.from_dense(torch.full((4, 4), NAN)), "dense: bool float32"),
    (lambda: blocks(dtype=torch.int64), "kv_count: torch.int32 got torch.int64"),
    (lambda: fields(torch.Tensor.int, "q_full"), "q_full: torch.bool got torch.int32"),
    (lambda: BlockMask.from_flex(MASK), "flex: BlockMask got"),
    (
        lambda: flex(mask_mod=lambda b, h, q, k: (q - k).float() * NAN),
        "flex.mask_mod: bool got torch.float32",
    ),
]
CASES = [(MaskError, *case) for case in VALUES] + [(MaskTypeError, *case) for case in TYPES]


@pytest.mark.parametrize(("error", "call", "words"), CASES, ids=[case[-1] for case in CASES])
def test_refused(error, call, words):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error
    name, _, rest = words.partition(": ")
    assert message.startswith(name + ": expected "), message
    index = 0
    for word in rest.split():
        out = message.find(word, index)
        assert out >= 0, f"{word!r} after {message[:index]!r} in {message!r}"
        index = out


def test_the_table_starts_from_good_input():
    assert blocks().num_blocks == 3 and flex().num_blocks == 6 and MASK.num_blocks == 8
    with pytest.raises(TypeError):
        MASK & 5
