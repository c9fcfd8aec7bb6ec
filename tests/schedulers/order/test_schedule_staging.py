"""How the lists of a schedule get to a card: from pinned memory, so that the host does not wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds, schedule


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
    host, copy = torch.zeros(words, dtype=torch.int32), torch.zeros(1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: copy)
    staged = schedule._staged(host, torch.device(device))
    assert staged is (copy if pinned else host)


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
