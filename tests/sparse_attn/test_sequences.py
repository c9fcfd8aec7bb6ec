"""Sequences of key buffers and of varlen batches have the bytes that each has alone.

Forward, lse and gradients; ranges at own positions, and the mutants that this kills.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.spans import Spans
from cute_kernels.sparse_attn import api, config, cpu
from cute_kernels.sparse_attn import op as attention_op
from cute_kernels.sparse_attn.kv_ranges import ranges
from tests.contract import same_bytes
from tests.sparse_attn import cases, pack_cases, sequence_cases
from tests.sparse_attn.sequence_cases import (
    CACHED,
    CHUNKS,
    S,
    alone,
    behind,
    cached,
    differing,
    inputs,
    packed,
)


@pytest.fixture
def dim(request, monkeypatch):
    """The head size of a test's sequences."""
    monkeypatch.setattr(sequence_cases, "D", request.param)
    return request.param


def of_dims(names: str, rows: list, wide: tuple):
    """Parameters of heads of 64, and one of the widths whose q, k and v are not alike or wide."""
    values = [(*row, 64) for row in rows] + [(*wide, dim) for dim in (192, 256)]
    return pytest.mark.parametrize((*names.split(), "dim"), values, indirect=["dim"])


@of_dims("pad", [(1,), (20,), (127,), (128,)], (20,))
def test_padding_on_either_side(pad, dim):
    short = 137
    out = behind((pad, pad + S - short), (S, short), pad + S)
    assert differing(out[0], alone(S)) == []
    assert differing(out[1], alone(short, seed=2)) == []
    (right,) = behind((0,), (S,), S + pad)
    assert differing(right, alone(S)) == []


def test_gradients_ask_for_no_search(monkeypatch):
    """The order of each sequence is "spt", on every backend, as kernels of packs have it."""
    monkeypatch.setattr(config, "auto", lambda *a: pytest.fail("auto"))
    out = behind((5, 25), (S, S - 20), S + 5)
    assert differing(out[0], alone(S)) == []


@of_dims("cut window", [(60, None), (64, None), (127, None), (128, None), (127, 1)], (60, 40))
def test_packs(cut, window, dim):
    assert differing(*packed(cut, window)) == []


@of_dims("window pad", [(64, 0), (64, 20), (64, 127), (200, 1)], (200, 1))
def test_a_cache_that_drops_its_oldest_keys(window, pad, dim):
    assert same_bytes(cached(window, pad, CHUNKS), alone(CACHED, window=window)[0])


def test_a_static_cache():
    """Columns that are not filled yet hold anything."""
    q, k, v, _ = inputs(S)
    k, v = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 90), value=torch.nan) for t in (k, v))
    want = alone(S)[0]
    for first, last in ((0, 130), (130, 131), (131, 300)):
        spans = api.kv_ranges(None, None, torch.tensor(first), 0, (1, last - first, S + 90))
        got = api.sequence_attention(q[:, first:last], k, v, spans)
        assert same_bytes(got, want[:, first:last])


# ---- ranges --------------------------------------------------------------------------------------


def test_starts_by_brute_force():
    """Drawn spans, rows that see nothing among them, against all pairs of rows and columns."""
    rng = np.random.default_rng(0)
    cuts = 0
    for _ in range(300):
        size = int(rng.integers(1, 12))
        first = rng.integers(0, size, size)
        end = np.minimum(first + rng.integers(0, 4, size), size)
        pairs = [(t, c) for t in range(size) for c in range(first[t], end[t])]
        want, start = [], 0
        for column in range(size):
            if all((t < column) == (c < column) for t, c in pairs):
                start = column
            want.append(start)
        assert ranges._starts(first, end).tolist() == want
        cuts += start > 0
    assert cuts > 50


