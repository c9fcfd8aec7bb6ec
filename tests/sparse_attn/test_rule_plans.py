"""Plans of attention by rule in the cache of its ops: used again, made again, and dropped."""

from __future__ import annotations

import copy

import pytest
import torch

from cute_kernels.runtime import dispatch, plan_cache, torch_ops
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import api, lowering, op
from tests.contract import same_bytes
from tests.sparse_attn import cases

S, D = 150, 64
KIND = lowering.OF_SEQUENCES
#: Name -> (mask, facts) of a call.
RULES = {"causal": ([], lowering.CAUSAL), "window": ([], lowering.window(40))}


@pytest.fixture
def planned(monkeypatch):
    """Names of the kernels that are planned, for CPU tensors that count as a GPU's."""
    names, plan = [], dispatch.plan

    def counted(name, *args):
        names.append(name)
        return plan(name, *args)

    monkeypatch.setattr(dispatch, "plan", counted)
    monkeypatch.setattr(plan_cache, "on_gpu", lambda t: True)
    plan_cache.clear()
    yield names
    plan_cache.clear()


def passes(mask: list, facts: list, order: tuple = ()) -> tuple[torch.Tensor, ...]:
    """Results of both ops, as a compiled graph calls them."""
    x = cases.inputs(1, 4, 2, S, S, D)
    q, k, v = (t.detach() for t in x.leaves())
    order = list(order)
    rest = mask, facts, order, KIND, True, D**-0.5, 0.0, None
    out, lse = torch.ops.cute_kernels.block_sparse_attention(q, k, v, *rest)
    backward = torch.ops.cute_kernels.block_sparse_attention_backward
    return out, lse, *backward(x.dout, None, q, k, v, out, lse, *rest)[:3]


@pytest.mark.parametrize("rule", RULES)
def test_a_second_call_plans_nothing(planned, rule):
    first = passes(*RULES[rule])
    assert planned == [op.NAME, f"{op.NAME}_backward"]
    later = passes(*RULES[rule])
    assert len(planned) == 2 and all(map(same_bytes, first, later))


def test_rules_have_plans_of_their_own(planned):
    causal, window = (passes(*RULES[rule]) for rule in ("causal", "window"))
    assert len(planned) == 4 and not same_bytes(causal[0], window[0])
    assert all(map(same_bytes, window, passes([], lowering.window(40))))
    wide = passes([], lowering.window(S))
    assert all(map(same_bytes, wide, causal)) and len(planned) == 6


def test_lists_of_a_caller_are_known_by_identity(planned):
    lowered = lowering.lower(BlockMask.causal(S, S))
    order = lowering.order_of(lowered, KIND, (1, S, S, 4, 2, D))
    for lists, count in ((lowered, 2), (lowered, 2), (copy.deepcopy(lowered), 4)):
        passes(lists.tensors(), lists.numbers(), order)
        assert len(planned) == count


def test_dropped_lists_take_their_plans_along(planned):
    passes(*RULES["causal"])
    lowering.cache.clear()
    passes(*RULES["causal"])
    assert len(planned) == 4


def test_a_capture_asks_for_its_lists(planned, monkeypatch):
    """A CUDA graph's replays read them, so the cache has to know of each use."""
    first, asked, get = passes(*RULES["causal"]), [], lowering.cache.get
    passes(*RULES["causal"])
    assert len(planned) == 2
    monkeypatch.setattr(lowering.cache, "get", lambda *a: (asked.append(a), get(*a))[1])
    passes(*RULES["causal"])
    assert asked == []
    monkeypatch.setattr(torch_ops, "capturing", lambda: True)
    captured = passes(*RULES["causal"])
    assert asked and len(planned) == 4 and all(map(same_bytes, first, captured))


@pytest.mark.parametrize("size", [1, 40, 128, S - 1, S, S + 1])
def test_a_window_counts_the_query_itself(size):
    """Forward and backward have the bytes of the mask with the size - 1 keys before a query."""
    x = cases.inputs(1, 4, 2, S, S, D)
    mask = BlockMask.sliding_window(S, S, left=size - 1, right=0)
    calls = (
        lambda q, k, v: api.causal_attention(q, k, v, window=size),
        lambda q, k, v: api.block_sparse_attention(q, k, v, mask, schedule="spt"),
    )
    results = []
    for call in calls:
        out = call(*x.leaves())
        results.append((out, *torch.autograd.grad(out, x.leaves(), x.dout)))
    assert all(map(same_bytes, *results))
