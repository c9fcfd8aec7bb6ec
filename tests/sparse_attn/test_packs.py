"""What one launch for a pack reads: where tokens go, the mask, and the order of each sequence.

Lists, ranks and tickets that kernels make are schedules that the host admits, each sequence's own
"spt": `pack_tables.oracle` says what the kernel makes (``test_pack_tables``, the card's in
``test_gpu``), the visits and ranks are the formulas of ``device/varlen``.
"""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import pytest
import torch

from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.safety import admit
from cute_kernels.schedulers.order.schedule import Schedule
from cute_kernels.sparse_attn import lowering
from cute_kernels.sparse_attn.kv_ranges import ranges
from cute_kernels.sparse_attn.varlen import layout as packs
from tests.contract import same_bytes
from tests.sparse_attn import pack_tables
from tests.sparse_attn.pack_cases import lengths_of, offsets

BLOCK, PARTIAL = 128, 1
SEEDS = [0, 1, 2, 3, 5, 8]


def layout_of(lengths: list[int]) -> packs.Layout:
    return packs.layout(packs.from_offsets(offsets(lengths)), sum(lengths), "cpu")


def bounds_of(places: tuple[tuple[int, int], ...]) -> torch.Tensor:
    return ranges.Documents(places, (None, 0)).on(torch.device("cpu"))


def token_rows(layout: packs.Layout) -> torch.Tensor:
    tokens = int(layout.lengths.sum())
    return layout.rows if layout.needs_copy else torch.arange(tokens)


@pytest.mark.parametrize("seed", SEEDS)
def test_layouts(seed):
    lengths = lengths_of(seed)
    layout = layout_of(lengths)
    assert layout.lengths.tolist() == [n for n in lengths if n]
    assert not (layout.begins % BLOCK).any()
    rows = token_rows(layout)
    assert rows[-1] == layout.length - 1
    first = 0
    for begin, n in zip(layout.begins, layout.lengths, strict=True):
        assert rows[first : first + n].tolist() == list(range(begin, begin + n))
        first += n
    tokens = torch.randn(1, first, 3, generator=torch.Generator().manual_seed(seed))
    spread = layout.pad(tokens, 7.0)
    assert spread.shape == (1, layout.length, 3)
    assert same_bytes(layout.unpad(spread), tokens)
    gaps = torch.ones(layout.length, dtype=torch.bool)
    gaps[rows] = False
    assert (spread[:, gaps] == 7.0).all()


def test_layouts_of_places():
    """In a buffer of which some tokens are of no sequence."""
    places = ((3, 140), (140, 150), (260, 400))
    layout = packs.layout(bounds_of(places), 400, "cpu")
    assert layout.begins.tolist() == [0, 256, 384] and layout.length == 524
    tokens = torch.randn(1, 400, 3, generator=torch.Generator().manual_seed(1))
    spread, flat = layout.pad(tokens), tokens[0]
    for begin, (first, end) in zip(layout.begins, places, strict=True):
        assert same_bytes(spread[0, begin : begin + end - first], flat[first:end])
    back = layout.unpad(spread, 5.0)[0]
    inside = torch.zeros(400, dtype=torch.bool)
    for first, end in places:
        inside[first:end] = True
    assert same_bytes(back[inside], flat[inside]) and (back[~inside] == 5.0).all()


def test_gaps_are_no_rows_of_the_buffer():
    """What lies between two sequences that begin at blocks is read by nobody."""
    layout = packs.layout(bounds_of(((0, 100), (128, 200))), 200, "cpu")
    assert layout.length == 200 and layout.needs_copy
    assert layout.unused_tokens.tolist() == list(range(100, 128))


def test_tokens_of_no_sequence_are_filled():
    for places, tokens in ((((3, 140), (140, 150), (260, 400)), 420), (((0, 9), (9, 20)), 20)):
        outside = torch.ones(tokens, dtype=torch.bool)
        for begin, end in places:
            outside[begin:end] = False
        t = torch.randn(2, tokens, generator=torch.Generator().manual_seed(1))
        out = ranges.Documents(places, (None, 0)).fill_unused_(t.clone(), 1, 7.0)
        assert (out[:, outside] == 7.0).all() and same_bytes(out[:, ~outside], t[:, ~outside])


