"""Rivals state the same mask as we do: FA4's arguments and FlexAttention's rule, evaluated here."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import NamedTuple

import pytest
import torch

from perf.attention import cudnn, fa4, flex, targets
from perf.attention.cases import BLOCK, Case, Problem
from perf.attention.rivals import RIVALS
from perf.core.bits import same_bytes
from perf.core.rival import Absent
from tests.oracles import sparse_attn as reference
from tests.perf.attention import stand_ins

MASKS = tuple(targets.MASKS)


class Lists(NamedTuple):
    """The fields of FA4's BlockSparseTensorsTorch, 4.0.0b36."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    cu_total_m_blocks: torch.Tensor | None = None
    cu_block_idx_offsets: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: torch.Tensor | None = None
    dq_write_order_full: torch.Tensor | None = None
    spt: bool | None = None


def dense(problem: Problem, which: str, given: dict) -> torch.Tensor:
    """Pairs that FA4's documented meaning of these arguments allows, [B, 1, S, S]."""
    s, batch = problem.case.s, problem.case.batch
    q, kv = torch.arange(s)[:, None], torch.arange(s)
    allowed = torch.ones(batch, 1, s, s, dtype=torch.bool)
    if given.get("causal"):
        allowed &= kv <= q
    if "window_size_left" in given:
        allowed &= (kv >= q - given["window_size_left"]) & (kv <= q + given["window_size_right"])
    lists = given.get("block_sparse_tensors")
    if lists is None:
        return allowed
    assert lists.block_size == (BLOCK, BLOCK)
    element = torch.ones_like(allowed)
    if "mask_mod" in given:
        b = torch.arange(batch)[:, None, None, None]
        element = given["mask_mod"](b, 0, q, kv, None, given.get("aux_tensors"))
    listed = torch.zeros_like(allowed)
    for b in range(batch):
        for kind, inside in (("mask", element.expand_as(allowed)), ("full", listed | True)):
            count, index = (getattr(lists, f"{kind}_block_{part}") for part in ("cnt", "idx"))
            assert count.dtype == index.dtype == torch.int32
            assert index.shape[2:] == (s // BLOCK, s // BLOCK)
            head = min(b, count.shape[0] - 1)
            for row in range(s // BLOCK):
                for col in index[head, 0, row, : count[head, 0, row]].tolist():
                    m, n = (row, col) if which == "fwd" else (col, row)
                    span = [slice(x * BLOCK, (x + 1) * BLOCK) for x in (m, n)]
                    at = (b, 0, *span)
                    assert not listed[at].any(), "a block in two lists"
                    listed[at] = inside[at]
    return listed


@pytest.fixture
def package(monkeypatch):
    """flash_attn.cute as far as the adapter uses it; the calls are kept."""
    calls = []
    modules = {
        "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": Lists},
        "flash_attn.cute.interface": {
            "_flash_attn_fwd": lambda *a, **k: calls.append((a, k)) or ("out", "lse", None, None),
            "_flash_attn_bwd": lambda *a, **k: calls.append((a, k)) or ("dq", "dk", "dv"),
        },
        "perf.attention.fa4_masks": {
            "document": lambda b, h, q, kv, info, aux: aux[0][b, q] == aux[0][b, kv],
            "prefix": lambda length: lambda b, h, q, kv, info, aux: (kv <= q) | (kv < length),
        },
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fa4, "_needs_cuda", lambda problem: None)
    fa4._prefix_rule.cache_clear()
    yield calls
    fa4._prefix_rule.cache_clear()


@pytest.mark.parametrize("which", ["fwd", "bwd"])
@pytest.mark.parametrize("mask", MASKS)
def test_fa4_is_given_the_same_mask(mask, which, package):
    problem = Problem(Case(mask, 512, 64, 2, 2, 1024), "cpu")
    inputs = fa4.arguments(problem, which)
    assert (dense(problem, which, inputs) == problem.mask.to_dense()).all()
    assert ("block_sparse_tensors" in inputs) == (mask not in fa4.DENSE)


@pytest.mark.parametrize("mask", MASKS)
def test_fa4_in_order_is_dense_only_and_says_why(mask, package):
    problem = Problem(Case(mask, 512, 64, 2, 2, 1024), "cpu")
    if mask in fa4.DENSE:
        fa4.backward(problem, True)(stand_ins.inputs(problem))
        assert package[0][1]["deterministic"] is True
    else:
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


@pytest.mark.parametrize(("mask", "kv_heads"), [("document", 2), ("causal", 1), ("full", 2)])
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


@pytest.fixture
def any_backend(monkeypatch):
    """SDPA by whatever torch has on a CPU, where cuDNN is not."""
    monkeypatch.setattr(cudnn, "_needs_cuda", lambda problem: None)
    monkeypatch.setattr(cudnn, "sdpa_kernel", lambda backend: contextlib.nullcontext())


@pytest.mark.parametrize(("mask", "kv_heads"), [("full", 2), ("causal", 2), ("causal", 1)])
def test_cudnn_is_given_the_same_mask(mask, kv_heads, any_backend):
    problem = Problem(stand_ins.case(mask, kv_heads=kv_heads), "cpu")
    backward = RIVALS["cudnn"].start["bwd"](problem)
    for seed in (0, 1, 0):
        t = stand_ins.inputs(problem, seed)
        want = stand_ins.right("bwd")(problem)(t)
        for got, exact in zip(backward(t), want, strict=True):
            assert got.shape == exact.shape
            assert (got - exact).double().norm() < 1e-2 * exact.double().norm()


@pytest.mark.parametrize("mask", [m for m in MASKS if m not in targets.CUDNN_MASKS])
def test_cudnn_has_two_masks(mask, any_backend):
    problem = Problem(stand_ins.case(mask), "cpu")
    with pytest.raises(Absent, match=f"no {mask} mask without a dense bias"):
        cudnn.backward(problem)(stand_ins.inputs(problem))
