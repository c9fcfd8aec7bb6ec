"""Bad inputs of every attention op, in one table: each names the argument, what was expected, what
came.

Nothing runs before the checks are through: the backend is taken away.
"""

from __future__ import annotations

import dataclasses
import math
import random
from types import FunctionType

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels import arch, errors
from cute_kernels.errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailable,
    DeviceError,
    DtypeError,
    ScheduleError,
    ShapeError,
)
from cute_kernels.runtime import checking
from cute_kernels.runtime.main_grad import overlaps_itself, shares_elements
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.schedule import Schedule
from cute_kernels.sparse_attn import api, checks, cpu
from cute_kernels.sparse_attn.paged import checks as paged_checks

B, S, H, HKV, D = 2, 300, 4, 2, 64
COLUMNS = 3
BF16, FP16, FP32, INT = torch.bfloat16, torch.float16, torch.float32, torch.int32
NAN, FAR = math.nan, 2**30
VALUE, TYPE, SHAPE = ArgumentValueError, ArgumentTypeError, ShapeError
DTYPE, DEVICE, ORDER = DtypeError, DeviceError, ScheduleError


def zeros(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=INT)


def bits(*shape: int) -> BlockMask:
    return BlockMask.from_dense(torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5)


# ---- good calls ----------------------------------------------------------------------------------

CAUSAL, FULL = BlockMask.causal(S, S), BlockMask.full(S, S)
Q, KV = zeros(B, S, H, D), zeros(B, S, HKV, D)


def attend(**change):
    return ck.block_sparse_attention(**{"q": Q, "k": KV, "v": KV, "block_mask": CAUSAL} | change)


def varlen(**change):
    rows = {"q": Q[0, :60], "k": KV[0, :60], "v": KV[0, :60], "cu_seqlens": ints(0, 20, 60)}
    return ck.block_sparse_attention_varlen(**rows | change)


def buffer(**change):
    spans = zeros(B, 1, S, 4, dtype=INT)
    return api.sequence_attention(**{"q": Q, "k": KV, "v": KV, "kv_ranges": spans} | change)


def ranges(**change):
    operands = {"q_offset": 0, "kv_offset": 0, "sizes": (1, 3, 3), "packed": False}
    return api.kv_ranges(**{"seen": None, "padding": None} | operands | change)


def columns(attention_mask):
    return api.seen_columns(attention_mask)


TABLE = ints([0, 1, 9], [2, 4, 3])


def paged(**change):
    """Two sequences, of 3 queries and 20 keys and of 1 and 33."""
    cache = zeros(5, 16, 2, 64)
    lists = {"block_table": TABLE, "seqlens_k": ints(20, 33), "cu_seqlens_q": ints(0, 3, 4)}
    caches = {"k_cache": cache, "v_cache": cache}
    return ck.paged_attention(**{"q": zeros(5, 4, 64)} | caches | lists | change)


def write(**change):
    caches = zeros(2, 5, 16, 2, 64).unbind()
    rows = {"key": zeros(3, 2, 64), "value": zeros(3, 2, 64), "slot_mapping": ints(4, -1, 79)}
    return ck.write_kv_cache(**{"k_cache": caches[0], "v_cache": caches[1]} | rows | change)


# ---- values --------------------------------------------------------------------------------------


def of_dims(dim: int, value_dim: int, key_dim: int = 0) -> dict:
    """Of head sizes of q and v, and of k if it is not q's."""
    sizes = (dim, 2), (key_dim or dim, 1), (value_dim, 1)
    q, k, v = (zeros(1, S, heads, size) for size, heads in sizes)
    return {"q": q, "k": k, "v": v, "block_mask": CAUSAL}


def of_heads(heads: int, kv_heads: int) -> dict:
    k = zeros(B, S, kv_heads, D)
    return {"q": zeros(B, S, heads, D), "k": k, "v": k}


def of_batches(batches: int) -> dict:
    k = zeros(batches, S, HKV, D)
    return {"k": k, "v": k}


def caches(*shape: int) -> dict:
    return {"k_cache": zeros(*shape), "v_cache": zeros(*shape)}


def good() -> Schedule:
    return kinds.left_to_right(CAUSAL, heads=B * HKV)


def backwards() -> Schedule:
    return dataclasses.replace(good(), order=good().order[::-1])