def test_where_sequences_lie_is_read_without_a_copy():
    cu_seqlens = offsets([3, 0, 5], torch.int64)
    bounds = packs.from_offsets(cu_seqlens)
    assert (
        bounds.tolist() == [[0, 3], [3, 3], [3, 8]] and bounds.data_ptr() == cu_seqlens.data_ptr()
    )
    assert packs.from_offsets(torch.stack((cu_seqlens, cu_seqlens + 9), 1)[:, 0]).equal(bounds)
    assert packs.from_offsets(offsets([])).shape == (0, 2)


def test_nothing_moves_where_all_begin_at_blocks():
    layout = layout_of([256, 0, 128, 77])
    tokens = torch.randn(1, 461, 2)
    assert not layout.needs_copy and same_bytes(layout.pad(tokens), tokens)
    assert layout_of([256, 127, 77]).needs_copy


def test_a_schedule_that_misses_a_visit_is_refused(monkeypatch):
    true = packs.side_by_side
    monkeypatch.setattr(packs, "side_by_side", lambda parts, mask: true(parts[:1], mask))
    monkeypatch.setattr(lowering.cache, "get", lambda key, make: make())
    with pytest.raises(ScheduleError):
        packs.order(layout_of([130, 200]), (None, 0), (1, 1), 128, "cpu")


def test_what_follows_from_offsets_is_kept():
    one, two = (packs.lowered(layout_of([200, 70]), (None, 0), "cpu") for _ in range(2))
    assert one is two
    assert packs.lowered(layout_of([70, 200]), (None, 0), "cpu") is not one


# ---- sequences of a buffer -----------------------------------------------------------------------


def spans_of(padding: list[list[int]], left: int | None = None) -> torch.Tensor:
    """Causal; ``padding``: 1 for the real tokens of each row."""
    real = torch.tensor(padding, dtype=torch.bool)
    batch, rows = real.shape
    recorded = None
    if left is not None:
        row = torch.arange(rows)
        dense = (row <= row[:, None]) & (row >= row[:, None] - left)
        dense = dense & real[:, None, None] & real[:, None, :, None]
        recorded = ranges.seen_of(dense)
    return ranges.kv_ranges(recorded, real, 0, 0, (batch, rows, rows), False)


def test_padding_is_a_pack():
    pack = ranges.documents_of(spans_of([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [0, 1, 0, 0, 0]]))
    assert pack.bounds == ((2, 5), (5, 9), (11, 12)) and pack.window == (None, 0)


