"""Bad inputs of ``ck.paged_attention`` and ``ck.write_kv_cache``: each names the argument."""

from __future__ import annotations

import random

import pytest
import torch

import cute_kernels as ck
from cute_kernels import errors
from cute_kernels.runtime.main_grad import overlaps_itself, shares_elements
from cute_kernels.sparse_attn.paged import checks


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attend(**change):
    """A good call of two sequences, of 3 queries and 20 keys and of 1 and 33, with a change."""
    q, k, v = (torch.zeros(n, 16, h, 64).bfloat16() for n, h in ((1, 4), (5, 2), (5, 2)))
    arguments = {
        "q": q[0, :5], "k_cache": k, "v_cache": v, "block_table": ints([0, 1, 9], [2, 4, 3]),
        "seqlens_k": ints(20, 33), "cu_seqlens_q": ints(0, 3, 4),
    }  # fmt: skip
    return ck.paged_attention(**arguments | change)


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


VALUE, TYPE = errors.ArgumentValueError, errors.ArgumentTypeError
SHAPE, DTYPE, DEVICE = errors.ShapeError, errors.DtypeError, errors.DeviceError
BAD = [
    ("q", zeros(1, 5, 4, 64), SHAPE, r"3 dimensions \[T, Hq, D\]"),
    ("q", zeros(5, 4, 128), SHAPE, "head size 64"),
    ("q", zeros(5, 4, 64, dtype=torch.float32), DTYPE, "float32"),
    ("q", [1], TYPE, "a torch.Tensor"),
    ("q", zeros(5, 2 * 65, 64), SHAPE, "at most 64 query heads"),
    ("k_cache", zeros(5, 16, 3, 64), SHAPE, "v_cache: expected"),
    ("k_cache", zeros(5, 16, 64), SHAPE, r"\[pages, page_size, Hkv, D\]"),
    ("k_cache", zeros(5, 16, 2, 64, dtype=torch.float16), DTYPE, "v_cache"),
    ("k_cache", zeros(5, 16, 2, 128)[..., ::2], VALUE, "stride of 1"),
    ("k_cache", torch.empty(5, 16, 2, 64, dtype=torch.bfloat16, device="meta"), DEVICE, "v_cache"),
    ("v_cache", zeros(5, 16, 2, 96), SHAPE, "head size 64"),
    ("v_cache", zeros(4, 16, 2, 64), SHAPE, "as k_cache has"),
    ("block_table", ints([0, 1, 9], [2, 4, 3]).long(), DTYPE, "int32"),
    ("block_table", ints(0, 1), SHAPE, r"\[N, P\]"),
    ("block_table", ints([0, 1], [2, 4], [3, 3]).T, VALUE, "stride of 1"),
    ("block_table", ints([0, 5, 9], [2, 4, 3]), VALUE, "pages from 0 to 4 for sequence 0, got 5"),
    ("block_table", ints([0, 1, 9], [2, 4, -1]), VALUE, "sequence 1, got -1"),
    ("block_table", ints([0, 1, 9]), SHAPE, "seqlens_k: expected 1 numbers"),
    ("seqlens_k", ints(20, 49), VALUE, "to 48 .* for sequence 1, got 49"),
    ("seqlens_k", ints(2, 33), VALUE, "3 .* for sequence 0, got 2"),
    ("seqlens_k", ints(20, -1), VALUE, "got -1"),
    ("seqlens_k", ints(20, 33).float(), DTYPE, "int32"),
    ("seqlens_k", ints(20), SHAPE, "2 numbers"),
    ("cu_seqlens_q", ints(1, 3, 4), VALUE, "ascend from 0"),
    ("cu_seqlens_q", ints(0, 3, 2), VALUE, "ascend from 0"),
    ("cu_seqlens_q", ints(0, 3, 6), VALUE, "at most 5"),
    ("cu_seqlens_q", ints(0, 4), SHAPE, "3 numbers"),
    ("scale", 0.0, VALUE, "above 0"),
    ("scale", "1", TYPE, "a number"),
    ("softcap", -1.0, VALUE, "softcap"),
    ("causal", 1, TYPE, "True or False"),
    ("return_lse", None, TYPE, "True or False"),
    ("window_size", (-1, None), VALUE, "from 0"),
    ("window_size", 5, TYPE, "left, right"),
    ("layout", "NDH", VALUE, "NHD"),
    ("layout", ["NHD"], VALUE, "NHD"),
    ("sinks", zeros(3), SHAPE, r"shape \[4\]"),
    ("out", zeros(5, 4, 96), SHAPE, r"shape \[5, 4, 64\]"),
    ("out", zeros(5, 4, 64, dtype=torch.float32), DTYPE, "bfloat16"),
    ("out", zeros(4, 5, 64).transpose(0, 1), VALUE, "contiguous"),
]


def test_the_good_call():
    assert attend().shape == (5, 4, 64)


@pytest.mark.parametrize(("name", "value", "error", "words"), BAD)
def test_bad_inputs(name, value, error, words):
    with pytest.raises(error, match=words) as refused:
        attend(**{name: value})
    named = str(refused.value).partition(":")[0]
    assert named in {name, *ck.paged_attention.__annotations__}


def test_other_bad_shapes():
    """Of both caches at once."""
    for shape, words in (
        ((5, 48, 2, 64), "page size of k_cache"),
        ((5, 16, 2, 80), "head size of k_cache"),
        ((5, 16, 3, 64), "divides the 4 query heads"),
        ((5, 16, 0, 64), "divides the 4 query heads"),
    ):
        with pytest.raises(SHAPE, match=words):
            attend(k_cache=zeros(*shape), v_cache=zeros(*shape))
    with pytest.raises(SHAPE, match=r"page size of k_cache \(layout HND\)"):
        attend(layout="HND")