def crossed() -> Schedule:
    """Row 1 is written from the last column to the first, and column 0 visits it first: it waits
    for column 2, which first waits for column 0 in row 0."""
    schedule = kinds.permutation(FULL, order=range(COLUMNS), heads=B * HKV)
    rank, rows = schedule.rank.copy(), schedule.q_block.copy().reshape(-1, COLUMNS, 3)
    table = rank.reshape(-1, COLUMNS, 3)
    table[:, :, 1] = 2 - table[:, :, 1]
    rows[:, 0] = [1, 0, 2]
    table[:, 0] = table[:, 0][:, [1, 0, 2]]
    return dataclasses.replace(schedule, rank=rank, q_block=rows.reshape(-1))


def of_shared_lists() -> dict:
    """One set of lists for two batches whose masks have equal blocks and other bits."""
    mask = bits(B, 1, S, S)
    lists = kinds.left_to_right(mask.dense_blocks()[0, 0], heads=B * HKV)
    return {"schedule": lists, "block_mask": mask}


def spt(mask: BlockMask, heads: int = B * HKV) -> Schedule:
    return kinds.spt(mask, heads=heads)


def flex_mask():
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(ints([[1]]), ints([[[0]]]))


CACHE, WIDE, LATER = zeros(5, 16, 2, 64), zeros(5, 16, 2, 192), zeros(6, 16, 2, 64)
ROWS, OUT = zeros(5, 4, 64), zeros(5, 4, 64)
NONE = zeros(0, 16, 2, 64)
IN_K = {"k_cache": WIDE, "v_cache": WIDE[..., :128]}
IN_K |= {"key": zeros(3, 2, 192), "value": zeros(3, 2, 128)}
EMPTY = {"block_table": zeros(0, 3, dtype=INT), "seqlens_k": ints(), "cu_seqlens_q": ints(3)}
HOLE = torch.tensor([[1, 1, 1], [1, 0, 1]]).bool()
GAP = torch.tensor([[1, 1, 1], [1, 0, 1]]).bool()[None, None]
LONG = torch.empty(1, FAR, 1, D, dtype=BF16, device="meta")
LONGEST = {"q": LONG[:, :1], "k": LONG, "v": LONG, "block_mask": None}
#: Call -> (argument, its value or a dict of all that changes, error, words); functions are called.
BAD = {
    attend: [
        ("block_mask", zeros(S, S, dtype=torch.bool), TYPE, "from_dense.*Tensor"),
        ("block_mask", True, TYPE, "bool"),
        ("block_mask", flex_mask, TYPE, "from_flex.*got torch"),
        ("block_mask", BlockMask.causal(S - 1, S), SHAPE, r"\(300, 300\).*\(299, 300\)"),
        ("block_mask", BlockMask.full(S, S + 128), SHAPE, r"\(300, 300\).*\(300, 428\)"),
        ("block_mask", lambda: bits(3, 1, S, S), SHAPE, "1 or 2 batch.*3"),
        ("block_mask", lambda: bits(1, HKV, S, S), SHAPE, "1 or 4 query heads.*2"),
        ("schedule", "fastest", VALUE, "'spt'.*'fastest'"),
        ("schedule", None, TYPE, "NoneType"),
        ("schedule", [0, 1], ORDER, r"\[3\].*\[2\]"),
        (r"schedule \(head 0\)", [0, 1, 1], ORDER, r"permutation of 0..2.*twice"),
        (r"schedule \(head 0\)", [0, 1, -1], ORDER, "permutation.*-1"),
        ("schedule", [0.0, 1.0, 2.0], ORDER, "integers.*float64"),
        ("schedule", [[0, 1, 2], [0, 1]], ORDER, "ragged"),
        ("schedule", [[0, 1, 2]] * 3, ORDER, "1 or 4 heads.*3"),
        (r"schedule \(head 3\)", torch.tensor([[0, 1, 2]] * 3 + [[0, 0, 2]]), ORDER, "0 twice"),
        ("schedule", np.arange(3)[:, None], ORDER, r"\[3\].*\[3, 1\]"),
        ("row 0.*", {"schedule": spt(FULL)}, ORDER, "partial as in the mask"),
        ("schedule", spt(BlockMask.causal(S + 128, S + 128)), ORDER, r"\(3, 3\) blocks.*\(4, 4\)"),
        ("schedule.heads", {"schedule": spt(CAUSAL, heads=B * H)}, ORDER, "4.*8"),
        ("schedule", backwards, ORDER, "needs 3"),
        (".*", {"schedule": crossed, "block_mask": FULL}, ORDER, "waits without a cycle.*rank"),
        ("schedule", {"schedule": "shift", "block_mask": FULL}, ORDER, "'shift', which needs"),
        ("schedule.list_of_head", of_shared_lists(), ORDER, "share a mask"),
        ("q", [1.0], TYPE, "torch.Tensor.*list"),
        ("k", None, TYPE, "NoneType"),
        ("v", np.ones(3), TYPE, "ndarray"),
        ("q", zeros(S, H, D), SHAPE, r"4 dimensions \[B, Sq, Hq, D\].*3"),
        ("k", zeros(1, B, S, HKV, D), SHAPE, r"\[B, Sk, Hkv, D\].*5"),
        ("v", zeros(S, HKV, D), SHAPE, r"\[B, Sk, Hkv, Dv\].*3"),
        ("q", zeros(B, S, H, D, dtype=FP32), DTYPE, "float32"),
        ("k", zeros(B, S, HKV, D, dtype=FP16), DTYPE, "bfloat16.*float16"),
        ("v", zeros(B, S, HKV, D, dtype=FP16), DTYPE, "float16"),
        ("v", lambda: KV.to_sparse(), TYPE, "dense.*sparse"),
        ("v", zeros(B, S + 1, HKV, D), SHAPE, r"\[2, 300, 2\].*301"),
        ("v", zeros(B, S, HKV, 128), SHAPE, "size 64 for q of 64.*128"),
        ("v", of_dims(192, 192), SHAPE, "head size 128 for q of 192.*192"),
        ("k", of_dims(192, 128, 128), SHAPE, "head size 192 like q.*128"),
        ("k", of_batches(3), SHAPE, "batch 2.*3"),
        (".*", of_dims(80, 80), SHAPE, "96.*80"),
        ("k", of_heads(4, 3), SHAPE, "divides the 4.*3"),
        ("k", of_heads(4, 0), SHAPE, "divides.*0"),
        ("k", of_heads(0, 2), SHAPE, "divides the 0"),
        ("k", zeros(B, S, HKV, D, device="meta"), DEVICE, "cpu.*meta"),
        ("v", zeros(B, S, HKV, D, device="meta"), DEVICE, "cpu.*meta"),
        ("k", LONGEST, SHAPE, "below 1073741824"),
        ("scale", 0.0, VALUE, "above 0.*0.0"),
        ("scale", NAN, VALUE, "finite.*nan"),
        ("scale", torch.ones(()), TYPE, "tensor"),
        ("scale", True, TYPE, "number.*True"),
        ("scale", 1e300, VALUE, r"2\*\*40.*1e\+300"),
        ("scale", 1e-300, VALUE, r"2\*\*-40"),
        ("softcap", 1e-300, VALUE, r"0 \(none\), or.*1e-300"),
        ("softcap", None, TYPE, "None"),
        ("causal", 1, TYPE, "True or False.*1"),
        ("deterministic", 0, TYPE, "0"),
        ("return_lse", "yes", TYPE, "'yes'"),
        ("sinks", zeros(3), SHAPE, r"shape \[4\], a number for each query head"),
        ("sinks", zeros(1, 4), SHAPE, "each query head"),
        ("sinks", zeros(4, dtype=INT), DTYPE, "int32"),
        ("sinks", zeros(4, device="meta"), DEVICE, "meta"),
        ("sinks", [0.0, 1.0], TYPE, "list"),
    ],
    varlen: [
        ("cu_seqlens", ints(0, 30, 20, 60), VALUE, "from 0 to 60"),
        ("cu_seqlens", ints(1, 60), VALUE, "from 0 to 60"),
        ("cu_seqlens", ints(0, 59), VALUE, "tokens of q"),
        ("cu_seqlens", ints(0, 61), VALUE, "0, 61"),
        ("cu_seqlens", ints(0, 60).float(), DTYPE, "float32"),
        ("cu_seqlens", ints([0, 60]), SHAPE, r"\[N \+ 1\]"),
        ("cu_seqlens", ints(), SHAPE, "at least 1"),
        ("cu_seqlens", [0, 60], TYPE, "list"),
        ("q", Q, SHAPE, r"\[T, Hq, D\]"),
        ("k", KV[0, :59], SHAPE, "60 tokens"),
        ("v", KV[0, :60].half(), DTYPE, "float16"),
        ("k", "k", TYPE, "str"),
        ("causal", 1, TYPE, "1"),
        ("window_size", 5, TYPE, "left, right"),
        ("window_size", (5,), TYPE, "left, right"),
        ("window_size", (-1, None), VALUE, "from 0"),
        ("window_size", (True, None), TYPE, "whole numbers"),
        ("window_size", (1.5, None), TYPE, "whole numbers"),
        ("scale", 0.0, VALUE, "above 0"),
        ("sinks", zeros(3), SHAPE, r"shape \[4\]"),
    ],
    buffer: [
        ("kv_ranges", zeros(B, 1, S, 4, dtype=INT, device="meta"), DEVICE, "the CPU or cpu"),
        ("kv_ranges", zeros(B, 1, S - 1, 4, dtype=INT), SHAPE, r"\[2, 1, 300, 4\]"),
        ("sinks", zeros(3), SHAPE, r"shape \[4\]"),
    ],
    ranges: [
        ("packed", "False", TYPE, "True or False"),
        ("packed", {"packed": True, "device": "cuda"}, VALUE, "False for kv_ranges on cuda"),
        ("q_offset", 0.5, TYPE, "0.5"),
        ("q_offset", zeros(2, dtype=torch.int64), TYPE, "a tensor of one"),
        ("q_offset", 10**12, VALUE, "10{12}"),
        ("kv_offset", True, TYPE, "True"),
        # It would wrap to 0 in an int32.
        ("kv_offset", 2**32, VALUE, "4294967296"),
        ("kv_offset", -1, VALUE, "-1"),
        ("sizes", 3, TYPE, "3"),
        ("sizes", (3, 3), TYPE, "B, T, S"),
        (r"sizes\[1\]", {"sizes": (1, 2**31, 3)}, VALUE, "2147483648"),
        ("attention_mask", {"padding": HOLE, "sizes": (2, 3, 3)}, VALUE, "in sequence 1"),
    ],
    columns: [
        ("attention_mask", GAP, VALUE, "query 1 of sequence 0"),
        ("attention_mask", zeros(1, 2, 4, 4, dtype=torch.bool), SHAPE, "one mask for all heads"),
        ("attention_mask", zeros(1, 1, 4, 4), TYPE, "a bool tensor"),
    ],
    paged: [
        ("q", zeros(1, 5, 4, 64), SHAPE, r"3 dimensions \[T, Hq, D\]"),
        ("q", zeros(5, 4, 128), SHAPE, "head size 64"),
        ("q", zeros(5, 4, 64, dtype=FP32), DTYPE, "float32"),
        ("q", [1], TYPE, "a torch.Tensor"),
        ("q", zeros(5, 2 * 65, 64), SHAPE, "at most 64 query heads"),
        ("v_cache", {"k_cache": zeros(5, 16, 3, 64)}, SHAPE, "as k_cache has"),
        ("k_cache", zeros(5, 16, 64), SHAPE, r"\[pages, page_size, Hkv, D\]"),
        (".*", {"k_cache": zeros(5, 16, 2, 64, dtype=FP16)}, DTYPE, "float16"),
        ("k_cache", zeros(5, 16, 2, 128)[..., ::2], VALUE, "stride of 1"),
        (".*", {"k_cache": zeros(5, 16, 2, 64, device="meta")}, DEVICE, "meta"),
        ("v_cache", zeros(5, 16, 2, 96), SHAPE, "head size 64"),
        ("v_cache", zeros(4, 16, 2, 64), SHAPE, "as k_cache has"),
        ("block_table", TABLE.long(), DTYPE, "int32"),
        ("block_table", ints(0, 1), SHAPE, r"\[N, P\]"),
        ("block_table", ints([0, 1], [2, 4], [3, 3]).T, VALUE, "stride of 1"),
        ("block_table", ints([0, 5, 9], [2, 4, 3]), VALUE, "0 to 4 for sequence 0, got 5"),
        ("block_table", ints([0, 1, 9], [2, 4, -1]), VALUE, "sequence 1, got -1"),
        ("seqlens_k", {"block_table": ints([0, 1, 9])}, SHAPE, "1 numbers"),
        ("seqlens_k", ints(20, 49), VALUE, "to 48 .* for sequence 1, got 49"),
        ("seqlens_k", ints(2, 33), VALUE, "3 .* for sequence 0, got 2"),
        ("seqlens_k", ints(20, -1), VALUE, "got -1"),
        ("seqlens_k", ints(20, 33).float(), DTYPE, "int32"),
        ("cu_seqlens_q", ints(1, 3, 4), VALUE, "ascend from 0"),
        ("cu_seqlens_q", ints(0, 3, 2), VALUE, "ascend from 0"),
        ("cu_seqlens_q", ints(0, 3, 6), VALUE, "at most 5"),
        ("cu_seqlens_q", ints(0, 4), SHAPE, "3 numbers"),
        ("scale", 0.0, VALUE, "above 0"),
        ("causal", 1, TYPE, "True or False"),
        ("return_lse", None, TYPE, "True or False"),
        ("window_size", (-1, None), VALUE, "from 0"),
        ("layout", "NDH", VALUE, "NHD"),
        ("layout", ["NHD"], VALUE, "NHD"),
        ("sinks", zeros(3), SHAPE, r"shape \[4\]"),
        ("out", zeros(5, 4, 96), SHAPE, r"shape \[5, 4, 64\]"),
        ("out", zeros(5, 4, 64, dtype=FP32), DTYPE, "bfloat16"),
        ("out", zeros(4, 5, 64).transpose(0, 1), VALUE, "contiguous"),
        ("out", {"q": ROWS, "out": ROWS}, AliasError, ""),
        ("out", lambda: torch._neg_view(zeros(5, 4, 64)), VALUE, "a negated view"),
        (".*page size of k_cache.*", caches(5, 48, 2, 64), SHAPE, "48"),
        (".*page size of k_cache.*HND.*", {"layout": "HND"}, SHAPE, "2"),
        (".*head size of k_cache.*", caches(5, 16, 2, 80), SHAPE, "80"),
        (".*", caches(5, 16, 3, 64), SHAPE, "divides the 4 query heads"),
        (".*", caches(5, 16, 0, 64), SHAPE, "divides the 4 query heads"),
        # Calls with a size of zero, and what their lists say all the same.
        ("seqlens_k", {"block_table": ints([], [])}, VALUE, "to 0 .* for sequence 0, got 20"),
        ("block_table", {"k_cache": NONE, "v_cache": NONE}, VALUE, "no page .* got 0"),
        ("cu_seqlens_q", EMPTY, VALUE, "ascend from 0"),
        ("cu_seqlens_q", EMPTY | {"out": OUT}, VALUE, "ascend from 0"),
        ("cu_seqlens_q", {"q": zeros(0, 4, 64)}, VALUE, "at most 0, the tokens of q"),
    ],
    write: [
        ("slot_mapping", ints(4, 80, 1), VALUE, "below 80.* got 80"),
        ("slot_mapping", ints(4, 1, 4), VALUE, "at most once, got 4"),
        ("slot_mapping", ints(4, 1), SHAPE, "3 numbers"),
        ("slot_mapping", ints(4, 1, 2).float(), DTYPE, "int64"),
        ("slot_mapping", [1, 2, 3], TYPE, "a torch.Tensor"),
        ("slot_mapping", {"k_cache": NONE, "v_cache": NONE}, VALUE, "below 0"),
        ("key", zeros(3, 3, 64), SHAPE, r"shape \[3, 2, 64\]"),
        ("key", zeros(3, 2, 64, dtype=FP32), DTYPE, "bfloat16"),
        ("value", zeros(4, 2, 64), SHAPE, r"shape \[3, 2, 64\]"),
        ("value", zeros(2, 64), SHAPE, r"\[T, Hkv, Dv\]"),
        ("v_cache", zeros(5, 32, 2, 64), SHAPE, "as k_cache has"),
        ("layout", "nhd", VALUE, "NHD"),
        ("k_cache", zeros(1, 16, 2, 64).expand(5, -1, -1, -1), AliasError, "distinct"),
        ("v_cache", zeros(5, 16, 1, 64).expand(-1, -1, 2, -1), AliasError, "distinct"),
        ("k_cache", lambda: torch._neg_view(zeros(5, 16, 2, 64)), VALUE, "a negated view"),
        ("v_cache", lambda: torch._neg_view(zeros(5, 16, 2, 64)), VALUE, "a negated view"),
        ("key", {"key": CACHE[0, :3], "k_cache": CACHE}, AliasError, ""),
        # One cache given twice, V as the first columns of K, and pages that overlap.
        ("v_cache", {"k_cache": CACHE, "v_cache": CACHE}, AliasError, "k_cache"),
        ("v_cache", IN_K, AliasError, "k_cache"),
        ("v_cache", {"k_cache": LATER[:5], "v_cache": LATER[1:]}, AliasError, "k_cache"),
    ],
}


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """Whatever reaches a launcher came too far."""

    def launched(*args):
        raise AssertionError("launched")

    monkeypatch.setattr(cpu, "_attend", launched)
    monkeypatch.setattr(cpu, "_blocked", launched)


