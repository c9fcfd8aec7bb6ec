"""Launches of an op's walk are planned in the first run of its plan, one by one."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.logp import cpu, launch
from cute_kernels.runtime import dispatch, plan_cache
from cute_kernels.runtime.plan_cache import Plan
from perf.model import idle_host
from tests import plans
from tests.contract import same_bytes

VOCAB = 2100  # three blocks of a CPU


@pytest.fixture
def planned(monkeypatch):
    """Entries that were planned; CPU tensors count as those of a GPU, and plans keep the head."""
    plan_of = dispatch.plan

    def plan(entry, device, dtype, *operands):
        if entry == "logp_gradients":
            head = operands[1]._replace(weight=None, bias=None)

            def run(hidden, given, rows, upstream):
                kept = head._replace(weight=given.weight, bias=given.bias)
                return cpu.gradients(hidden, kept, rows, upstream)

            return Plan(run)
        return plan_of(entry, device, dtype, *operands)

    with plans.cached(monkeypatch, plan) as entries:
        yield entries


def step(seed: int, order: str = "chain", **options) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (16, VOCAB))
    target = torch.randint(0, VOCAB, (16,), generator=generator)
    logp = ck.linear_logp(hidden, weight, target, order=order, **options)
    logp.sum().backward()
    return [logp.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("order", ["chain", "tree"])
def test_each_launch_of_a_walk_is_planned_once(planned, monkeypatch, order):
    step(1, order)
    count = len(planned)
    assert planned.count("logp_gradients") > 2 and "logp_finish" in planned
    got = [step(seed, order) for seed in (1, 2)]
    assert len(planned) == count
    step(1, order, softcap=3.0)
    assert len(planned) == 2 * count
    monkeypatch.setattr(plan_cache, "on_gpu", lambda t: False)
    for seed, results in zip((1, 2), got, strict=True):
        assert all(map(same_bytes, results, step(seed, order)))


def test_a_defect_of_the_positions_is_seen(planned, monkeypatch):
    """A walk that takes a launch for another of its entry."""
    want = step(1)
    plan_cache.clear()

    def call(self, entry, like, *operands):
        run = self._plans.get(entry)
        if run is None:
            run = dispatch.plan(entry, like.device, like.dtype, *operands).run
            self._plans[entry] = run
        return run(*operands)

    monkeypatch.setattr(dispatch.Launches, "__call__", call)
    assert not all(map(same_bytes, step(1), want))


def policy_loss(hidden, weight, target, **options) -> torch.Tensor:
    tensors = {name: torch.randn(len(target)) for name in ("advantages", "old_logp")}
    return ck.linear_policy_loss(hidden, weight, target, reduction="sum", **tensors | options).loss


STEPS = {
    "linear_logp": lambda *head: ck.linear_logp(*head).sum(),
    "logits_memory": lambda *head: ck.linear_logp(*head, logits_memory=1 << 20).sum(),
    "policy loss": policy_loss,
    "every tensor": lambda *head: policy_loss(
        *head, reference_logp=torch.randn(200), token_weights=torch.rand(200), kl_weight=0.1,
        temperature=torch.rand(200) + 0.5, entropy_weight=0.1,
    ),
    "a function": lambda *head: policy_loss(*head, loss=lambda logp, entropy, **_: -logp * entropy),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_a_second_step_plans_nothing(monkeypatch, name):
    """Forward and backward, with SM90 kernels that do nothing; a function is planned each time."""
    asked = []
    with idle_host.pretended():
        plan_cache.clear()
        for kernel in ("_forward", "_few", "_gradient", "_finish"):

            def counted(*args, get=getattr(launch, kernel)):
                asked.append(args)
                return get(*args)

            monkeypatch.setattr(launch, kernel, counted)
        counts = []
        for _ in range(2):
            hidden = torch.randn(200, 64, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.randn(512, 64, dtype=torch.bfloat16, requires_grad=True)
            STEPS[name](hidden, weight, torch.randint(0, 512, (200,))).backward()
            counts.append(len(asked))
            assert hidden.grad is not None and weight.grad is not None
        plan_cache.clear()
    assert counts[0] > 0 and counts[1] == counts[0] * (1 + (name == "a function"))
