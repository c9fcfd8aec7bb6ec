"""How the lists of a schedule get to a card: from pinned memory, so that the host does not wait.

And what they cost the host: the same bytes as those of the builder before, in fewer calls.
"""

from __future__ import annotations

import itertools
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds, schedule
from tests.contract import same_bytes

#: Calls from Python, of NumPy, torch and our own, in `tensors`.
CALLS = 40


@pytest.mark.parametrize(
    ("device", "words", "capturing", "pinned"),
    [
        ("cuda", 100, False, True),
        ("cuda", 100, True, False),
        ("cuda", schedule._MOST_PINNED // 4, False, True),
        ("cuda", schedule._MOST_PINNED // 4 + 1, False, False),
        ("cpu", 100, False, False),
        ("meta", 100, False, False),
    ],
)
def test_what_is_pinned(monkeypatch, device, words, capturing, pinned):
    """A graph's replays read their source again: it has to stay, as the schedule's words do."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert schedule._is_pinned(words, torch.device(device)) is pinned


@pytest.mark.parametrize("known", [False, True], ids=["new", "known on the CPU"])
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_pinned_words_are_those_of_pageable_memory(monkeypatch, pinned, known):
    """Whatever the memory held before; pinned memory is torch's again, pageable memory is kept."""
    first = kinds.spt(drawn(1, masks=3), heads=6)
    want = first._host_words(torch.device("cpu"), (2, 0, 1), first._sizes(True))
    monkeypatch.setattr(schedule, "_is_pinned", lambda size, device: pinned)
    monkeypatch.setattr(
        schedule, "_pinned", lambda size: torch.full((size,), -7, dtype=torch.int32)
    )
    each = replace(first)
    if known:
        each._words[2, 0, 1] = want.numpy()
    got = each._host_words(torch.device("cuda"), (2, 0, 1), each._sizes(True))
    assert same_bytes(got, want)
    kept = each._words.get((2, 0, 1))
    assert (kept is not None) == (known or not pinned)
    assert (kept is not None and kept.ctypes.data == got.data_ptr()) is not pinned


def drawn(seed: int, masks: int | None = None) -> np.ndarray:
    """Blocks of one to five masks, some of them without blocks, rows or columns."""
    rng = np.random.default_rng(seed)
    size = (masks or rng.integers(1, 6), *rng.integers(seed % 10 > 0, 12, 2))
    blocks = rng.integers(0, 3, size, dtype=np.uint8)
    return blocks * (rng.random(size) < rng.choice([0, 0.3, 0.9, 1])).astype(np.uint8)


def drawn_schedule(seed: int) -> schedule.Schedule:
    """A schedule of heads that share lists, or have an order of their own."""
    blocks, rng = drawn(seed), np.random.default_rng(seed)
    heads, columns = len(blocks) * int(rng.integers(1, 4)), blocks.shape[2]
    flight, walk = int(rng.integers(1, 5)), str(rng.choice(kinds.WALKS))
    facts = {"heads": heads, "heads_in_flight": flight, "walk": walk}
    if seed % 2:
        return kinds.lpt(blocks, **facts)
    order = rng.permuted(np.tile(np.arange(columns), (heads if seed % 4 else 1, 1)), axis=1)
    return kinds.permutation(blocks, order=order, **facts)


def packed_before(of: schedule.Schedule, mask_of_list: tuple[int, ...] | None) -> np.ndarray:
    """The words of `tensors` as they were made until 2026-11-29 (6be87b7)."""
    entries = len(of.q_block)
    sizes = [4 * of.num_tickets, of.heads, len(of.offset), entries, entries]
    sizes += [entries] * (mask_of_list is not None)
    sizes = [part for size in sizes for part in (size, -size % 4)]
    stops = list(itertools.accumulate(sizes))
    words = np.zeros(stops[-1], np.int32)
    ticket, list_of_head, offset, entry, rank, *place = (
        words[stop - size : stop] for stop, size in zip(stops[::2], sizes[::2], strict=True)
    )
    pairs = ticket.view(np.int64).reshape(-1, 2)
    pairs[:, 0] = of.order.view(np.int64)[:, 0]
    span = np.empty((len(of.offset) - 1, 2), np.int32)
    span[:, 0], span[:, 1] = of.offset[:-1], of.offset[1:]
    pairs[:, 1] = span.view(np.int64)[:, 0].take(of.list_of_ticket)
    list_of_head[:] = of.list_of_head
    offset[:] = of.offset
    np.multiply(of.q_block, 2, out=entry)
    entry += of.partial
    rank[:] = of.rank
    if place:
        rows, columns = of.num_q_blocks, of.num_kv_blocks
        masks = np.array(mask_of_list, np.int32)[:, None] * (rows * columns)
        first = (masks + np.arange(columns, dtype=np.int32)).reshape(-1)
        np.multiply(of.q_block, columns, out=place[0])
        place[0] += np.repeat(first, np.diff(of.offset))
    return words


def test_words_are_those_of_the_builder_before():
    sets, empty = set(), 0
    for seed in range(400):
        each = drawn_schedule(seed)
        sets.add(each.num_lists)
        empty += not len(each.rank)
        masks = tuple(np.random.default_rng(seed).integers(0, 9, each.num_lists).tolist())
        for mask_of_list in (None, masks):
            sizes = each._sizes(mask_of_list is not None)
            words = np.full(sum(sizes), -7, np.int32)
            each._pack(words, mask_of_list, sizes)
            assert words.tobytes() == packed_before(each, mask_of_list).tobytes(), seed
    assert len(sets) > 8 and 10 < empty < 200


@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_pairs_are_indices_in_either_byte_order(byteorder):
    rng = np.random.default_rng(3)
    for columns, heads in ((1, 2**20), (64, 128), (2**20 - 1, 2**11), (7, 1)):
        pairs = rng.integers(0, (heads, columns), (500, 2)).astype(np.int32)
        words = pairs if byteorder == sys.byteorder else np.ascontiguousarray(pairs[:, ::-1])
        index = schedule._flat_index(words.view(np.int64)[:, 0], columns, byteorder)
        assert (index == pairs[:, 0].astype(np.int64) * columns + pairs[:, 1]).all()


def calls(function) -> int:
    """Number of calls from Python inside ``function()``, of C functions too."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("with_place", [False, True])
def test_what_the_tensors_of_a_new_schedule_cost(with_place):
    """Calls whose number does not depend on sizes, and no table as large as all entries but one."""
    counts = []
    for length in (512, 8192):
        each = kinds.spt(BlockMask.causal(length, length), heads=16)
        masks = (0,) if with_place else None
        each.tensors("cpu", masks)
        fresh = [replace(each) for _ in range(2)]
        counts.append(calls(lambda one=fresh[0], masks=masks: one.tensors("cpu", masks)))
        tracemalloc.start()
        fresh[1].tensors("cpu", masks)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert counts[0] == counts[1] <= CALLS
    words = 4 * sum(each._sizes(with_place))
    # Beside the words: the span and the index of each ticket, 16 bytes, and a place's first part.
    assert peak <= words + 24 * each.num_tickets + 4 * len(each.rank) * with_place + 4096


@pytest.mark.gpu
def test_the_host_does_not_wait_for_what_is_queued():
    """131 KB of lists, behind a kernel of a fifth of a second; bytes as on the CPU."""
    first = kinds.spt(BlockMask.full(16384, 16384), heads=4)
    want = first.tensors("cpu")
    first.tensors("cuda")
    torch.cuda.synchronize()
    for each in (replace(first) for _ in range(3)):
        torch.cuda._sleep(400_000_000)
        slept = torch.cuda.Event()
        slept.record()
        tensors = each.tensors("cuda")
        assert not slept.query()
        assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors[:5], want[:5], strict=True))
