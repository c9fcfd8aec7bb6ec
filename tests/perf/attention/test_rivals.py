"""Rivals: FlexAttention states our mask and times the backward alone; masks that others lack.

What each rival computes is checked against float64 in every run (`check.whole`, test_check.py).
"""

from __future__ import annotations

import pytest
import torch

from perf.attention import cudnn, fa4, flex, targets
from perf.attention.cases import Case, Problem
from perf.attention.rivals import RIVALS
from perf.core.bits import same_bytes
from perf.core.rival import Absent
from tests.oracles import sparse_attn as reference
from tests.perf.attention import stand_ins

MASKS = tuple(targets.MASKS)


@pytest.mark.parametrize("mask", [m for m in MASKS if m not in fa4.DENSE])
def test_fa4_in_order_is_dense_only_and_says_why(mask):
    problem = Problem(Case(mask, 512, 64, 2, 2, 1024), "cpu")
    with pytest.raises(Absent, match="Deterministic not implemented for block-sparse backward"):
        fa4.backward(problem, True)


@pytest.mark.parametrize("mask", [m for m in MASKS if m != "full"])
def test_flex_evaluates_the_same_mask(mask):
    problem = Problem(Case(mask, 512, 64, 2, 2, 1024), "cpu")
    b = torch.arange(problem.mask.shape[0])[:, None, None, None]
    q, kv = torch.arange(512)[:, None], torch.arange(512)
    allowed = flex.rule(problem)(b, 0, q, kv).expand(problem.mask.shape[0], 1, 512, 512)
    assert (allowed == problem.mask.to_dense()).all()


@pytest.fixture
def eager(monkeypatch):
    """FlexAttention without the compiler and, since it has none on a CPU, with a backward.

    The mask is read from the BlockMask that the adapter made, layout and group as it passed them.
    """
    calls = []

    def attention(q, k, v, *, block_mask, scale, enable_gqa, return_lse):
        assert return_lse and enable_gqa == (q.shape[1] != k.shape[1])
        calls.append(1)
        allowed = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
        if block_mask is not None:
            b = torch.arange(block_mask.shape[0])[:, None, None, None]
            index, across = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
            allowed = block_mask.mask_mod(b, 0, index, across)
        first = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = reference.attention(*first, allowed, scale=scale)
        return out.transpose(1, 2).to(q.dtype), lse.float()

    monkeypatch.setattr(flex, "_compiled", lambda: attention)
    return calls


@pytest.mark.parametrize(("mask", "kv_heads"), [("document", 2), ("causal", 1)])
def test_flex_runs_the_pass_that_is_asked_for(mask, kv_heads, eager):
    """A backward runs again and again on one graph, without another forward."""
    problem = Problem(Case(mask, 256, 64, 2, kv_heads, 512), "cpu")
    t = stand_ins.inputs(problem)
    allowed = problem.mask.to_dense()
    with torch.no_grad():
        out = RIVALS["flex"].start["fwd"](problem)(t)[0]
        backward = RIVALS["flex"].start["bwd"](problem)
        first = backward(t)
        ran = len(eager)
        again = backward(t)
        assert len(eager) == ran, "the second call is the backward alone"
        other = backward(stand_ins.inputs(problem, seed=1))
    want = stand_ins.dense(problem, t, "fwd", allowed)[0]
    assert (out.double() - want.double()).norm() < 1e-2 * want.double().norm()
    for x, y, exact in zip(first, again, stand_ins.dense(problem, t, "bwd", allowed), strict=True):
        assert same_bytes(x, y)
        assert (x.double() - exact.double()).norm() < 1e-2 * exact.double().norm()
    assert not torch.equal(other[0], first[0])


@pytest.mark.parametrize("mask", [m for m in MASKS if m not in targets.CUDNN_MASKS])
def test_cudnn_has_two_masks(mask, monkeypatch):
    monkeypatch.setattr(cudnn, "_needs_cuda", lambda problem: None)
    problem = Problem(stand_ins.case(mask), "cpu")
    with pytest.raises(Absent, match=f"no {mask} mask without a dense bias"):
        cudnn.backward(problem)(stand_ins.inputs(problem))
