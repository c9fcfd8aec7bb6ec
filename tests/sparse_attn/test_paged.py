"""``ck.paged_attention`` and ``ck.write_kv_cache`` on the CPU: rows of any batch are dense rows."""

from __future__ import annotations

import itertools
import random
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import cute_kernels as ck
from cute_kernels import errors
from cute_kernels.runtime import plan_cache
from cute_kernels.sparse_attn import config
from cute_kernels.sparse_attn import cpu as dense_cpu
from cute_kernels.sparse_attn.paged import checks, cpu, launch
from tests.contract import same_bytes
from tests.sparse_attn import paged_cases
from tests.sparse_attn.paged_cases import MIXED, Batch, Engine, draw, drawn, wrong_rows

HEADS = (4, 2, 64)
ENGINE = Engine(cpu.paged_attention, dense_cpu.forward, cpu.write_kv_cache, skips=False)


def wrong(batch: Batch, **options) -> list[int]:
    """Sequences whose rows of the public op are not those of a dense forward."""
    return wrong_rows(batch, *batch.call(**options), dense_cpu.forward)


def decoded(**options) -> Batch:
    """A batch of one token behind others."""
    return drawn([(1, 20)], HEADS, 16, with_sinks=True, poison=0.0, **options)


# ---- rows of mixed batches -----------------------------------------------------------------------


@pytest.mark.parametrize("check", paged_cases.CHECKS, ids=lambda check: check.__name__)
def test_bytes(check):
    check(ENGINE)


NIGHT = [pytest.param(20 * i, marks=pytest.mark.nightly) for i in range(1, 26)]


@pytest.mark.parametrize("first", [0, *NIGHT])
def test_drawn(first):
    """520 by night: dense rows, and the same bytes in another order, on other pages."""
    for seed in range(first, first + 20):
        arguments = draw(seed)
        turned = {"lengths": arguments["lengths"][::-1], "page": config.PAGE_SIZES[seed % 5]}
        batch, other = drawn(**arguments), drawn(**arguments | turned | {"seed": seed + 1})
        (out, lse), (other_out, other_lse) = batch.call(), other.call()
        assert wrong_rows(batch, out, lse, dense_cpu.forward) == [], seed
        last = len(batch.seqlens_k) - 1
        for n in range(last + 1):
            rows, others = batch.queries(n), other.queries(last - n)
            assert same_bytes(out[rows], other_out[others]), seed
            assert same_bytes(lse[:, rows].contiguous(), other_lse[:, others].contiguous()), seed