def test_the_rule_of_spans_is_exact():
    generator = torch.Generator().manual_seed(4)
    for q_len, kv_len, batch in ((300, 260, 1), (129, 383, 2), (1, 200, 1)):
        first = torch.randint(0, kv_len, (batch, q_len), generator=generator).int()
        more = torch.randint(0, kv_len, (batch, q_len), generator=generator).int()
        # Some rows see all, some nothing; sorted ones make full and empty blocks.
        first, more = first.sort().values, torch.where(more % 5 == 0, 0, more)
        first[:, ::3] = 0
        end = (first + more).clamp(max=kv_len)
        mask = BlockMask.from_rule(Spans(first, end), q_len, kv_len, block_size=(32, 64))
        column = torch.arange(kv_len)
        want = (column >= first[..., None]) & (column < end[..., None])
        assert torch.equal(mask.to_dense()[:, 0], want)
        blocks = torch.nn.functional.pad(want, (0, -kv_len % 64, 0, -q_len % 32))
        is_allowed = blocks.unflatten(2, (-1, 64)).unflatten(1, (-1, 32)).any(dim=(2, 4))
        assert torch.equal(mask.dense_blocks()[:, 0] > 0, is_allowed)


@pytest.mark.parametrize("device_order", [1, -1])
def test_keys_of_several_runs_have_fp32_sums(device_order, monkeypatch):
    """dK and dV of a key that several runs see: their gradients, added in fp32 in their order."""
    size, window = 70, 40
    dense = torch.ones(size, size, dtype=torch.bool).tril().triu(1 - window)[None, None]
    spans = api.kv_ranges_from_first_key(api.seen_columns(dense))
    x = cases.inputs(1, 4, 2, size, size, 64)
    runs = ranges.runs_of(spans, "cpu")[::device_order]
    assert len(runs) > 20 and ranges.share_keys(runs)
    monkeypatch.setattr(ranges, "runs_of", lambda *_: runs)
    out = api.sequence_attention(*x.leaves(), spans)
    grads = torch.autograd.grad(out, x.leaves(), x.dout)
    sums = [torch.zeros(t.shape) for t in (x.k, x.v)]
    for run in runs:
        part = [run.cut_queries(x.q), run.cut_keys(x.k), run.cut_keys(x.v)]
        part = [t.detach().requires_grad_() for t in part]
        alone = api.block_sparse_attention(*part, run.lowered.mask, schedule="spt")
        dq, *others = torch.autograd.grad(alone, part, run.cut_queries(x.dout))
        assert same_bytes(run.cut_queries(grads[0]), dq)
        for total, grad in zip(sums, others, strict=True):
            total[run.batch, run.keys] += grad[:, run.shift :].float()
    for got, total in zip(grads[1:], sums, strict=True):
        assert same_bytes(got, total.bfloat16())


def spans_row_by_row(seen, padding, q_offset, kv_offset, sizes) -> torch.Tensor:
    """What `kv_ranges` returns for sequences that are not packed: the rule, query by query."""
    table = torch.zeros(sizes[0], 1, sizes[1], 4, dtype=torch.int32)
    for b, row in itertools.product(range(sizes[0]), range(sizes[1])):
        real = range(kv_offset + sizes[2])
        if padding is not None:
            real = padding[b].nonzero().flatten().tolist()
        left, column = real[0] if len(real) else 0, q_offset + row
        begin = max(left - kv_offset, 0)
        last = (real[-1] + 1 if len(real) else 0) - kv_offset
        first, end = begin, min(column - kv_offset + 1, last, sizes[2])
        if seen is not None:
            first, end = seen[b, 0, row].tolist()
        if padding is not None and column not in real:
            end = first
        position = max(kv_offset - left, 0) if padding is not None else kv_offset
        table[b, 0, row] = torch.tensor([begin, position, first, max(first, end)])
    return table


def test_spans_are_those_of_the_rule():
    """Drawn padding, caches that dropped keys, static ones, and masks; nothing waits in between."""
    generator = torch.Generator().manual_seed(7)

    def drawn(least: int, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, most + 1, shape or (1,), generator=generator)

    behind = 0
    for case in range(300):
        batch, rows, more = (int(drawn(*index)) for index in ((1, 3), (1, 5), (0, 6)))
        total = rows + int(drawn(0, 9))
        dropped = int(drawn(0, total - rows)) if case % 3 == 0 else 0
        columns, offset = total - dropped + (more if case % 3 == 1 else 0), total - rows
        padding = None
        if case % 2:
            left = drawn(0, total, batch, 1)
            column = torch.arange(total)
            padding = (left <= column) & (column < left + drawn(0, total, batch, 1))
            if case % 4 == 3:
                # A static cache's mask may end before the queries do: those columns are not real.
                width = int(drawn(1, total))
                padding = padding[:, :width]
                behind += width < total
        seen = None
        if case % 5 > 2:
            first, end = drawn(0, columns, batch, 1, rows, 2).int().sort(-1).values.unbind(-1)
            column = torch.arange(columns)
            seen = (first[..., None] <= column) & (column < end[..., None])
            mine, theirs = ranges.ends_of(seen), api.seen_columns(seen)
            assert torch.equal(mine, theirs)
            seen = theirs
        sizes = (batch, rows, columns)
        want = spans_row_by_row(seen, padding, offset, dropped, sizes)
        assert torch.equal(ranges.kv_ranges(seen, padding, offset, dropped, sizes, False), want)
        # A number, or a tensor as a static cache has it.
        q_offset = offset if case % 7 else torch.tensor(offset)
        got = ranges.of_sequences(seen, padding, q_offset, dropped, sizes, torch.device("cpu"))
        assert got.dtype == torch.int32 and torch.equal(got, want), case
    assert behind > 20


