"""Plans of attention by rule in the cache of its ops."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.runtime import dispatch, plan_cache
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