def test_the_draw_covers_what_it_claims():
    """Of two tests; by day there is one."""
    batches = [draw(seed) for seed in range(40)]
    assert {b["heads"][2] for b in batches} == set(config.HEAD_DIMS)
    assert {b["page"] for b in batches} == set(config.PAGE_SIZES)
    assert {b["heads"][0] // b["heads"][1] for b in batches} == {1, 3, 4, 5, 16}
    for name in ("layout", "dtype", "with_sinks", "softcap", "padding"):
        assert len({b[name] for b in batches}) == 2, name
    windows = {(b["window"][0] is None, b["window"][1] == 0) for b in batches}
    assert windows == {(True, True), (False, True), (False, False), (True, False)}
    rows = [pair for b in batches for pair in b["lengths"]]
    assert any(n == 1 < keys for n, keys in rows) and any(1 < n == keys for n, keys in rows)
    assert any(1 < n < keys for n, keys in rows)


def test_tables_of_one_page():
    """Contiguous, whatever the stride of a dimension of size 1 is; kernels want 1."""
    batch = drawn([(1, 10), (3, 14)], HEADS, 16, seed=2)
    table, lengths = batch.block_table[:, :1].T.contiguous().T, batch.seqlens_k.repeat(2)[:3:2]
    assert table.is_contiguous() and table.stride(-1) != 1
    assert wrong(batch.changed(block_table=table)) == []
    for t in (table, lengths[:1]):
        rows = launch.unit_rows(t)
        assert rows.stride(-1) == 1 and rows.tolist() == t.tolist()
        assert rows.data_ptr() == t.data_ptr()


def test_launchers_take_rows_of_stride_1(monkeypatch):
    batch, taken = drawn([(1, 10)], HEADS, 16), []
    monkeypatch.setattr(launch, "most_ctas", lambda device: 132)
    monkeypatch.setattr(launch, "bind", lambda device, kernel: lambda *args: taken.append(args))
    monkeypatch.setattr(launch, "kernel", lambda chosen: None)
    table = batch.block_table[:, :1].as_strided((1, 1), (2, 2))
    batch = batch.changed(block_table=table, seqlens_k=batch.seqlens_k.as_strided((1,), (2,)))
    for planner in (launch.plan_chain, launch.plan_long):
        planner(*batch.operands(), None).run(*batch.operands(), None)
    assert len(taken) == 3
    for args in taken:
        numbers = [t for t in args if isinstance(t, torch.Tensor) and t.dtype == torch.int32]
        assert len(numbers) == 3 and all(t.stride(-1) == 1 for t in numbers)


def test_sizes_of_zero():
    batch = drawn([(1, 20), (0, 0)], HEADS, 16, padding=3)
    assert wrong(batch) == []
    empty = torch.zeros(0, 4, dtype=torch.int32)
    starts = torch.zeros(1, dtype=torch.int32)
    none = batch.changed(block_table=empty, seqlens_k=empty[:, 0], cu_seqlens_q=starts)
    out, lse = none.call()
    assert (out == 0).all() and (lse == -float("inf")).all() and out.shape[0] == 4
    into = torch.full_like(out, 3.0)
    assert none.call(out=into)[0] is into and same_bytes(into, out)
    out, lse = none.changed(q=batch.q[:0]).call()
    assert out.shape == (0, 4, 64) and lse.shape == (4, 0)


def test_out():
    batch = drawn(MIXED[:3], HEADS, 16, seed=4, padding=2)
    want, want_lse = batch.call()
    # The second at an address that kernels cannot store vectors to.
    odd = torch.full((want.numel() + 1,), torch.nan, dtype=want.dtype)[1:].view_as(want)
    for out in (torch.full_like(want, torch.nan), odd):
        got, lse = batch.call(out=out)
        assert got is out and same_bytes(out, want) and same_bytes(lse, want_lse)
    assert odd.data_ptr() % 16 and batch.call(out=out, return_lse=False) is out


def test_autocast_casts_queries_alone():
    batch, half = decoded(), decoded(dtype="fp16")
    wide = batch.changed(q=batch.q.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(same_bytes, wide.call(), batch.call()))
        with pytest.raises(errors.DtypeError, match=r"^k_cache: expected torch\.bfloat16"):
            half.changed(q=wide.q).call()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cached_calls(monkeypatch, layout):
    """As on a GPU: later calls skip the checks, and read the numbers of their own lists."""
    monkeypatch.setattr(plan_cache, "on_gpu", lambda t: True)
    plan_cache.clear()
    checked = mock.Mock(wraps=checks.caches)
    monkeypatch.setattr(checks, "caches", checked)
    for seed, lengths in enumerate(([(1, 60), (3, 50)], [(2, 33), (2, 64)], [(4, 49), (0, 50)])):
        batch = drawn(lengths, HEADS, 64, seed=seed, layout=layout)
        assert wrong(batch) == [] and checked.call_count == 1
    with pytest.raises(errors.ArgumentTypeError, match=r"^causal: "):
        batch.call(causal=1)
    plan_cache.clear()


# ---- a server ------------------------------------------------------------------------------------


class Server:
    """Caches that sequences are written to, on pages in random order."""

    def __init__(self, page: int, layout: str):
        shape = (64, page, 2, 64) if layout == "NHD" else (64, 2, page, 64)
        self.caches = [torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in "kv"]
        self.page, self.layout = page, layout
        self.free = random.Random(page).sample(range(64), 64)

    def pages(self, keys: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-keys // self.page))]

    def write(self, pages: list[int], first: int, key, value) -> None:
        """Positions from ``first`` on."""
        positions = torch.arange(first, first + len(key))
        slots = torch.tensor(pages)[positions // self.page] * self.page + positions % self.page
        ck.write_kv_cache(key, value, *self.caches, slots, layout=self.layout)

    def attend(self, *sequences, **options):
        """Outputs of (q, pages, keys) each, one call."""
        most = max(len(pages) for _, pages, _ in sequences)
        rows = [pages + [0] * (most - len(pages)) for _, pages, _ in sequences]
        starts = [0, *itertools.accumulate(len(q) for q, _, _ in sequences)]
        lists = (torch.tensor(t).int() for t in (rows, [n for *_, n in sequences], starts))
        q = torch.cat([q for q, _, _ in sequences])
        out = ck.paged_attention(q, *self.caches, *lists, layout=self.layout, **options)
        return out.split([len(q) for q, _, _ in sequences])


class Sequence:
    """A prompt on its way through a server, and the rows that it has so far."""

    def __init__(self, server: Server, count: int, seed: int, first: Sequence | None, shared: int):
        """shared: tokens of ``first`` that it begins with, whole pages of them."""
        g = torch.Generator().manual_seed(seed)
        prompt = [torch.randn(count, heads, 64, generator=g).bfloat16() for heads in (4, 2, 2)]
        self.q, self.k, self.v = prompt
        self.done, self.parts, self.shared = shared, [], shared
        hit = first.pages[: shared // server.page] if shared else []
        self.pages = hit + server.pages(count - shared)
        for mine, theirs in zip(prompt[1:], (first.k, first.v) if shared else (), strict=False):
            mine[:shared] = theirs[:shared]

    def step(self, server: Server, count: int) -> tuple[torch.Tensor, list[int], int]:
        """Write the next tokens; what `Server.attend` takes of them."""
        part = slice(self.done, self.done + count)
        server.write(self.pages, self.done, self.k[part], self.v[part])
        self.done += count
        return self.q[part], self.pages, self.done


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 60))]
RULES = [{}, {"window_size": (50, 0)}, {"softcap": 20.0}, {"sinks": torch.linspace(-1, 1.5, 4)}]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_schedule_of_chunks(seed):
    """Prompts in drawn chunks, beside each other or not, on cold prefixes and on warm ones.

    Steps take some of the sequences and a few or many tokens of each: decoding, speculative rows
    and chunks of prefill.  Each row has its bytes of one pass over the prompt alone.
    """
    draw, options = random.Random(seed), RULES[seed % len(RULES)]
    server = Server(draw.choice((16, 32, 64)), draw.choice(("NHD", "HND")))
    sequences = [Sequence(server, draw.randint(140, 200), seed, None, 0)]
    later = draw.randint(1, 2)
    while later or any(s.done < len(s.q) for s in sequences):
        first = sequences[0]
        if later and (first.done == len(first.q) or draw.random() < 0.3):
            shared = draw.choice((0, draw.randint(0, first.done))) // server.page * server.page
            count, number = shared + draw.randint(1, 70), 100 * seed + later
            sequences.append(Sequence(server, count, number, first, shared))
            later -= 1
        left = [s for s in sequences if s.done < len(s.q)]
        chosen = draw.sample(left, draw.randint(min(1, len(left)), len(left)))
        if not chosen:
            continue
        counts = [min(draw.choice((1, 1, 5, 31, 90)), len(s.q) - s.done) for s in chosen]
        steps = [s.step(server, n) for s, n in zip(chosen, counts, strict=True)]
        for s, out in zip(chosen, server.attend(*steps, **options), strict=True):
            s.parts.append(out)
    for s in sequences:
        want = server.attend((s.q, s.pages, len(s.q)), **options)[0]
        assert same_bytes(torch.cat(s.parts), want[s.shared :])
        if not options:
            whole = (t[None] for t in (s.q, s.k, s.v))
            assert same_bytes(want, ck.block_sparse_attention(*whole, causal=True)[0])


@pytest.mark.parametrize("options", [{}, {"window": (60, 0), "softcap": 9.0}, {"with_sinks": True}])
def test_speculative_rows(options):
    """One to five rows of a sequence are as many calls of one row, the keys behind it in place."""
    lengths = [(k, keys) for k in range(1, 6) for keys in (k, 97, 128, 130, 259)]
    batch = drawn(lengths, HEADS, 16, seed=5, padding=2, **options)
    together, apart = batch.call(), batch.by_row()
    assert all(map(same_bytes, together, apart.call()))
    # One step at a time, too: no other row is in the call.
    for row in (0, 7, len(apart.seqlens_k) - 1):
        out, lse = apart.only(row).call()
        assert same_bytes(out[0], together[0][row])
        assert same_bytes(lse[:, 0], together[1][:, row].contiguous())


# ---- torch ---------------------------------------------------------------------------------------


def step(q, key, value, k_cache, v_cache, slots, table, lengths, starts, out, layout="NHD"):
    """A decoding step that writes its keys and attends into ``out``, and once more."""
    lists = table, lengths, starts
    ck.write_kv_cache(key, value, k_cache, v_cache, slots, layout=layout)
    ck.paged_attention(q, k_cache, v_cache, *lists, layout=layout, out=out)
    options = {"window_size": (9, None), "layout": layout}
    return ck.paged_attention(q, k_cache, v_cache, *lists, **options) + out


def step_of(lengths: list[tuple[int, int]], layout: str = "NHD") -> list[torch.Tensor]:
    """Operands of `step`."""
    batch = drawn(lengths, HEADS, 16, poison=0.0, layout=layout)
    slots = [batch.block_table[n, (keys - 1) // 16] * 16 for n, (_, keys) in enumerate(lengths)]
    key, value = (torch.cat([t[:1] for t in ts]) for ts in (batch.keys, batch.values))
    lists = torch.stack(slots), batch.block_table, batch.seqlens_k, batch.cu_seqlens_q
    return [batch.q, key, value, batch.k_cache, batch.v_cache, *lists, torch.zeros_like(batch.q)]


def ran(function, operands) -> list[torch.Tensor]:
    """The result on copies, and what these hold afterwards."""
    copies = [t.clone() for t in operands]
    return [function(*copies), *copies]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_graph(layout):
    """Eager's bytes, in one graph for every batch."""
    torch._dynamo.reset()
    count = 0

    def counting(graph, example):
        nonlocal count
        count += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    def run(*operands):
        return step(*operands, layout=layout)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counting)
    # Sizes that are equal in the first call would be one symbol.
    first = [(1, 20), (3, 50), (2, 100), (1, 3), (2, 8)]
    for lengths in (first, [(3, 41), (1, 5), (1, 17)]):
        operands = step_of(lengths, layout)
        want = ran(run, operands)
        assert all(map(same_bytes, ran(compiled, operands), want)) and want[-1].any()
    assert count <= 2


def test_tensors_without_memory():
    """Fake tensors share no memory, and a graph of fake tensors has the bytes of the calls."""
    operands = step_of([(1, 20), (2, 9)])
    with FakeTensorMode() as mode:
        assert step(*map(mode.from_tensor, operands)).shape == operands[0].shape
    graph = make_fx(lambda *args: step(*args), tracing_mode="fake")(*operands)
    assert all(map(same_bytes, ran(graph, operands), ran(step, operands)))
    with pytest.raises(errors.UnsupportedTransformError, match="vmap"):
        torch.func.vmap(step)(*(torch.stack([t, t]) for t in operands))


def written(batch: Batch, key: torch.Tensor) -> None:
    ck.write_kv_cache(key, batch.values[0][:1], batch.k_cache, batch.v_cache, torch.tensor([0]))


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "sinks", "out", "key"])
def test_there_is_no_gradient_and_no_tangent(name):
    """Forward mode would see a constant."""
    batch = decoded()
    plain = {"out": torch.zeros_like(batch.q), "key": batch.keys[0][:1]}.get(name)
    plain = getattr(batch, name) if plain is None else plain

    def call(t: torch.Tensor) -> None:
        if name == "key":
            written(batch, t)
        elif name == "out":
            batch.call(out=t)
        else:
            batch.changed(**{name: t}).call()

    with pytest.raises(errors.UnsupportedTransformError, match=r"no gradient of it|write_kv_cache"):
        call(plain.clone().requires_grad_())
    with torch.no_grad():
        call(plain.clone().requires_grad_())
    dual = pytest.raises(errors.UnsupportedTransformError, match="forward-mode")
    with forward_ad.dual_level(), dual:
        call(forward_ad.make_dual(plain, plain.clone()))


def unseen_pages() -> None:
    """Pages that no query sees hold NaN."""
    batch = drawn([(1, 250), (2, 300)], HEADS, 16, seed=9, window=(150, 0), unseen=True)
    assert wrong(batch) == []


def test_pages_that_no_query_sees():
    unseen_pages()
