"""Launchers of other systems' ops plan calls of a known signature once."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import cute_kernels as ck
from cute_kernels.logp import launch as logp
from cute_kernels.runtime import plan_cache
from cute_kernels.runtime.plan_cache import Plan, cached_launcher, signature_of
from perf.model import idle_host


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None
    scale: float


@pytest.fixture
def planned(monkeypatch):
    """(launcher, list of the calls that it planned); CPU tensors count as those of a GPU."""
    calls = []

    def planner(x, pair, order):
        calls.append((x, pair, order))
        scale = pair.scale  # of the plan, as kernels' scalars are

        def run(x, pair, order):
            return x * scale + pair.first + (0 if pair.second is None else pair.second)

        return Plan(run)

    monkeypatch.setattr(plan_cache, "on_gpu", lambda t: True)
    return cached_launcher(planner), calls


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_known_signature_is_planned_once_and_runs_on_its_own_tensors(planned):
    launch, calls = planned
    for _ in range(3):
        x, first = torch.randn(4, 8), torch.randn(4, 8)
        assert torch.equal(launch(x, Pair(first, None, 2.0), "chain"), x * 2.0 + first)
    assert len(calls) == 1


def test_whatever_a_plan_may_depend_on_is_in_the_signature(planned):
    launch, calls = planned
    x, y = drawn(4, 8), drawn(4, 9)[:, :8]
    operands = [
        (x, Pair(x, None, 2.0), "chain"),
        (x, Pair(x, None, 2.0), "tree"),
        (x, Pair(x, None, 3.0), "chain"),
        (x, Pair(x, None, 0.0), "chain"),
        (x, Pair(x, None, -0.0), "chain"),
        (x, Pair(x, x, 2.0), "chain"),
        (x, Pair(y, None, 2.0), "chain"),
        (drawn(5, 8)[:4], Pair(x, None, 2.0), "chain"),
        (x.double(), Pair(x, None, 2.0), "chain"),
    ]
    for one in operands * 2:
        x, pair, _ = one
        want = x * pair.scale + pair.first + (0 if pair.second is None else pair.second)
        assert torch.equal(launch(*one), want)
    # A view that begins and ends as the tensor has its signature.
    assert len(calls) == len(operands) - 1


def test_what_is_no_signature_is_planned_each_time(planned):
    launch, calls = planned
    x = drawn(4, 9).flatten()[1:33].view(4, 8)  # begins at no multiple of 16 bytes
    for _ in range(2):
        launch(x, Pair(x, None, 2.0), "chain")
    assert len(calls) == 2


def test_a_defect_of_the_signature_is_seen(planned, monkeypatch):
    """Without the numbers inside of tuples, a plan of other numbers would run."""

    def collect(values, options, tensors):
        tensors.extend(value for value in values if isinstance(value, torch.Tensor))
        tensors.extend(t for v in values if isinstance(v, tuple) for t in v if t is v[0])

    monkeypatch.setattr(plan_cache, "_collect", collect)
    launch, _ = planned
    x = drawn(4, 8)
    launch(x, Pair(x, None, 2.0), "chain")
    assert not torch.equal(launch(x, Pair(x, None, 3.0), "chain"), x * 3.0 + x)


def test_options_say_where_tensors_are():
    x = drawn(4, 8)
    assert signature_of((x, Pair(x, None, 1.0)))[0] != signature_of((x, x, None, 1.0))[0]
    assert signature_of(((x,), x))[0] != signature_of(((x, x),))[0]


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_a_second_step_of_linear_logp_plans_nothing(monkeypatch, memory):
    """Forward and backward, with kernels that do nothing."""
    counts = {"planned": 0}
    kernels = ("_forward", "_few", "_gradient", "_finish")
    with idle_host.pretended():
        plan_cache.clear()
        for name in kernels:
            get = getattr(logp, name)

            def counted(*args, get=get):
                counts["planned"] += 1
                return get(*args)

            monkeypatch.setattr(logp, name, counted)
        found = []
        for _ in range(2):
            hidden = torch.randn(200, 64, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.randn(512, 64, dtype=torch.bfloat16, requires_grad=True)
            target = torch.randint(0, 512, (200,))
            logp_of = ck.linear_logp(hidden, weight, target, logits_memory=memory)
            logp_of.sum().backward()
            found.append(counts["planned"])
            assert hidden.grad is not None and weight.grad is not None
        plan_cache.clear()
    assert found[0] > 0 and found[1] == found[0]
