"""Plans that hold tensors: known by identity, dropped together, planned anew in a capture."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.compile import extension
from cute_kernels.runtime import plan_cache, torch_ops
from cute_kernels.runtime.caching import ByteCache
from cute_kernels.runtime.plan_cache import Plan
from tests.compile.toy import needs_linker
from tests.plans import cached

X = torch.ones(4)


class Lookups:
    """Op that adds a table, and the tensors of a list, to x; counts its checks and plans."""

    def __init__(self):
        self.table, self.checks, self.plans = torch.ones(4), 0, 0
        self.planned = torch_ops.Planned(
            self.plan, ["x", "lists"], ["Tensor", "List[Tensor]"], self.check
        )
        self.run = self.planned.run_function()
        self.in_c, self.holds_lists = None, True
        arguments = self.run, lambda call: setattr(self, "in_c", call)
        self.planned.on_caller(None, *arguments)

    def check(self, x, lists):
        self.checks += 1

    def plan(self, x, lists):
        self.plans += 1
        table = self.table
        holds = (table, *lists) if self.holds_lists else (table,)
        return Plan(lambda x, lists: sum(lists, x + table), holds=holds)

    def __call__(self, *args):
        return (self.in_c or self.run)(*args)


@pytest.fixture(params=[pytest.param("C", marks=needs_linker), "Python"])
def op(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(extension, "calls", lambda: None)
    with cached(monkeypatch):
        yield Lookups()


def test_lists_are_known_by_identity(op):
    one, other = [torch.ones(4)], [torch.ones(4)]
    for lists, plans in ((one, 1), (one, 1), (list(one), 1), (other, 2), (one, 2), ([], 3)):
        assert op(X, lists).tolist() == [2.0 + len(lists)] * 4
        assert op.plans == op.checks == plans
    assert (op.in_c is None) is (extension.calls() is None)


@pytest.mark.parametrize("capacity", [plan_cache.MAX_PLANS, 2])
def test_no_other_tensor_gets_the_id_of_a_held_one(op, capacity):
    op.planned.cache._capacity = capacity
    for i in range(50):
        assert op(X, [torch.full((4,), float(i))]).tolist() == [2.0 + i] * 4
        # A full cache starts over: none of its plans are left without their tensors.
        ids = [i for (options, *_) in op.planned.cache._plans for i in options[0]]
        assert set(plan_cache._held) >= set(ids)
    assert op.plans == 50


def test_lists_that_are_not_held_are_in_no_cached_plan(op):
    op.holds_lists = False
    lists = [torch.ones(4)]
    op(X, lists), op(X, lists)
    assert op.plans == 2 and not op.planned.cache._plans


@pytest.mark.parametrize("drop", [lambda: ByteCache("of this test", 1).clear(), plan_cache.let_go])
def test_plans_that_hold_tensors_are_dropped_together(op, drop):
    cache = plan_cache.PlanCache()
    cache.add("stays", (X,), len)
    op(X, []), drop(), op(X, [])
    assert op.plans == 2 and cache.find("stays", X) is len


def test_no_more_bytes_than_that_are_held(op, monkeypatch):
    monkeypatch.setattr(plan_cache, "HELD_BYTES", 3 * 16)
    one, other, large = [torch.ones(4)], [torch.ones(4)], [torch.ones(4)] * 2 + [torch.zeros(4)]
    op(X, one), op(X, other), op(X, one)
    assert op.plans == 2
    op(X, [torch.ones(4)]), op(X, one)
    assert op.plans == 4
    op(X, [*large, *one]), op(X, [*large, *one]), op(X, one)
    assert op.plans == 6


def test_a_capture_plans_anew(op, monkeypatch):
    op(X, [])
    monkeypatch.setattr(torch_ops, "capturing", lambda: True)
    op(X, []), op(X, [])
    assert op.plans == 3


#: What a part becomes, and the test that kills it.
MUTANTS = {
    "tensors of a plan are not counted": (
        (plan_cache, "_hold", lambda tensors: True),
        lambda op, patch: test_no_more_bytes_than_that_are_held(op, patch),
    ),
    "plans stay": (
        (plan_cache.PlanCache, "let_go", lambda self: None),
        lambda op, patch: test_plans_that_hold_tensors_are_dropped_together(op, plan_cache.let_go),
    ),
    "a capture runs the cached plan": (
        (torch_ops.Planned, "_asking_captures", lambda self, run: run),
        lambda op, patch: test_a_capture_plans_anew(op, patch),
    ),
    "ids of tensors that no plan holds": (
        (torch_ops, "_holds_lists", lambda plan, args: True),
        lambda op, patch: test_lists_that_are_not_held_are_in_no_cached_plan(op),
    ),
    "every list is like another": (
        (torch_ops, "_constant", lambda value: 0),
        lambda op, patch: test_lists_are_known_by_identity(op),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(monkeypatch, name):
    part, test = MUTANTS[name]
    monkeypatch.setattr(extension, "calls", lambda: None)
    with cached(monkeypatch), monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(*part)
        test(Lookups(), patch)