@pytest.mark.parametrize(
    ("call", "name", "value", "error", "words"),
    [(call, *row) for call, rows in BAD.items() for row in rows],
    ids=lambda value: getattr(value, "__name__", str(value)[:24]),
)
def test_bad_input(call, name, value, error, words):
    change = value if isinstance(value, dict) else {name.split(" ")[0].rstrip("\\"): value}
    change = {key: v() if isinstance(v, FunctionType) else v for key, v in change.items()}
    with pytest.raises(error, match=rf"^{name}: .*{words}") as caught:
        call(**change)
    assert isinstance(caught.value, errors.CuteKernelsError)


def test_good_input_is_launched():
    """The control: what the table varies is right before it is varied."""
    full = kinds.permutation(FULL, order=range(COLUMNS), heads=B * HKV)
    changes = ({}, {"schedule": good()}, {"schedule": full, "block_mask": FULL})
    calls = [*((attend, change) for change in changes), (attend, {"schedule": [2, 0, 1]})]
    for call, change in (*calls, (varlen, {}), (paged, {})):
        with pytest.raises(AssertionError, match="launched"):
            call(**change)
    assert write() is None and not buffer().any() and ranges().shape == (1, 1, 3, 4)


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu"])
def test_devices_without_a_backend_are_refused(device):
    with pytest.raises(BackendUnavailable, match=f"no backend for {device}") as caught:
        checking.supported("block_sparse_attention", torch.device(device))
    assert "cute_sm90" in str(caught.value) and "triton" in str(caught.value)


