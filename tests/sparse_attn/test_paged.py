"""``ck.paged_attention`` and ``ck.write_kv_cache`` on the CPU: rows of any batch are dense rows."""

from __future__ import annotations

import dataclasses
import random
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import cute_kernels as ck
from cute_kernels import errors
from cute_kernels.runtime import plan_cache
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import config
from cute_kernels.sparse_attn import cpu as dense_cpu
from cute_kernels.sparse_attn.paged import checks, cpu, launch
from tests.contract import same_bytes
from tests.sparse_attn import paged_batches
from tests.sparse_attn.paged_cases import SLOTS, Batch, drawn, written
from tests.sparse_attn.paged_server import Server, tokens

HEADS = (4, 2, 64)
MIXED = [(1, 131), (40, 40), (3, 260), (0, 77), (1, 1), (20, 150), (1, 385)]
OPS = torch.ops.cute_kernels
CACHES = "k_cache", "v_cache"


def call(batch: Batch, **options):
    """(out, lse) of the public op."""
    return ck.paged_attention(*batch.operands()[:6], **batch.options() | options)


def dense(batch: Batch, n: int):
    """(out [rows, Hq, Dv], lse [Hq, rows]) of a sequence in one dense call; its mask as bits."""
    q, keys, values = batch.q[batch.queries(n)], batch.keys[n], batch.values[n]
    distance = torch.arange(len(keys)) - torch.arange(len(keys) - len(q), len(keys))[:, None]
    left, right = batch.window
    allowed = torch.ones_like(distance, dtype=torch.bool)
    allowed &= True if left is None else distance >= -left
    allowed &= True if right is None else distance <= right
    out, lse = ck.block_sparse_attention(
        *(q[None], keys[None], values[None], BlockMask.from_dense(allowed[None, None])),
        scale=batch.scale,
        softcap=batch.softcap,
        sinks=batch.sinks,
        return_lse=True,
    )
    return out[0], lse[0]


def wrong_rows(batch: Batch, out, lse) -> list[int]:
    """Sequences whose rows are not those of the dense call; -1: tokens of no sequence."""
    end = int(batch.cu_seqlens_q[-1])
    empty = bool((out[end:] == 0).all() and (lse[:, end:] == -float("inf")).all())
    wrong = [] if empty else [-1]
    for n in range(len(batch.seqlens_k)):
        rows = batch.queries(n)
        if rows.start < rows.stop:
            want, want_lse = dense(batch, n)
            same = same_bytes(out[rows], want) and same_bytes(lse[:, rows].contiguous(), want_lse)
            wrong += [] if same else [n]
    return wrong


# ---- rows of mixed batches -----------------------------------------------------------------------


