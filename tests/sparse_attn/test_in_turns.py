"""A backward that need not be deterministic takes turns where the model says that it is faster."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.runtime import dispatch
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.model import arrival
from cute_kernels.sparse_attn import checks, lowering, op
from cute_kernels.sparse_attn.api import block_sparse_attention


@pytest.fixture
def ordered(monkeypatch):
    """Whether each backward that is planned is ordered; its device counts as SM90."""
    planned, plan = [], dispatch.plan

    def spied(name, device, dtype, *args):
        if name.endswith("backward"):
            planned.append(args[-1])
        return plan(name, device, dtype, *args)

    monkeypatch.setattr(op.dispatch, "plan", spied)
    monkeypatch.setattr(checks, "on_sm90", lambda device: True)
    return planned


def told(monkeypatch, ordered_ns: int, unordered_ns: int) -> None:
    times = arrival.Comparison(ordered_ns, unordered_ns)
    monkeypatch.setattr(arrival, "compare", lambda *_, **__: times)


def backward(length: int, mask: BlockMask | None, dim: int = 64, **options) -> None:
    q, k, v = (torch.randn(1, length, 2, dim).bfloat16().requires_grad_() for _ in range(3))
    block_sparse_attention(q, k, v, mask, **options).sum().backward()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("times", "turns"), [((1, 2), True), ((2, 2), False), ((2, 1), False)])
def test_the_faster_one_runs(ordered, monkeypatch, masked, times, turns):
    told(monkeypatch, *times)
    lowering.cache.clear()
    # Lengths that no other test has: plans and verdicts are cached.
    length = 131 + 10 * masked + sum(times)
    mask = BlockMask.sliding_window(length, length, left=40, right=0) if masked else None
    backward(length, mask, deterministic=False)
    backward(length, mask, deterministic=True)
    assert ordered == [turns, True]
    lowering.cache.clear()


def test_wide_heads_and_other_devices_are_not_asked_for(ordered, monkeypatch):
    told(monkeypatch, 1, 2)
    lowering.cache.clear()
    backward(137, None, dim=256, deterministic=False)
    monkeypatch.setattr(checks, "on_sm90", lambda device: False)
    backward(137, None, deterministic=False)
    assert ordered == [False, False]
    lowering.cache.clear()


def test_who_hands_in_lists_gets_the_kernel_asked_for(ordered, monkeypatch):
    """The benches compare both kernels on the same lists."""
    told(monkeypatch, 1, 2)
    mask = BlockMask.causal(139, 139)
    sizes = (1, 139, 139, 2, 2, 64)
    lists = lowering.operands(mask.handle, False, "spt", True, sizes, "cpu")
    assert lists[-1] == ""
    assert lowering.operands(mask.handle, False, "spt", True, sizes, "cpu", False)[-1] == (
        lowering.IN_TURNS
    )
