"""Refusals of a block mask: the message names the argument, what was expected and what came."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import create_block_mask

from cute_kernels.errors import MaskError, MaskTypeError
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.algebra import And
from cute_kernels.schedulers.masks.rules import Band, Dilated, Prefix

NAN = float("nan")


def ints(*values, dtype=torch.int32, **kwargs):
    return torch.tensor(*values, dtype=dtype, **kwargs)


def blocks(count, index, **kwargs):
    """from_blocks with 3 x 3 blocks of 64; rows as Python lists."""
    count, index = ([[value]] for value in (count, index))
    return BlockMask.from_blocks(ints(count), ints(index), 150, 180, block_size=64, **kwargs)


GOOD_COUNT, GOOD_INDEX = [2, 0, 1], [[0, 2], [0, 0], [1, 0]]


def flex(**changes):
    out = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 150, 180, device="cpu", BLOCK_SIZE=64)
    for name, value in changes.items():
        setattr(out, name, value)
    return BlockMask.from_flex(out)


def causal(**kwargs):
    return BlockMask.causal(**{"q_len": 64, "kv_len": 64, **kwargs})


def window(**kwargs):
    return BlockMask.sliding_window(64, 64, **{"left": 4, "right": 0, **kwargs})


def document(ids):
    return BlockMask.document(ids)


def offsets(cu_seqlens):
    return BlockMask.document(cu_seqlens=cu_seqlens)


def packed(**kwargs):
    return BlockMask.from_cu_seqlens(ints([0, 3, 64]), **kwargs)


def of_rule(rule):
    return BlockMask.from_rule(rule, 64, 64)


def dense(tensor, **kwargs):
    return BlockMask.from_dense(tensor, **kwargs)


TRUE = torch.eye(64, dtype=torch.bool)
ONE_ELEMENT = torch.zeros(150, 180, dtype=torch.bool)
ONE_ELEMENT[3, 40] = True
MASK = BlockMask.causal(150, 180, block_size=64)
DOUBLE = BlockMask.from_dense(torch.eye(64, dtype=torch.bool).expand(2, 1, -1, -1))
TRIPLE = BlockMask.from_dense(torch.eye(64, dtype=torch.bool).expand(3, 1, -1, -1))

# (name, call, exception, what the message must say)
CASES = [
    ("length below zero", lambda: causal(q_len=-1), MaskError, "q_len: got -1"),
    ("length too large", lambda: causal(kv_len=2**31), MaskError, "kv_len: got 2147483648"),
    ("length NaN", lambda: causal(q_len=NAN), MaskTypeError, "q_len: int got nan"),
    ("length bool", lambda: causal(q_len=True), MaskTypeError, "q_len: int got True"),
    ("length text", lambda: causal(kv_len="64"), MaskTypeError, "kv_len: int got '64'"),
    ("block 0", lambda: causal(block_size=0), MaskError, "block_size: 1 <= got 0"),
    ("block below 0", lambda: causal(block_size=(64, -8)), MaskError, "block_size[1]: got -8"),
    ("block float", lambda: causal(block_size=64.0), MaskTypeError, "block_size: int got 64.0"),
    ("block triple", lambda: causal(block_size=(1, 2, 3)), MaskError, "block_size: pair (1, 2, 3)"),
    ("block text", lambda: causal(block_size="64"), MaskTypeError, "block_size: int got '64'"),
    ("meta device", lambda: causal(device="meta"), MaskError, "device: holds data got meta"),
    ("no such device", lambda: causal(device="gpu9"), MaskError, "device: got 'gpu9'"),
    ("left below 0", lambda: window(left=-1), MaskError, "left: None for no bound got -1"),
    ("right below 0", lambda: window(right=-7), MaskError, "right: None got -7"),
    ("left NaN", lambda: window(left=NAN), MaskTypeError, "left: int got nan"),
    (
        "right beyond int32",
        lambda: window(right=10**12),
        MaskError,
        "right: 0 to 2147483647, or None got 1000000000000",
    ),
    ("left beyond int32", lambda: window(left=2**31), MaskError, "left: None got 2147483648"),
    (
        "dilation beyond int32",
        lambda: BlockMask.dilated_window(64, 64, left=8, right=0, dilation=2**40),
        MaskError,
        "dilation: 2147483647 got 1099511627776",
    ),
    ("causal text", lambda: packed(causal="False"), MaskTypeError, "causal: True got 'False'"),
    ("causal 1", lambda: packed(causal=1), MaskTypeError, "causal: True or False got 1"),
    ("window a number", lambda: packed(window_size=7), MaskTypeError, "window_size: pair got 7"),
    ("window text", lambda: packed(window_size="ab"), MaskTypeError, "window_size: pair got 'ab'"),
    ("window triple", lambda: packed(window_size=(1, 2, 3)), MaskError, "window_size: (1, 2, 3)"),
    (
        "window beyond int32",
        lambda: packed(window_size=(None, 10**12)),
        MaskError,
        "window_size[1]: 2147483647 got 1000000000000",
    ),
    (
        "offsets beyond int32",
        lambda: offsets(ints([0, 2**31], dtype=torch.int64)),
        MaskError,
        "cu_seqlens: 2147483647 got 2147483648",
    ),
    (
        "a function for a rule",
        lambda: of_rule(lambda b, h, q, k: q >= k),
        MaskTypeError,
        "rule: BlockMask.from_dense BlockMask.from_flex got function",
    ),
    ("a tensor for a rule", lambda: of_rule(TRUE), MaskTypeError, "rule: from_dense got Tensor"),
    ("band of text", lambda: of_rule(Band("a", 1)), MaskTypeError, "rule.lo: int got 'a'"),
    ("band beyond", lambda: of_rule(Band(None, 2**70)), MaskError, f"rule.hi: None got {2**70}"),
    (
        "band beyond in a part",
        lambda: of_rule(And((Band(-(2**31), 0), Prefix(ints([3]))))),
        MaskError,
        "rule.lo: None got -2147483648",
    ),
    ("dilation of 0 steps", lambda: of_rule(Dilated(0, 0)), MaskError, "rule.step: got 0"),
    ("phase of a step", lambda: of_rule(Dilated(3, 3)), MaskError, "rule.phase: got 3"),
    (
        "prefix of floats",
        lambda: of_rule(Prefix(torch.tensor([3.0]))),
        MaskTypeError,
        "rule.length: torch.int32 got torch.float32",
    ),
    (
        "dilation 0",
        lambda: BlockMask.dilated_window(64, 64, left=8, right=0, dilation=0),
        MaskError,
        "dilation: got 0",
    ),
    (
        "prefix past the end",
        lambda: BlockMask.prefix_lm(64, 64, prefix=65),
        MaskError,
        "prefix: 64 got 65",
    ),
    (
        "prefix below 0 in one batch",
        lambda: BlockMask.prefix_lm(64, 64, prefix=ints([3, -2])),
        MaskError,
        "prefix: got -2 at 1",
    ),
    (
        "prefix NaN",
        lambda: BlockMask.prefix_lm(64, 64, prefix=torch.tensor([NAN])),
        MaskTypeError,
        "prefix: dtype got torch.float32",
    ),
    ("ids list", lambda: document([0, 0, 1]), MaskTypeError, "ids: tensor got list"),
    ("ids float", lambda: document(torch.tensor([0.0, NAN])), MaskTypeError, "ids: float32"),
    ("ids bool", lambda: document(torch.tensor([True])), MaskTypeError, "ids: torch.bool"),
    ("ids 3-D", lambda: document(ints([[[1, 2]]])), MaskError, "ids: 1 or 2 dimensions got 3"),
    ("ids meta", lambda: document(ints([1, 2], device="meta")), MaskError, "ids: data got meta"),
    ("ids no batch", lambda: document(ints([]).view(0, 5)), MaskError, "ids: batch got [0, 5]"),
    ("neither", lambda: BlockMask.document(), MaskError, "ids, cu_seqlens: one got neither"),
    (
        "both",
        lambda: BlockMask.document(ints([1]), cu_seqlens=ints([0, 1])),
        MaskError,
        "ids, cu_seqlens: one got both",
    ),
    ("offsets start", lambda: offsets(ints([1, 5])), MaskError, "cu_seqlens: start with 0 got [1]"),
    ("offsets none", lambda: offsets(ints([])), MaskError, "cu_seqlens: start with 0 got []"),
    ("offsets down", lambda: offsets(ints([0, 9, 5])), MaskError, "cu_seqlens: 9 then 5 at 1"),
    ("offsets 2-D", lambda: offsets(ints([[0, 9]])), MaskError, "cu_seqlens: dimensions got 2"),
    ("dense float", lambda: dense(torch.full((4, 4), NAN)), MaskTypeError, "dense: bool float32"),
    ("dense int", lambda: dense(ints([[1]])), MaskTypeError, "dense: torch.bool got torch.int32"),
    ("dense 3-D", lambda: dense(TRUE[None]), MaskError, "dense: 2 or 4 dimensions got 3"),
    ("dense meta", lambda: dense(TRUE.to("meta")), MaskError, "dense: data got meta"),
    ("dense no heads", lambda: dense(TRUE.expand(1, 0, 64, 64)), MaskError, "dense: got [1, 0,"),
    ("dense list", lambda: dense([[True]]), MaskTypeError, "dense: tensor got list"),
    ("dense block", lambda: dense(TRUE, block_size=0), MaskError, "block_size: got 0"),
    (
        "count above list",
        lambda: blocks([3, 0, 1], GOOD_INDEX),
        MaskError,
        "kv_count: [0, 2] got 3",
    ),
    (
        "count below 0",
        lambda: blocks([2, -1, 1], GOOD_INDEX),
        MaskError,
        "kv_count: got -1 at [0, 0, 1]",
    ),
    (
        "index too large",
        lambda: blocks(GOOD_COUNT, [[0, 3], [0, 0], [1, 0]]),
        MaskError,
        "kv_index: [0, 3) got 3 at [0, 0, 0, 1]",
    ),
    (
        "index below 0",
        lambda: blocks(GOOD_COUNT, [[-1, 2], [0, 0], [1, 0]]),
        MaskError,
        "kv_index: got -1 at [0, 0, 0, 0]",
    ),
    (
        "unsorted",
        lambda: blocks(GOOD_COUNT, [[2, 0], [0, 0], [1, 0]]),
        MaskError,
        "kv_index: ascending got 0 at [0, 0, 0, 1]",
    ),
    (
        "repeated",
        lambda: blocks(GOOD_COUNT, [[2, 2], [0, 0], [1, 0]]),
        MaskError,
        "kv_index: repeated got 2 at [0, 0, 0, 1]",
    ),
    ("rows short", lambda: blocks([2, 0], GOOD_INDEX[:2]), MaskError, "kv_count: 3 rows got 2"),
    ("shapes differ", lambda: blocks([2, 0], GOOD_INDEX), MaskError, "kv_index: [1, 1, 2, L]"),
    (
        "count int64",
        lambda: BlockMask.from_blocks(
            ints([[GOOD_COUNT]], dtype=torch.int64), ints([[GOOD_INDEX]]), 150, 180, block_size=64
        ),
        MaskTypeError,
        "kv_count: torch.int32 got torch.int64",
    ),
    (
        "index float",
        lambda: BlockMask.from_blocks(
            ints([[GOOD_COUNT]]), torch.full((1, 1, 3, 2), NAN), 150, 180, block_size=64
        ),
        MaskTypeError,
        "kv_index: torch.int32 got torch.float32",
    ),
    (
        "index 2-D",
        lambda: BlockMask.from_blocks(
            ints([[GOOD_COUNT]]), ints(GOOD_INDEX), 150, 180, block_size=64
        ),
        MaskError,
        "kv_index: 4 dimensions got 2",
    ),
    (
        "index meta",
        lambda: BlockMask.from_blocks(
            ints([[GOOD_COUNT]]), ints([[GOOD_INDEX]], device="meta"), 150, 180, block_size=64
        ),
        MaskError,
        "kv_index: data got meta",
    ),
    (
        "rule a function",
        lambda: blocks(GOOD_COUNT, GOOD_INDEX, rule=lambda b, h, q, k: q >= k),
        MaskTypeError,
        "rule: got function",
    ),
    (
        "rule of other lengths",
        lambda: blocks(GOOD_COUNT, GOOD_INDEX, rule=BlockMask.document(ints([1, 1])).rule),
        MaskError,
        "rule: 2 tokens got lengths (150, 180)",
    ),
    (
        "bits of other lengths",
        lambda: blocks(GOOD_COUNT, GOOD_INDEX, rule=BlockMask.from_dense(TRUE).rule),
        MaskError,
        "rule: (64, 64) got (150, 180)",
    ),
    ("other q_len", lambda: causal() & causal(q_len=65), MaskError, "other.q_len: 64 got 65"),
    ("other kv_len", lambda: causal() | causal(kv_len=65), MaskError, "other.kv_len: 64 got 65"),
    (
        "other blocks",
        lambda: causal() & causal(block_size=(64, 128)),
        MaskError,
        "other.block_size: (128, 128) got (64, 128)",
    ),
    ("other batch", lambda: DOUBLE | TRIPLE, MaskError, "other.shape: (2, 1) got (3, 1)"),
    ("to meta", lambda: MASK.to("meta"), MaskError, "device: got meta"),
    ("reblock 0", lambda: MASK.reblock(0), MaskError, "block_size: got 0"),
    (
        "too large to be dense",
        lambda: BlockMask.sliding_window(1 << 17, 1 << 17, left=9, right=0).to_dense(),
        MaskError,
        "mask: at most 268435456 elements got 17179869184",
    ),
    (
        "fields of other shape",
        lambda: replace(MASK, kv_full=MASK.kv_full[..., :1]),
        MaskError,
        "kv_full: [1, 1, 3, 3] got [1, 1, 3, 1]",
    ),
    (
        "fields of other dtype",
        lambda: replace(MASK, q_full=MASK.q_full.int()),
        MaskTypeError,
        "q_full: torch.bool got torch.int32",
    ),
    (
        "fields short of a row",
        lambda: replace(MASK, q_count=MASK.q_count[..., :2], q_index=MASK.q_index[:, :, :2]),
        MaskError,
        "q_count: 3 rows got 2",
    ),
    (
        "fields of other batch",
        lambda: replace(
            MASK,
            q_count=MASK.q_count.expand(2, 1, -1),
            q_index=MASK.q_index.expand(2, 1, -1, -1),
            q_full=MASK.q_full.expand(2, 1, -1, -1),
        ),
        MaskError,
        "q_count: (1, 1) got (2, 1)",
    ),
    ("flex a function", lambda: BlockMask.from_flex(max), MaskTypeError, "flex: BlockMask got"),
    ("flex ours", lambda: BlockMask.from_flex(MASK), MaskTypeError, "flex: got BlockMask"),
    (
        "flex rows",
        lambda: flex(seq_lengths=(300, 180)),
        MaskError,
        "kv_num_blocks: 5 rows got 3",
    ),
    (
        "flex counts",
        lambda: flex(kv_num_blocks=ints([[[9, 0, 0]]])),
        MaskError,
        "kv_num_blocks: [0, 3] got 9",
    ),
    (
        "flex in both lists",
        lambda: flex(
            full_kv_num_blocks=ints([[[1, 0, 0]]]), full_kv_indices=ints([[[[0], [0], [0]]]])
        ),
        MaskError,
        "full_kv_indices: kv_indices got a block in both",
    ),
    (
        "flex mask_mod fails",
        lambda: flex(mask_mod=lambda b, h, q, k: TRUE[q, k, k]),
        MaskError,
        "flex.mask_mod: torch.vmap got",
    ),
    (
        "flex mask_mod of floats",
        lambda: flex(mask_mod=lambda b, h, q, k: (q - k).float() * NAN),
        MaskTypeError,
        "flex.mask_mod: bool got torch.float32",
    ),
    (
        "flex 2-D lists",
        lambda: BlockMask.from_flex(
            FlexBlockMask.from_kv_blocks(ints([1, 1]), ints([[0, 1], [1, 0]]))
        ),
        MaskError,
        "kv_num_blocks: 3 dimensions got 1",
    ),
]


@pytest.mark.parametrize("call, error, words", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_refused(call, error, words):
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


def test_the_table_is_long_enough_and_starts_from_good_input():
    assert len(CASES) >= 40 and len({name for name, *_ in CASES}) == len(CASES)
    assert blocks(GOOD_COUNT, GOOD_INDEX).num_blocks == 3
    assert flex().num_blocks == 6 and MASK.num_blocks == 8
    with pytest.raises(TypeError):
        MASK & 5