@pytest.mark.parametrize("width", config.HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_head_sizes(width, dtype):
    batch = drawn([(1, 200), (5, 130)], (4, 2, width), 16, seed=width, dtype=dtype)
    assert wrong_rows(batch, *call(batch)) == []


@pytest.mark.parametrize("page", config.PAGE_SIZES)
def test_mixed(page):
    batch = drawn(MIXED, HEADS, page, seed=page, padding=7)
    assert wrong_rows(batch, *call(batch)) == []


OPTIONS = [
    ({"window": (100, 0)}, 1),
    ({"window": (70, 0), "softcap": 20.0}, 3),
    ({"with_sinks": True, "dtype": "fp16"}, 16),
    ({"window": (40, None), "with_sinks": True}, 7),
    ({"window": (5, 9)}, 5),
    ({"window": (None, None)}, 2),
]


@pytest.mark.parametrize(("options", "group"), OPTIONS)
def test_options(options, group):
    batch = drawn(MIXED[:3], (group, 1, 64), 32, seed=group, padding=2, **options)
    batch = dataclasses.replace(batch, softcap=options.get("softcap", 0.0))
    assert wrong_rows(batch, *call(batch)) == []


def drawn_by(seed: int) -> tuple[Batch, Batch]:
    """A batch, and its sequences in another order, on other pages."""
    source = random.Random(seed)
    lengths = []
    for _ in range(source.randint(1, 6)):
        keys = source.randint(1, 400)
        rows = source.choice((1, source.randint(1, 6), source.randint(1, 80), keys))
        lengths.append((min(rows, keys, 150), keys))
    options = {
        "dtype": source.choice(("bf16", "fp16")),
        "window": source.choice(((None, 0), (source.randint(0, 200), 0), (None, None), (30, 9))),
        "softcap": source.choice((0.0, 0.0, 15.0)),
        "with_sinks": source.random() < 0.3,
        "padding": source.randint(0, 4),
    }
    group, kv_heads = source.choice(((1, 2), (2, 1), (4, 1), (8, 1)))
    heads, page = (group * kv_heads, kv_heads, 64), source.choice(config.PAGE_SIZES)
    other = lengths[::-1]
    one = drawn(lengths, heads, page, seed=seed, **options)
    return one, drawn(other, heads, source.choice(config.PAGE_SIZES), seed=seed + 1, **options)


#: Windows: what no query sees is NaN, and on page -1.
UNSEEN = [
    paged_batches.Case(2, window=(40, 0), heads=(3, 1), page=32, layout="HND", rest=3, sinks=True),
    paged_batches.Case(3, window=(70, 5), heads=(2, 2), page=128, softcap=2.0),
    paged_batches.Case(4, window=(0, 0), dim=192),
]


@pytest.mark.parametrize("case", UNSEEN)
def test_unseen_keys_are_not_read(case):
    """As on a GPU: neither what is left of a window nor its entries of the block table."""
    paged_batches.check(cpu.paged_attention, dense_cpu.forward, case)


def test_an_unseen_key_that_is_read_is_found(monkeypatch):
    monkeypatch.setattr(cpu, "_gathered", _reads_all(cpu._gathered))
    for case in UNSEEN:
        with pytest.raises(AssertionError):
            paged_batches.check(cpu.paged_attention, dense_cpu.forward, case)


def _reads_all(true):
    """`_gathered` that takes the whole of the first page."""

    def gathered(cache, pages, length, first):
        skipped = first // cache.shape[1] * cache.shape[1]
        return true(cache, pages, length, skipped)

    return gathered


NIGHT = [pytest.param(40 * i, 40, marks=pytest.mark.nightly) for i in range(1, 13)]


@pytest.mark.parametrize(("first", "count"), [(0, 40), *NIGHT])
def test_drawn(first, count):
    """520 by night: dense rows, and the same bytes in the other batch."""
    for seed in range(first, first + count):
        batch, other = drawn_by(seed)
        (out, lse), (other_out, other_lse) = call(batch), call(other)
        assert wrong_rows(batch, out, lse) == [], seed
        last = len(batch.seqlens_k) - 1
        for n in range(last + 1):
            rows, others = batch.queries(n), other.queries(last - n)
            assert same_bytes(out[rows], other_out[others]), seed
            assert same_bytes(lse[:, rows].contiguous(), other_lse[:, others].contiguous()), seed


def test_layouts_and_strides():
    """Head-major pages, views of one buffer of keys and values, and of wider ones."""
    batch = drawn(MIXED[:3], HEADS, 16, seed=4)
    want = call(batch)
    caches = batch.k_cache, batch.v_cache
    both = torch.stack(caches, dim=1)
    wider = [torch.cat([t, t], dim=2)[:, :, : t.shape[2]] for t in caches]
    for k_cache, v_cache in (both.unbind(1), wider):
        assert not k_cache.is_contiguous()
        got = call(dataclasses.replace(batch, k_cache=k_cache, v_cache=v_cache))
        assert all(map(same_bytes, got, want))
    k_cache, v_cache = (t.transpose(1, 2).contiguous() for t in caches)
    got = call(dataclasses.replace(batch, k_cache=k_cache, v_cache=v_cache), layout="HND")
    assert all(map(same_bytes, got, want))
    q = torch.cat([batch.q, batch.q], dim=1)[:, : HEADS[0]]
    assert all(map(same_bytes, call(dataclasses.replace(batch, q=q)), want))


def test_tables_of_one_page():
    """Contiguous, whatever the stride of a dimension of size 1 is; kernels want 1."""
    batch = drawn([(1, 10), (3, 14)], HEADS, 16, seed=2)
    table, lengths = batch.block_table[:, :1].T.contiguous().T, batch.seqlens_k.repeat(2)[:3:2]
    assert table.is_contiguous() and table.stride(-1) != 1
    got = dataclasses.replace(batch, block_table=table)
    assert wrong_rows(got, *call(got)) == []
    for t in (table, lengths[:1]):
        rows = launch.unit_rows(t)
        assert rows.stride(-1) == 1 and rows.tolist() == t.tolist()
        assert rows.data_ptr() == t.data_ptr()


def test_launchers_take_rows_of_stride_1(monkeypatch):
    batch = drawn([(1, 10)], HEADS, 16)
    taken = []
    monkeypatch.setattr(launch, "most_ctas", lambda device: 132)
    monkeypatch.setattr(launch, "bind", lambda device, kernel: lambda *args: taken.append(args))
    monkeypatch.setattr(launch, "kernel", lambda chosen: None)
    lists = (
        batch.block_table[:, :1].as_strided((1, 1), (2, 2)),
        batch.seqlens_k.as_strided((1,), (2,)),
    )
    operands = *batch.operands()[:3], *lists, *batch.operands()[5:], None
    for planner in (launch.plan_chain, launch.plan_long):
        planner(*operands).run(*operands)
    assert len(taken) == 3
    for args in taken:
        numbers = [t for t in args if isinstance(t, torch.Tensor) and t.dtype == torch.int32]
        assert len(numbers) == 3 and all(t.stride(-1) == 1 for t in numbers)


def test_sizes_of_zero():
    batch = drawn([(1, 20), (0, 0)], HEADS, 16, padding=3)
    assert wrong_rows(batch, *call(batch)) == []
    empty = torch.zeros(0, 4, dtype=torch.int32)
    none = dataclasses.replace(
        *(batch,),
        block_table=empty,
        seqlens_k=empty[:, 0],
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
    )
    out, lse = call(none)
    assert (out == 0).all() and (lse == -float("inf")).all() and out.shape[0] == 4
    into = torch.full_like(out, 3.0)
    assert call(none, out=into)[0] is into and same_bytes(into, out)
    out, lse = call(dataclasses.replace(none, q=batch.q[:0]))
    assert out.shape == (0, 4, 64) and lse.shape == (4, 0)


def test_out():
    batch = drawn(MIXED[:3], HEADS, 16, seed=4, padding=2)
    want, want_lse = call(batch)
    out = torch.full_like(want, torch.nan)
    got, lse = call(batch, out=out)
    assert got is out and same_bytes(out, want) and same_bytes(lse, want_lse)
    assert call(batch, out=out, return_lse=False) is out
    # At an address that kernels cannot store vectors to.
    out = torch.full((want.numel() + 1,), torch.nan, dtype=want.dtype)[1:].view_as(want)
    assert out.data_ptr() % 16 and same_bytes(call(batch, out=out)[0], want)
    assert same_bytes(call(batch, return_lse=False), want)


def test_autocast_casts_queries_alone():
    batch = drawn([(3, 20)], HEADS, 16)
    wide = dataclasses.replace(batch, q=batch.q.float())
    half = drawn([(3, 20)], HEADS, 16, dtype="fp16")
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(same_bytes, call(wide), call(batch)))
        with pytest.raises(errors.DtypeError, match=r"^k_cache: expected torch\.bfloat16"):
            call(dataclasses.replace(half, q=wide.q))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cached_calls(monkeypatch, layout):
    """As on a GPU: later calls skip the checks, and read the numbers of their own lists."""
    monkeypatch.setattr(plan_cache, "on_gpu", lambda t: True)
    plan_cache.clear()
    checked = mock.Mock(wraps=checks.caches)
    monkeypatch.setattr(checks, "caches", checked)
    seen = []
    for lengths in ([(1, 60), (3, 50)], [(2, 33), (2, 64)], [(4, 49), (0, 50)]):
        batch = drawn(lengths, HEADS, 64, seed=len(seen))
        if layout == "HND":
            caches = (t.transpose(1, 2).contiguous() for t in (batch.k_cache, batch.v_cache))
            in_layout = dataclasses.replace(batch, **dict(zip(CACHES, caches, strict=True)))
        else:
            in_layout = batch
        assert wrong_rows(batch, *call(in_layout, layout=layout)) == []
        seen.append(checked.call_count)
    assert seen == [1, 1, 1]
    with pytest.raises(errors.ArgumentTypeError, match=r"^causal: "):
        call(in_layout, layout=layout, causal=1)
    plan_cache.clear()


