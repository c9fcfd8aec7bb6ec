"""Cached plans on a GPU: the bytes of the slow path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cute_kernels as ck
from cute_kernels.compile import extension
from cute_kernels.runtime import plan_cache
from tests.contract import same_bytes
from tests.runtime.cached_calls import CASES, counted, drawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", CASES)
def test_a_known_call_has_the_bytes_of_the_first(name, monkeypatch):
    run, shape = CASES[name]
    plan_cache.clear()
    counts = counted(monkeypatch)
    with torch.device("cuda"):
        x = drawn(*shape, seed=5).requires_grad_()
        cotangent = drawn(*run(x).shape, seed=9)

        def results() -> list[torch.Tensor]:
            y = run(x)
            return [y.detach(), torch.autograd.grad(y, x, cotangent.to(y.dtype))[0]]

        plan_cache.clear()
        before = sum(counts.values())
        first, later = results(), results()
        assert sum(counts.values()) == before + 1
        plan_cache.clear()
        whole = results()
        with torch.no_grad():
            alone = [run(x), run(x)]
    assert all(map(same_bytes, first, later)) and all(map(same_bytes, first, whole))
    assert all(same_bytes(y, first[0]) for y in alone)


def on_cuda() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Calls of [2, 3, 64] that allocate nothing else, so that a graph can be captured of them."""
    with torch.device("cuda"):
        weight, scale, shift = drawn(64, 64, seed=1), drawn(64, seed=2), drawn(64, seed=3)
        one = drawn(2, 3, 64, seed=4)
    return {
        "linear": lambda x: ck.linear(x, weight),
        "linear, bias": lambda x: ck.linear(x, weight, shift, order="tree"),
        "rms_norm": lambda x: ck.rms_norm(x, scale),
        "rms_norm, residual": lambda x: ck.rms_norm(x, scale, residual=one)[0],
        "layer_norm": lambda x: ck.layer_norm(x, scale, shift),
        "silu_mul": lambda x: ck.silu_mul(x, one),
    }


NAMES = ["linear", "linear, bias", "rms_norm", "rms_norm, residual", "layer_norm", "silu_mul"]


@pytest.fixture
def rows():
    with torch.device("cuda"):
        return [drawn(2, 3, 64, seed=seed) for seed in (5, 6)]


@pytest.mark.parametrize("name", NAMES)
def test_a_known_call_in_a_stream_in_a_graph_and_compiled(name, rows, monkeypatch):
    run, (one, other) = on_cuda()[name], rows
    plan_cache.clear()
    x = one.clone()
    run(x)
    want, old = run(other), run(one)
    assert not same_bytes(want, old)
    torch.cuda.synchronize()
    # On another stream it would read the rows while this one sleeps, before they are written.
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.copy_(other)
        y = run(x)
    assert not side.query()
    side.synchronize()
    assert same_bytes(y, want)

    counts, graph = counted(monkeypatch), torch.cuda.CUDAGraph()
    run(x)
    before = sum(counts.values())
    with torch.cuda.graph(graph):
        y = run(x)
    assert sum(counts.values()) == before
    for rows_now, bytes_now in ((other, want), (one, old), (other, want)):
        x.copy_(rows_now)
        graph.replay()
        assert same_bytes(y, bytes_now)

    plan_cache.clear()
    compiled = torch.compile(run, fullgraph=True)
    assert same_bytes(compiled(one), old) and same_bytes(compiled(one), old)
    assert any(calls._plans for calls in plan_cache._caches)
    assert same_bytes(compiled(other), want)


def test_a_call_is_known_by_its_device_and_launched_in_c():
    calls = extension.calls()
    assert calls is not None, extension.missing()
    x = torch.randn(8, 8)
    assert calls.describe(x) != calls.describe(x.cuda()) == calls.describe(torch.randn(8, 8).cuda())
