"""``ByteCache``: bounded in bytes, one value per key, safe under threads, streams and graphs."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels.runtime import caching
from cute_kernels.runtime.caching import ByteCache
from cute_kernels.sparse_attn import lowering


def tensor(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def test_the_oldest_leave_when_bytes_run_out():
    cache = ByteCache("test", 100)
    for key in range(3):
        cache.get(key, lambda: tensor(40))
    assert cache.size() == {"entries": 2, "bytes": 80, "pinned": 0, "limit": 100}
    out = []
    cache.get(1, lambda: out.append(1) or tensor(40))
    assert not out
    cache.get(3, lambda: tensor(40))
    cache.get(2, lambda: out.append(2) or tensor(40))
    assert out == [2]  # 1 had been used since


def test_a_value_of_inference_mode_can_be_saved_for_backward():
    cache = ByteCache("test", 100)
    with torch.inference_mode():
        assert not cache.get("key", lambda: tensor(40)).is_inference()
        assert torch.is_inference_mode_enabled()


def test_bytes_count_once():
    """Views, arrays, containers and objects; a storage that two share is one."""
    whole, array = tensor(64), np.zeros(10, np.int32)
    value = SimpleNamespace(a=[whole, whole[3:]], b={"c": (array, array[2:])}, n=3)
    value.itself = value
    assert caching._bytes_of(value) == 64 + 40


def test_nothing_but_the_cache_keeps_a_mask_and_what_is_made_of_it(monkeypatch):
    """No circle of references: a mask that is dropped goes at once, not when the collector runs."""
    monkeypatch.setattr(lowering, "cache", ByteCache("test", 1))
    mask = ck.BlockMask.from_dense(torch.rand(200, 200) < 0.5)
    lowered = weakref.ref(lowering.lower(mask))
    reference = weakref.ref(mask)
    del mask
    assert reference() is None and lowered() is None


def test_many_masks_stay_within_the_bound(monkeypatch):
    cache = ByteCache("test", 300_000)
    monkeypatch.setattr(lowering, "cache", cache)
    q = torch.randn(1, 256, 1, 64).bfloat16().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        mask = ck.BlockMask.from_dense(torch.rand(256, 256, generator=generator) < 0.5)
        ck.block_sparse_attention(q, q, q, mask).sum().backward()
        assert 0 < cache.size()["bytes"] <= 300_000
    assert cache.size()["entries"] < 60


def test_threads_share_one_value():
    """The first that is stored is everybody's, also while old ones leave."""
    cache, start = ByteCache("test", 400), threading.Barrier(8)

    def work(i: int) -> None:
        start.wait()
        for step in range(400):
            key = (step + i) % 17
            assert cache.get(key, lambda key=key: (key, tensor(40)))[0] == key

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    size = cache.size()
    assert size["bytes"] == 40 * size["entries"] <= 400
    both, same = threading.Barrier(2), ByteCache("test", 400)

    def slow():
        both.wait()
        return tensor(4)

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: same.get("key", slow), range(2))
    assert one is two


def test_a_value_does_not_leave_while_it_is_taken(monkeypatch):
    """Without the lock: KeyError in the thread that found it."""
    cache, entered, left = ByteCache("test", 50), threading.Event(), threading.Event()
    cache.get("key", lambda: tensor(40))

    class Slow(OrderedDict):
        def get(self, key):
            entry = super().get(key)
            if entry is not None:
                entered.set()
                left.wait(0.1)  # in vain: whoever would take it out waits for us
            return entry

    def push_out():
        entered.wait()
        cache.get("other", lambda: tensor(40))
        left.set()

    monkeypatch.setattr(cache, "_entries", Slow(cache._entries))
    with ThreadPoolExecutor(2) as pool:
        pushed = pool.submit(push_out)
        assert pool.submit(cache.get, "key", None).result().numel() == 40
        pushed.result()
    assert cache.size() == {"entries": 1, "bytes": 40, "pinned": 0, "limit": 50}


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for CUDA: what waited for what, and whether a graph is being captured."""
    state = SimpleNamespace(waits=[], capturing=False)
    stream = SimpleNamespace(synchronize=lambda: state.waits.append("stream"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: state.waits.append("device"))
    monkeypatch.setattr(
        caching, "_wait", lambda value, wait: [wait("cuda:0") for _ in caching._leaves(value)]
    )
    return state


def test_a_value_has_landed_before_another_stream_may_take_it(gpu):
    cache = ByteCache("test", 100)
    for _ in range(3):
        cache.get("key", lambda: tensor(40))
    assert gpu.waits == ["stream"]


def test_what_leaves_is_not_read_any_more(gpu):
    """Its memory goes back to the allocator, which knows nothing of other streams."""
    cache = ByteCache("test", 50)
    cache.get(0, lambda: tensor(40))
    cache.get(1, lambda: tensor(40))
    assert gpu.waits == ["stream", "stream", "device"]


def test_what_a_graph_reads_stays(gpu):
    cache = ByteCache("test", 50)
    cache.get("before", lambda: tensor(40))
    gpu.capturing = True
    kept = cache.get("before", lambda: tensor(40))
    inside = cache.get("inside", lambda: tensor(40))
    gpu.capturing = False
    for key in range(5):
        cache.get(key, lambda: tensor(40))
    refuse = lambda: pytest.fail("made anew")  # noqa: E731
    assert cache.get("before", refuse) is kept and cache.get("inside", refuse) is inside


def test_what_a_graph_reads_leaves_others_their_place(gpu, monkeypatch):
    """Bytes of captures do not count against the limit: later values stay, and nothing waits."""
    cache, told = ByteCache("test", 100), []
    monkeypatch.setattr(caching.plan_cache, "let_go", lambda: told.append(1))
    first = cache.get("first", lambda: tensor(40))
    gpu.capturing = True
    assert cache.get("first", lambda: pytest.fail("made anew")) is first
    for key in range(4):
        cache.get(key, lambda: tensor(60))
    gpu.capturing = False
    gpu.waits.clear()
    for _ in range(3):
        for key in ("a", "b"):
            cache.get(key, lambda: tensor(50))
    assert gpu.waits == ["stream", "stream"] and not told
    assert cache.size() == {"entries": 7, "bytes": 380, "pinned": 280, "limit": 100}
    cache.get("c", lambda: tensor(50))
    assert told and cache.size() == {"entries": 7, "bytes": 380, "pinned": 280, "limit": 100}
    cache.clear()
    assert cache.size() == {"entries": 0, "bytes": 0, "pinned": 0, "limit": 100}