def test_where_spans_serve_best(monkeypatch):
    """Beside the keys where kernels read them, unless a gradient is asked for."""
    reads = lambda device: device == "cuda:1"  # noqa: E731
    monkeypatch.setattr(attention_op, "reads_keys_on_device", reads)
    with torch.no_grad():
        out = [
            api.kv_ranges_device(d).type for d in ("cuda:1", "cuda:0", "cpu", torch.device("mps"))
        ]
        assert out == ["cuda", "cpu", "cpu", "cpu"]
    assert api.kv_ranges_device("cuda:1").type == "cpu"
    monkeypatch.undo()
    with torch.inference_mode():
        assert api.kv_ranges_device("cuda:0").type == "cpu"  # there is no GPU here


def test_sequences_of_padding_only():
    q, k, v, _ = inputs(8)
    spans = api.kv_ranges(None, torch.zeros(1, 8, dtype=torch.bool), 0, 0, (1, 8, 8))
    out, lse = attention_op.sequence_attention(q, k, v, spans, 0.125, 0.0, None)
    assert not out.any() and (lse == -float("inf")).all()


# ---- varlen batches ------------------------------------------------------------------------------


def varlen_differences(tensors, lengths, *rule, **options) -> list[str]:
    together = pack_cases.packed(tensors, lengths, *rule, **options)
    return pack_cases.differing(together, pack_cases.alone(tensors, lengths, *rule, **options))


NIGHT = [pytest.param(32 * i, 32, marks=pytest.mark.nightly) for i in range(16)]


@pytest.mark.parametrize(("first", "count"), [(0, 10), *NIGHT])
def test_drawn_varlen_batches(first, count):
    """512 of them by night; of every head size and rule."""
    for seed in range(first, first + count):
        lengths, rule = pack_cases.lengths_of(seed), pack_cases.RULES[seed % 4]
        tensors = pack_cases.drawn(sum(lengths), seed, dim=config.HEAD_DIMS[seed % 5])
        assert varlen_differences(tensors, lengths, *rule) == [], (lengths, rule)


@pytest.mark.parametrize("rule", [*pack_cases.RULES, (False, (None, 9))], ids=str)
def test_copies(rule):
    """A GPU backend without varlen kernels reads one copy with each sequence at whole blocks."""
    with pack_cases.launched(cpu.forward, cpu.backward):
        for lengths in ([300, 90], [512, 90], [130, 0, 1, 61, 128]):
            tensors = pack_cases.drawn(sum(lengths))
            assert varlen_differences(tensors, lengths, *rule) == [], lengths


def test_options_of_a_varlen_batch():
    tensors = pack_cases.drawn(210, dtype=torch.float16)
    assert varlen_differences(tensors, [40, 170], scale=0.2, softcap=7.0) == []


@pytest.mark.parametrize(
    "width",
    [pytest.param(d, marks=() if d == 64 else pytest.mark.nightly) for d in config.HEAD_DIMS],
)
def test_neighbours_in_a_varlen_batch_do_not_show(width):
    """NaN in them, before and behind."""
    tensors, own = pack_cases.drawn(700, dim=width), slice(300, 531)
    want = pack_cases.packed(pack_cases.cut(tensors, own), [231])
    for t in tensors[:4]:
        t[:300] = t[531:] = torch.nan
    got = pack_cases.packed(tensors, [300, 231, 169])
    assert pack_cases.differing(pack_cases.cut(got, own), want) == []