def test_out_has_memory_of_its_own():
    q = zeros(5, 4, 64)
    with pytest.raises(errors.AliasError, match=r"^out: "):
        attend(q=q, out=q)


EMPTY = zeros(0, 16, 2, 64)
#: Calls with a size of zero, and what their lists say all the same.
BAD_EMPTY = [
    ({"block_table": ints([], [])}, "seqlens_k", "to 0 .* for sequence 0, got 20"),
    ({"k_cache": EMPTY, "v_cache": EMPTY}, "block_table", "no page .* got 0"),
    (
        {"block_table": zeros(0, 3).int(), "seqlens_k": ints(), "cu_seqlens_q": ints(3)},
        *("cu_seqlens_q", "ascend from 0"),
    ),
    ({"q": zeros(0, 4, 64)}, "cu_seqlens_q", "at most 0, the tokens of q"),
]


@pytest.mark.parametrize(("change", "name", "words"), BAD_EMPTY)
def test_lists_of_empty_calls(change, name, words):
    for out in (None, zeros(*change.get("q", zeros(5, 4, 64)).shape)):
        with pytest.raises(VALUE, match=rf"^{name}: .*{words}"):
            attend(**change, out=out)


def test_negated_views_are_not_written():
    negated = torch._neg_view(zeros(5, 4, 64))
    with pytest.raises(VALUE, match=r"^out: .*a negated view"):
        attend(out=negated)
    for name in ("k_cache", "v_cache"):
        with pytest.raises(VALUE, match=rf"^{name}: .*a negated view"):
            write(**{name: torch._neg_view(zeros(5, 16, 2, 64))})


def write(**change):
    caches = zeros(2, 5, 16, 2, 64).unbind()
    arguments = {
        "key": zeros(3, 2, 64), "value": zeros(3, 2, 64), "k_cache": caches[0],
        "v_cache": caches[1], "slot_mapping": ints(4, -1, 79),
    }  # fmt: skip
    return ck.write_kv_cache(**arguments | change)


BAD_WRITES = [
    ("slot_mapping", ints(4, 80, 1), VALUE, "below 80.* got 80"),
    ("slot_mapping", ints(4, 1, 4), VALUE, "at most once, got 4"),
    ("slot_mapping", ints(4, 1), SHAPE, "3 numbers"),
    ("slot_mapping", ints(4, 1, 2).float(), DTYPE, "int64"),
    ("slot_mapping", [1, 2, 3], TYPE, "a torch.Tensor"),
    ("key", zeros(3, 3, 64), SHAPE, r"shape \[3, 2, 64\]"),
    ("key", zeros(3, 2, 64, dtype=torch.float32), DTYPE, "bfloat16"),
    ("value", zeros(4, 2, 64), SHAPE, r"shape \[3, 2, 64\]"),
    ("value", zeros(2, 64), SHAPE, r"\[T, Hkv, Dv\]"),
    ("v_cache", zeros(5, 32, 2, 64), SHAPE, "as k_cache has"),
    ("layout", "nhd", VALUE, "NHD"),
    ("k_cache", zeros(1, 16, 2, 64).expand(5, -1, -1, -1), errors.AliasError, "distinct"),
    ("v_cache", zeros(5, 16, 1, 64).expand(-1, -1, 2, -1), errors.AliasError, "distinct"),
]


@pytest.mark.parametrize(("name", "value", "error", "words"), BAD_WRITES)
def test_bad_writes(name, value, error, words):
    write()
    with pytest.raises(error, match=rf"^{name}: .*{words}"):
        write(**{name: value})


def test_rows_of_a_cache_are_not_written_to_it():
    cache = zeros(5, 16, 2, 64)
    with pytest.raises(errors.AliasError, match=r"^key: "):
        write(key=cache[0, :3], k_cache=cache)


def test_slots_of_caches_without_pages():
    with pytest.raises(VALUE, match=r"^slot_mapping: .* below 0"):
        write(k_cache=EMPTY, v_cache=EMPTY)


def test_written_caches_share_no_element():
    """One cache given twice, V as the first columns of K, and pages that overlap."""
    cache, wide = zeros(5, 16, 2, 64), zeros(5, 16, 2, 192)
    rows = {"key": zeros(3, 2, 192), "value": zeros(3, 2, 128)}
    later = zeros(6, 16, 2, 64)
    for change in (
        {"k_cache": cache, "v_cache": cache},
        {"k_cache": wide, "v_cache": wide[..., :128], **rows},
        {"k_cache": later[:5], "v_cache": later[1:]},
    ):
        with pytest.raises(errors.AliasError, match=r"^v_cache: .* k_cache"):
            write(**change)


def test_shared_elements():
    """Layouts of one buffer: an element that two have in common is found, and none else."""
    buffer, counts = zeros(3000), [0, 0]
    for seed in range(400):
        source = random.Random(seed)
        sizes, columns = [source.randint(1, 3) for _ in range(3)], (4, source.randint(1, 4))
        step, strides = source.randint(4, 10), [0, 0, 0, 1]
        for i in source.sample(range(3), 3):
            step = step * source.choice((1, 1, 2)) + source.choice((0, 0, 3))
            strides[i] = step
            step *= sizes[i]
        first, second = (
            buffer.as_strided((*sizes, width), strides, source.randint(0, most))
            for width, most in zip(columns, (9, step), strict=True)
        )
        assert not (overlaps_itself(first) or overlaps_itself(second))
        shared = shares_elements(first, second)
        counts[shared] += 1
        try:
            checks._distinct(first, second)
        except errors.AliasError:
            assert shared, seed
        else:
            assert not shared, seed
    assert min(counts) > 50
