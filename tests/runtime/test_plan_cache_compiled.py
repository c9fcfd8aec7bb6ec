"""Ops called from a compiled graph take the cached plan: a second call plans nothing."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.runtime import dispatch, plan_cache
from tests.runtime.pretended_sm90 import idle, pretended

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def planned(monkeypatch):
    """Names of the kernels that are planned, in order; a GPU without kernels is pretended."""
    with pretended(monkeypatch), idle():
        names, plan = [], dispatch.plan

        def counted(name, *where):
            names.append(name)
            return plan(name, *where)

        monkeypatch.setattr(dispatch, "plan", counted)
        yield names


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(BF16).requires_grad_()


def block(x, weight, gain):
    """What a patched model's graph has most of, forward and backward."""
    return ck.linear(ck.rms_norm(x, gain), weight)


def step(run) -> None:
    x, weight, gain = drawn(32, 128), drawn(64, 128), drawn(128)
    run(x, weight, gain).sum().backward()


def test_second_step_plans_nothing(planned):
    run = torch.compile(block, fullgraph=True, backend="aot_eager")
    step(run)
    assert {"gemm", "norm_forward", "norm_backward"} <= set(planned)
    planned.clear()
    step(run)
    assert planned == []


def test_cleared_plans_are_planned_again(planned):
    """The count sees a graph that misses the cache."""
    run = torch.compile(block, fullgraph=True, backend="aot_eager")
    step(run)
    planned.clear()
    plan_cache.clear()
    step(run)
    assert {"gemm", "norm_forward", "norm_backward"} <= set(planned)
