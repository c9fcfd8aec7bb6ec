"""The torch ops of gemm: double backward, leading dimensions, micro-batches."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.gemm import op
from cute_kernels.runtime import dispatch
from cute_kernels.runtime.plan_cache import Plan
from tests.contract import same_bytes
from tests.oracles import gemm as reference

M, N, K = 21, 24, 40
ORDER = "chain"


def tensors(dtype=torch.bfloat16, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (M, K), (N, K), (N,)
    out = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    return [t.requires_grad_(grad) for t in out]


def test_double_backward_against_float64():
    """The ops are closed under differentiation: a gradient penalty works."""

    def penalty(forward, x, w, b):
        y = forward(x, w, b)
        (gx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return gx.square().sum()

    ours = tensors(torch.float32)
    exact = [t.detach().double().requires_grad_() for t in ours]
    got = torch.autograd.grad(penalty(ck.linear, *ours), ours)
    want = torch.autograd.grad(penalty(reference.gemm, *exact), exact)
    for a, e in zip(got, want, strict=True):
        assert (a.double() - e).abs().max() <= 1e-4 * e.abs().max()


def test_matmul_is_linear_of_the_transpose():
    x, w, _ = tensors(grad=False)
    a, b = x.clone().requires_grad_(), w.mT.clone().requires_grad_()
    y = ck.matmul(a, b)
    assert same_bytes(y, ck.linear(x, w))
    y.float().square().sum().backward()
    x.requires_grad_(), w.requires_grad_()
    ck.linear(x, w).float().square().sum().backward()
    assert same_bytes(a.grad, x.grad) and same_bytes(b.grad, w.grad.mT)


@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 3, K), (2, 0, K), (1, 1, 2, 2, K)])
def test_leading_dimensions(shape):
    _, w, b = tensors(grad=False)
    x = torch.randn(shape).bfloat16()
    y = ck.linear(x, w, b)
    assert y.shape == (*shape[:-1], N) and y.is_contiguous()
    assert same_bytes(y.reshape(-1, N), ck.linear(x.reshape(-1, K), w, b))


def test_autocast_casts_nothing_in_the_op_of_a_backward():
    _, w, _ = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = op.linear_dx(torch.ones(2, N), w.detach(), ORDER)
    assert same_bytes(inside, op.linear_dx(torch.ones(2, N), w.detach(), ORDER))


def test_a_cut_elsewhere_shows():
    """The control: cuts that are no multiples of 16 are outside the promise, and differ."""
    x, g = torch.randn(100, K), torch.randn(100, N)
    one, two = torch.zeros(N, K), torch.zeros(N, K)
    op.linear_dw_(g, x, one, ORDER)
    for p in (slice(0, 7), slice(7, 100)):
        op.linear_dw_(g[p], x[p], two, ORDER)
    assert not same_bytes(one, two)


def test_a_dual_level_without_tangents_is_no_error():
    x, w, _ = tensors(torch.float32, grad=False)
    want = ck.linear(x, w)
    with torch.autograd.forward_ad.dual_level():
        assert same_bytes(ck.linear(x, w), want)


def test_the_order_reaches_every_launcher(monkeypatch):
    """Checked at the door only: what an op is given is what its product is asked for.

    But for sums over tokens, which are chains in either order.
    """
    orders = []

    def product(a, b, bias, accumulator, order, out=None):
        orders.append(order)
        return a.new_empty(a.shape[0], b.shape[0]) if accumulator is None else accumulator

    monkeypatch.setattr(dispatch, "launcher", lambda *_: product)
    monkeypatch.setattr(dispatch, "plan", lambda *_: Plan(product))
    x, w, dy = torch.randn(5, 8), torch.randn(6, 8), torch.randn(5, 6)
    op.linear(x, w, None, None, "tree")
    op.linear_dx(dy, w, "two")
    op.linear_dw(dy, x, "three")
    op.linear_dw_(dy, x, torch.zeros(6, 8), "four")
    assert orders == ["tree", "two", "chain", "chain"]