def test_fp32_is_refused_by_its_own_name_unless_autocast_casts_it():
    wide = {"q": Q.float(), "k": KV.float(), "v": KV.float()}
    with torch.autocast("cpu", BF16), pytest.raises(AssertionError, match="launched"):
        attend(**wide)
    with torch.autocast("cpu", BF16), pytest.raises(DtypeError, match="float64"):
        attend(**wide | {"q": Q.double()})


def test_which_backward_stacks_the_heads_of_a_group(monkeypatch):
    """Where SM90 is the device's backend: (heads of the mask, rows, heads of q, of k)."""
    assert not checks.packs_gqa("cuda:0", 4, 100, 4, 2)  # no SM90 here
    monkeypatch.setattr(arch, "_installed", lambda name: True)
    monkeypatch.setattr(arch, "describe", lambda _: arch.Device("cuda:0", "cuda", "sm_90a", 132))
    sizes = ((4, 100, 4, 2), (4, 100, 4, 4), (1, 100, 4, 2))
    assert [checks.packs_gqa("cuda:0", *s) for s in sizes] == [True, False, False]
    with pytest.raises(ShapeError, match=r"q: .*below 536870912.*by query head.*536870900"):
        checks.packs_gqa("cuda:0", 4, 2**29 - 12, 4, 2)
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "triton")
    assert not checks.packs_gqa("cuda:0", 4, 100, 4, 2)


def test_a_gradient_is_checked_before_anything_runs(monkeypatch):
    """The op asks, and only if a gradient is wanted."""
    recorded = []

    def refuse(*sizes):
        recorded.append(sizes)
        raise ShapeError("refused")

    monkeypatch.setattr(checks, "packs_gqa", refuse)
    mask = BlockMask.from_dense(torch.ones(1, H, S, S, dtype=torch.bool).tril())
    leaf = Q.clone().requires_grad_()
    with pytest.raises(ShapeError, match="refused"):
        attend(q=leaf, block_mask=mask)
    assert recorded == [("cpu", H, S, H, HKV)]
    with torch.no_grad(), pytest.raises(AssertionError, match="launched"):
        attend(q=leaf, block_mask=mask)


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
            paged_checks._distinct(first, second)
        except AliasError:
            assert shared, seed
        else:
            assert not shared, seed
    assert min(counts) > 50
