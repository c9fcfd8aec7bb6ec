"""f(gate) up in one op with the bytes of two: values, gradients, graphs, and plans."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from cute_kernels.errors import DtypeError, ShapeError
from cute_kernels.rowwise import config, op
from cute_kernels.runtime import plan_cache
from tests.contract import same_bytes

from .cases import ACTIVATIONS, BF16, DTYPES, drawn, spread

each_kind = pytest.mark.parametrize("kind", config.GATES)


def operands(dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    """(gate, up, dy), zeros and infinities among them."""
    gate = spread(3, 40, dtype=dtype)
    gate[0, :4] = torch.tensor([0.0, -0.0, 30.0, -30.0])
    up, dy = (drawn(3, 40, seed=seed, dtype=dtype) for seed in (1, 2))
    up[1, :3], dy[1, 3:6] = torch.tensor([0.0, -0.0, torch.inf]), 0.0
    return gate, up, dy


def results(function, gate, up, dy) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def fused(kind: str):
    return lambda gate, up: op.gated(gate, up, kind, True)


def in_two(kind: str):
    return lambda gate, up: ACTIVATIONS[kind](gate) * up


@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_two_ops(kind, dtype):
    args = operands(dtype)
    got, want = results(fused(kind), *args), results(in_two(kind), *args)
    assert all(map(same_bytes, got, want))
    strided = [t.mT.contiguous().mT for t in args]
    assert all(map(same_bytes, results(fused(kind), *strided), want))


@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_both(kind, dtype):
    gate, up, _ = operands(dtype)
    got = op.gated_rows(torch.cat((gate, up), -1), kind)
    assert same_bytes(got, in_two(kind)(gate, up)) and got.is_contiguous()
    none = op.gated_rows(gate.new_empty(2, 0, 8), kind)
    assert none.shape == (2, 0, 4) and none.dtype == dtype


@each_kind
def test_one_rounding_is_seen(kind):
    """The public function, which rounds once, has other bytes."""
    args = operands()
    got = results(lambda gate, up: op.gated(gate, up, kind, False), *args)
    assert not any(map(same_bytes, got, results(in_two(kind), *args)))


def test_gradients_that_are_asked_for():
    gate, up, dy = operands()
    want = results(in_two("silu"), gate, up, dy)
    for i, leaf in enumerate((gate, up)):
        leaf = leaf.detach().requires_grad_()
        pair = (leaf, up) if i == 0 else (gate, leaf)
        (got,) = torch.autograd.grad(fused("silu")(*pair), leaf, dy)
        assert same_bytes(got, want[1 + i])


@each_kind
def test_opcheck(kind):
    gate, up, dy = operands()
    ops = torch.ops.cute_kernels
    leaves = gate.requires_grad_(), up.requires_grad_()
    cases = [
        (ops.gated, (*leaves, kind, True)),
        (ops.gated, (gate.detach()[:0], up.detach()[:0], kind, True)),
        (ops.gated_backward, (dy, gate.detach(), up.detach(), kind, True)),
    ]
    for target, args in cases:
        assert set(opcheck(target.default, args).values()) == {"SUCCESS"}
        assert torch.Tag.pt2_compliant_tag in target.default.tags


def test_graphs_and_plans(monkeypatch):
    """A compiled graph, and calls by a cached plan, have the bytes of the first call."""
    args = operands()
    want = results(fused("silu"), *args)
    torch._dynamo.reset()
    run = torch.compile(fused("silu"), fullgraph=True, backend="aot_eager")
    assert all(map(same_bytes, results(run, *args), want))
    torch._dynamo.reset()
    monkeypatch.setattr(plan_cache, "on_gpu", lambda t: True)
    plan_cache.clear()
    later = [results(fused("silu"), *args) for _ in range(3)]
    plan_cache.clear()
    assert all(same_bytes(*pair) for got in later for pair in zip(got, want, strict=True))


def test_refusals():
    gate, up, _ = operands()
    with pytest.raises(ShapeError, match="up"):
        op.gated(gate, up[:2], "silu", True)
    with pytest.raises(DtypeError, match="up"):
        op.gated(gate, up.float(), "silu", True)