# ---- torch ---------------------------------------------------------------------------------------


def op_args(batch: Batch) -> tuple:
    return (
        *batch.operands()[:3],
        *batch.operands()[3:6],
        batch.scale,
        *batch.window,
        batch.softcap,
        batch.sinks,
        "NHD",
    )


def test_opcheck():
    batch = drawn([(1, 20), (5, 9)], HEADS, 16, with_sinks=True, poison=0.0)
    out = torch.zeros_like(batch.q)
    key, value = batch.keys[0][:3], batch.values[0][:3]
    slots = torch.tensor([3, -1, 17])
    for op, args in (
        (OPS.paged_attention, op_args(batch)),
        (OPS.paged_attention_out, (out, *op_args(batch))),
        (OPS.write_kv_cache, (key, value, batch.k_cache, batch.v_cache, slots)),
    ):
        assert set(opcheck(op.default, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_graph(layout):
    """A decoding step that writes its keys and attends into ``out``: eager's bytes, one graph."""
    torch._dynamo.reset()
    count = 0

    def counting(graph, example):
        nonlocal count
        count += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    def step(q, key, value, k_cache, v_cache, slots, table, lengths, starts, out):
        ck.write_kv_cache(key, value, k_cache, v_cache, slots, layout=layout)
        ck.paged_attention(q, k_cache, v_cache, table, lengths, starts, layout=layout, out=out)
        return ck.paged_attention(
            q, k_cache, v_cache, table, lengths, starts, window_size=(9, None), layout=layout
        )

    run = torch.compile(step, fullgraph=True, dynamic=True, backend=counting)
    # Sizes that are equal in the first call would be one symbol.
    first = [(1, 20), (3, 50), (2, 100), (1, 3), (2, 8)]
    for lengths in (first, [(3, 41), (1, 5), (1, 17)]):
        batch = drawn(lengths, HEADS, 16, poison=0.0)
        positions = [batch.block_table[n, keys // 16] * 16 for n, (_, keys) in enumerate(lengths)]
        _, key, value = tokens(len(lengths), seed=len(lengths))
        results = []
        for function in (step, run):
            caches = [t.clone() for t in (batch.k_cache, batch.v_cache)]
            if layout == "HND":
                caches = [t.transpose(1, 2).contiguous() for t in caches]
            out = torch.zeros_like(batch.q)
            lists = torch.stack(positions), *batch.operands()[3:6]
            last = function(batch.q, key, value, *caches, *lists, out)
            results.append((last, out, *caches))
        assert all(map(same_bytes, *results))
        assert results[0][1].abs().sum() > 0
    assert count <= 2


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "sinks", "out"])
def test_there_is_no_gradient(name):
    batch = drawn([(1, 20)], HEADS, 16, with_sinks=True, poison=0.0)
    options = {"out": torch.zeros_like(batch.q)} if name == "out" else {}
    tensor = options[name] if name == "out" else getattr(batch, name)
    tensor.requires_grad_()
    with pytest.raises(errors.UnsupportedTransformError, match="no gradient of it is available"):
        call(batch, **options)
    with torch.no_grad():
        call(batch, **options)


def test_no_gradient_of_a_write():
    key, value = tokens(2)[1:]
    with pytest.raises(errors.UnsupportedTransformError, match="write_kv_cache"):
        ck.write_kv_cache(key.requires_grad_(), value, *Server(16).caches, torch.tensor([0, 1]))


@pytest.mark.parametrize("name", ["q", "k_cache", "sinks", "out", "key"])
def test_there_is_no_tangent(name):
    """Forward mode would see a constant."""
    batch = drawn([(1, 20)], HEADS, 16, with_sinks=True, poison=0.0)
    q, key = batch.q, batch.keys[0][:1]
    with forward_ad.dual_level():
        options = {}
        if name == "out":
            options["out"] = forward_ad.make_dual(torch.zeros_like(q), q)
        elif name != "key":
            t = getattr(batch, name)
            batch = dataclasses.replace(batch, **{name: forward_ad.make_dual(t, t.clone())})
        with pytest.raises(errors.UnsupportedTransformError, match="forward-mode"):
            if name == "key":
                dual = forward_ad.make_dual(key, key.clone())
                slots = torch.tensor([0])
                ck.write_kv_cache(dual, key, batch.k_cache, batch.v_cache, slots)
            call(batch, **options)


def traced(q, key, k_cache, v_cache, slots, table, lengths, starts):
    """Both ops with all that they write."""
    ck.write_kv_cache(key, key.clone(), k_cache, v_cache, slots)
    out = torch.zeros_like(q)
    return ck.paged_attention(q, k_cache, v_cache, table, lengths, starts, out=out)


def test_tensors_without_memory():
    """Fake tensors share no memory, and a graph of fake tensors has the bytes of the calls."""
    batch = drawn([(1, 20), (2, 9)], HEADS, 16, poison=0.0)
    slots = torch.tensor([3, -1, 17])
    args = batch.q, tokens(3)[1], *batch.operands()[1:3], slots, *batch.operands()[3:6]
    with FakeTensorMode() as mode:
        assert traced(*map(mode.from_tensor, args)).shape == batch.q.shape
    graph = make_fx(traced, tracing_mode="fake")(*args)
    want, got = (f(*(t.clone() for t in args)) for f in (traced, graph))
    assert same_bytes(got, want)
    with pytest.raises(errors.UnsupportedTransformError, match="vmap"):
        torch.func.vmap(traced)(*(torch.stack([t, t]) for t in args))


# ---- writes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("slots", SLOTS)
def test_writes(slots, dtype):
    """Rows are copied, NaN and -0 with their bits, and no other slot changes."""
    operands, both, want = written(slots, dtype)
    cpu.write_kv_cache(*operands)
    assert same_bytes(both, want)


# ---- mutants -------------------------------------------------------------------------------------


def _page_of_another_sequence(patch):
    true = checks.values

    def values(*args):
        pages, keys, starts = true(*args)
        return [(pages[0] + row[len(pages[0]) :]) for row in pages], keys, starts

    patch.setattr(checks, "values", values)


def _tail_is_read(patch):
    true = checks.values

    def values(table, seqlens, starts, count, pages, left):
        rows, keys, starts = true(table, seqlens, starts, count, pages, left)
        return rows, [-(-n // pages[1]) * pages[1] for n in keys], starts

    patch.setattr(checks, "values", values)


def _window_edge(patch):
    true = cpu._mask
    patch.setattr(
        cpu, "_mask", lambda rows, keys, window: true(rows, keys, (window[0] + 1, window[1]))
    )


def _queries_are_the_first_tokens(patch):
    true = cpu._mask

    def mask(rows, keys, window):
        shift = keys - rows
        return true(rows, keys, (window[0] + shift, window[1] - shift))

    patch.setattr(cpu, "_mask", mask)


def _pages_sorted(patch):
    true = cpu._gathered
    patch.setattr(cpu, "_gathered", lambda cache, pages, *n: true(cache, sorted(pages), *n))


MUTANTS = [
    _page_of_another_sequence, _tail_is_read, _window_edge, _queries_are_the_first_tokens,
    _pages_sorted,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_killed(mutant, monkeypatch):
    batch = drawn([(1, 250), (2, 300)], HEADS, 16, seed=9, window=(150, 0))
    assert wrong_rows(batch, *call(batch)) == []
    mutant(monkeypatch)
    assert wrong_rows(batch, *call(batch))
