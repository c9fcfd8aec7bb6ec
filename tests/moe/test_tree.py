"""``grouped_linear`` on the CPU: bytes of ck.linear, gradients, the order tree, leaves."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import UnsupportedTransformError
from cute_kernels.gemm import cpu as gemm
from cute_kernels.moe import cpu, op
from tests import contract
from tests.contract import same_bytes
from tests.oracles import moe as oracle

from . import tree_cases
from .cases import BF16, FP16, FP32, LOADS, drawn, offsets_of, operands
from .cpu_copies import engine_with

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.clone().requires_grad_()


@DTYPES
@pytest.mark.parametrize("load", LOADS)
def test_rows_of_tree(load, dtype):
    tree_cases.rows_of_tree(cpu, load, dtype, gemm=gemm)


@pytest.mark.parametrize(("load", "n", "k"), tree_cases.SHAPES)
def test_shapes(load, n, k):
    tree_cases.rows_of_tree(cpu, load, BF16, n, k, gemm=gemm)


@DTYPES
@pytest.mark.parametrize(
    "check",
    [tree_cases.leaves_of_ranks, tree_cases.neighbours, tree_cases.layouts],
    ids=lambda check: check.__name__,
)
def test_products(check, dtype):
    check(cpu, dtype)


def test_minus_zeros():
    tree_cases.minus_zeros(cpu)


@DTYPES
def test_permuted_rows(dtype):
    tree_cases.permuted(lambda *operands: ck.grouped_linear(*operands, order="tree"), dtype)


ORDERS = pytest.mark.parametrize("order", ["chain", "tree"])


@DTYPES
@ORDERS
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("load", ["uneven", "one expert"])
def test_rows_and_gradients_of_linear(load, main_grad, order, dtype):
    """y, dx, dW and dbias of each expert are those of ``ck.linear`` in the same order."""
    x, weight, offsets, bias, dy = operands(load, dtype, 136, 264)
    state = drawn(*weight.shape, seed=7) if main_grad else None
    start = state.clone() if main_grad else None
    inputs = tuple(map(leaf, (x, weight, bias)))
    options = {"order": order, "main_grad": state}
    y = ck.grouped_linear(inputs[0], inputs[1], offsets, inputs[2], **options)
    y.backward(dy)
    for expert, rows in oracle.experts(offsets):
        if rows.start == rows.stop:
            assert state is None or same_bytes(state[expert], start[expert])
            continue
        one = tuple(map(leaf, (x[rows], weight[expert], bias[expert])))
        into = start[expert].clone() if main_grad else None
        want = ck.linear(*one, order=order, main_grad=into)
        want.backward(dy[rows])
        assert same_bytes(y.detach()[rows], want.detach())
        assert same_bytes(inputs[0].grad[rows], one[0].grad)
        assert same_bytes(inputs[2].grad[expert], one[2].grad)
        if main_grad:
            assert inputs[1].grad is None and same_bytes(state[expert], into)
        else:
            assert same_bytes(inputs[1].grad[expert], one[1].grad)


def test_the_orders_differ():
    """The control: chain and tree have other bytes, so the tests above can tell them apart."""
    x, weight, offsets, bias, dy = operands("uneven", BF16, 136, 264)
    found = {}
    for order in ("chain", "tree"):
        rows, w = leaf(x.float()), leaf(weight.float())
        y = ck.grouped_linear(rows, w, offsets, bias.float(), order=order)
        y.backward(dy.float())
        found[order] = y.detach(), rows.grad, w.grad
    y, dx, dw = (same_bytes(*pair) for pair in zip(*found.values(), strict=True))
    assert (y, dx, dw) == (False, False, True)


@ORDERS
def test_double_backward(order):
    """Gradients of gradients are those of ``ck.linear`` by expert."""
    x, weight, offsets, bias, dy = operands("few", FP32, 136, 264)
    results = []
    for grouped in (True, False):
        inputs = tuple(map(leaf, (x, weight, bias, dy)))
        if grouped:
            y = ck.grouped_linear(inputs[0], inputs[1], offsets, inputs[2], order=order)
        else:
            y = torch.cat([
                ck.linear(inputs[0][rows], inputs[1][e], inputs[2][e], order=order)
                for e, rows in oracle.experts(offsets)
            ])  # fmt: skip
        first = torch.autograd.grad(y, inputs[:3], inputs[3], create_graph=True)
        last = inputs[0], inputs[1], inputs[3]
        results.append(torch.autograd.grad(sum((g**2).sum() for g in first), last))
    for got, want in zip(*results, strict=True):
        assert same_bytes(got + 0.0, want + 0.0)  # zeros of experts without rows


def test_battery():
    weight = drawn(4, 72, 264, seed=1, dtype=BF16)

    def run(rows):
        chosen = 2 * (rows[:, 0] > 0).int() + (rows[:, 1] > 0).int()
        offsets, order, positions = oracle.permutation(chosen[:, None], len(weight))
        out = ck.grouped_linear(rows[order.long()], weight, offsets, order="tree")
        return out[positions[:, 0].long()]

    row_op = contract.RowOp("grouped_linear", run, 264, BF16)
    assert contract.check_rows(row_op, 70, 3) > 50


@pytest.mark.parametrize(("tokens", "n", "k"), [(0, 8, 32), (6, 0, 32), (6, 8, 0)])
def test_empty(tokens, n, k):
    x, weight, offsets = torch.randn(tokens, k), torch.randn(2, n, k), offsets_of([tokens, 0])
    bias = torch.randn(2, n)
    y = ck.grouped_linear(x, weight, offsets, bias, order="tree")
    assert same_bytes(y, ck.grouped_linear(x, weight, offsets, bias))
    assert op.grouped_leaf_sums(x, weight, offsets, 16).shape == (-(-k // 16), tokens, n)


def test_leaves_have_no_gradient():
    x, weight, offsets, _, _ = operands("few", FP32, 24, 40)
    with pytest.raises(UnsupportedTransformError, match="no gradient"):
        op.grouped_leaf_sums(leaf(x), weight, offsets, 16)


def test_compiled():
    """A graph of torch.compile keeps the order."""
    x, weight, offsets, bias, _ = operands("uneven", BF16, 136, 264)
    want = ck.grouped_linear(x, weight, offsets, bias, order="tree")

    def call(x):
        return ck.grouped_linear(x, weight, offsets, bias, order="tree")

    assert same_bytes(torch.compile(call, backend="aot_eager", fullgraph=True)(x), want)


MUTANTS = {
    "chain_for_tree": ("partial(grouped_gemm, order=TREE)", "partial(grouped_gemm, order=ORDER)",
                       lambda e: tree_cases.rows_of_tree(e, "uneven", FP32, 40, 600, gemm=gemm)),
    "leaves_of_the_slice": ("products.leaf_sums(a[rows], b[expert], length)",
                            "products.leaf_sums(a[rows], b[expert], "
                            "max(16, a.shape[1] // 128 * 16))[: len(out)]",
                            lambda e: tree_cases.leaves_of_ranks(e, FP32)),
    "expert_0": ("products.leaf_sums(a[rows], b[expert], length)",
                 "products.leaf_sums(a[rows], b[0], length)",
                 lambda e: tree_cases.rows_of_tree(e, "few", BF16, gemm=gemm)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(tmp_path, name):
    old, new, check = MUTANTS[name]
    with pytest.raises((AssertionError, RuntimeError)):
        check(engine_with(tmp_path, old, new))
