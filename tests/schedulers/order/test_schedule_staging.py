"""How the lists of a schedule get to a card: from pinned memory, so that the host does not wait;
and what they cost the host."""

from __future__ import annotations

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
    blocks = np.random.default_rng(1).integers(0, 3, (3, 9, 7), dtype=np.uint8)
    first = kinds.spt(blocks, heads=6)
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