def test_windows_are_shared():
    rows = [[1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert ranges.documents_of(spans_of(rows, left=2)).window == (2, 0)
    assert ranges.documents_of(spans_of(rows, left=9)).window == (None, 0)


def test_documents_are_a_pack():
    cut = torch.tensor([0] * 3 + [1] + [2] * 4)
    dense = (cut == cut[:, None]).tril()[None, None]
    spans = ranges.kv_ranges(ranges.seen_of(dense), None, 0, 0, (1, 8, 8), True)
    assert ranges.documents_of(spans) == (((0, 3), (3, 4), (4, 8)), (None, 0))


def _changed(at: tuple[int, int], value: int) -> torch.Tensor:
    spans = spans_of([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    spans[0, 0, at[0], at[1]] = value
    return spans


@pytest.mark.parametrize(
    "spans",
    [
        spans_of([[1, 1, 1, 1]]),
        spans_of([[0, 1, 1], [0, 1, 1]]),
        spans_of([[0, 0, 0], [1, 1, 1]]),
        _changed((2, 1), 128),
        _changed((4, 3), 4),
        _changed((3, 2), 2),
        torch.cat([spans_of([[1, 1, 1, 1]], left=1), spans_of([[0, 1, 1, 1]], left=None)]),
        torch.cat([spans_of([[1, 1, 1, 1]], left=1), spans_of([[0, 1, 1, 1]], left=0)]),
    ],
    ids=["one", "alike", "one of two", "position", "no end", "no band", "sides", "two windows"],
)
def test_what_is_no_pack(spans):
    assert ranges.documents_of(spans) is None


@pytest.mark.parametrize("window", [(None, 0), (None, None), (200, 0), (130, 40)])
def test_sequences_of_one_name_have_the_same_blocks(window):
    """Whose schedule they share: lists, and which of the blocks are full."""
    left, right = window
    out: dict = {}
    for length in (*range(1, 400), 511, 512, 513, 514, 640, 641, 642, 700):
        band = Band(
            None if left is None or left >= length - 1 else -left,
            None if right is None or right >= length - 1 else right,
        )
        mask = BlockMask.from_rule(band, length, length, block_size=128, device="cpu")
        blocks = mask.dense_blocks()
        out.setdefault(packs._blocks_of(band, length), set()).add(
            (blocks.shape, blocks.numpy().tobytes())
        )
    assert all(len(blocks) == 1 for blocks in out.values()) and len(out) < 60


# ---- tables of kernels ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=20_000)
def own_order(n: int, window: tuple[int | None, int | None]) -> tuple[np.ndarray, list]:
    """(blocks uint8 [M, M], tickets of its "spt") of a sequence's own mask."""
    left, right = window
    mask = BlockMask.sliding_window(n, n, left=left, right=right, device="cpu")
    out = {c: [(m, r) for m, _, r in visits] for _, c, visits in kinds.spt(mask).tickets()}
    return mask.dense_blocks()[0, 0].numpy(), out


def blocks_of(case: pack_tables.Case, tables: pack_tables.Tables) -> np.ndarray:
    """uint8 [M, M]: each sequence's own blocks on the diagonal; tokens of none have none."""
    used = len(tables.tickets) // case.kv_heads
    whole = np.zeros((used, used), np.uint8)
    for first, n in tables.sequences[:-1]:
        if n:
            own, _ = own_order(n, case.window)
            index = slice(first, first + len(own))
            whole[index, index] = own
    return whole


def schedule_of(case: pack_tables.Case, tables: pack_tables.Tables, blocks: np.ndarray) -> Schedule:
    """What a backward of the pack walks."""
    column, q_block, rank = pack_tables.entries(case, tables)
    order = np.argsort(column, kind="stable")
    column, q_block, rank = column[order], q_block[order], rank[order]
    count = np.bincount(column, minlength=len(blocks))
    return Schedule(
        num_q_blocks=len(blocks),
        num_kv_blocks=len(blocks),
        heads=case.kv_heads,
        order=tables.tickets[:, :2].copy(),
        list_of_head=np.zeros(case.kv_heads, np.int32),
        offset=np.concatenate(([0], count.cumsum())).astype(np.int32),
        q_block=q_block,
        # A kernel looks at pairs where a band may hide one, and at lengths itself.
        partial=blocks[q_block, column] == PARTIAL,
        rank=rank,
    )


def require(seed: int) -> None:
    case = pack_tables.drawn(seed)
    out = pack_tables.oracle(case)
    if not len(out.tickets):
        return
    blocks = blocks_of(case, out)
    schedule = schedule_of(case, out, blocks)
    assert admit(schedule, blocks, group=case.group).any_residency
    visited = {c: [(m, r) for m, _, r in visits] for h, c, visits in schedule.tickets() if h == 0}
    for first, n in out.sequences[:-1]:
        for column, visits in (own_order(n, case.window)[1] if n else {}).items():
            assert visited.pop(first + column) == [(first + m, rank) for m, rank in visits], seed
    assert not any(visited.values())
    lo, hi = case.band
    for m, n in zip(*np.nonzero(blocks == PARTIAL), strict=True):
        away = (int(n) - int(m)) * pack_tables.BLOCK
        own = out.table[n]
        inside = own[1] >= (max(m, n) + 1) * pack_tables.BLOCK
        looked_at = away - 127 < lo or away + 127 > hi
        # Or its last rows and keys are none.
        assert looked_at or not inside, (seed, m, n)


NIGHT = [pytest.param(500 * i, 500, marks=pytest.mark.nightly) for i in range(20)]


@pytest.mark.parametrize(("first", "count"), [(0, 100), *NIGHT])
def test_drawn_packs(first, count):
    """10,000 by night."""
    for seed in range(first, first + count):
        require(seed)


def changed_tables(change):
    """Of what the kernel makes."""
    true = pack_tables.oracle
    return mock.patch.object(pack_tables, "oracle", lambda case: change(true(case)))


def shorter(tables):
    tables.tickets[:, 3] -= tables.tickets[:, 3] > tables.tickets[:, 2] + 1
    return tables


def backwards(tables):
    return tables._replace(tickets=tables.tickets[::-1].copy())


@pytest.mark.parametrize("change", [shorter, backwards])
def test_mutants_of_tables_are_killed(change):
    killed = 0
    with changed_tables(change):
        for seed in range(40):
            try:
                require(seed)
            except (AssertionError, ScheduleError):
                killed += 1
    assert killed > 10
