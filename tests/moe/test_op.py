"""The public functions of moe on the CPU: bytes of ck.linear, gradients, battery."""

from __future__ import annotations

import math

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import UnsupportedTransformError
from cute_kernels.moe import op
from tests import contract
from tests.contract import bits, same_bytes
from tests.old_memory import old_memory
from tests.oracles import moe as oracle

from . import layer
from .cases import BF16, FP16, FP32, INT32, drawn, offsets_of, operands, permuted

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.clone().requires_grad_()


def test_battery_of_a_layer():
    assert contract.check_rows(layer.row_op(), 70, seed=3) > 50


def test_micro_batches():
    """Token streams of all experts, cut at multiples of 16, into one main_grad."""
    experts, tokens = 3, 90
    weight = leaf(drawn(experts, 24, 40, seed=1, dtype=BF16))
    x, dy = (drawn(experts, tokens, n, seed=2 + n, dtype=BF16) for n in (40, 24))

    def run(start, pieces):
        state = start.clone()
        for piece in pieces:
            rows, upstream = x[:, piece].flatten(0, 1), dy[:, piece].flatten(0, 1)
            offsets = offsets_of([len(rows) // experts] * experts)
            ck.grouped_linear(rows, weight, offsets, main_grad=state).backward(upstream)
        return state

    op = contract.SumOp("grouped_linear dW", run, tokens, drawn(experts, 24, 40, seed=6))
    assert contract.check_splits(op, seed=1) >= 6 and weight.grad is None


def test_replay():
    """Given indices give the weights of the choice, in any order of the slots."""
    logits = drawn(20, 9, seed=1)
    chosen = ck.moe.route(logits, 4)
    for dtype in (torch.int64, INT32):
        indices = chosen.indices.to(dtype, copy=True)
        again = ck.moe.route(logits, 4, indices=indices)
        assert same_bytes(again.weights, chosen.weights)
        indices.zero_()  # the caller's tensor is no part of the result
        assert same_bytes(again.indices, chosen.indices)
    wide = torch.tensor([[2**32, 1], [-(2**40), 2**31]])
    again = ck.moe.route(logits[:2], 2, indices=wide)
    assert again.weights.count_nonzero() == 1 and again.indices.dtype == INT32
    other = ck.moe.route(logits, 4, indices=chosen.indices.flip(1))
    assert same_bytes(other.weights, chosen.weights.flip(1))


def test_slots_without_an_expert():
    """With NaN where grouped products leave rows of no expert on a GPU."""

    def product(rows, weight, offsets):
        y = ck.grouped_linear(rows, weight, offsets)
        stray = torch.arange(len(y)) >= offsets[-1]
        return torch.where(stray[:, None], torch.nan, y)

    layer.with_strays(FP32, product=product)


@pytest.mark.parametrize("order", ["chain", "tree"])
@pytest.mark.parametrize(("tokens", "n", "k"), [(0, 4, 5), (6, 0, 5), (6, 4, 0)])
def test_sizes_of_zero(tokens, n, k, order):
    experts = 3
    x, weight = leaf(torch.randn(tokens, k)), leaf(torch.randn(experts, n, k))
    bias, offsets = leaf(torch.randn(experts, n)), offsets_of([tokens - 2 * (tokens > 0), 0, 2])
    offsets = offsets if tokens else torch.zeros(experts + 1, dtype=INT32)
    y = ck.grouped_linear(x, weight, offsets, bias, order=order)
    y.sum().backward()
    assert op.grouped_leaf_sums(x.detach(), weight.detach(), offsets, 16).shape == (
        -(-k // 16),
        tokens,
        n,
    )
    assert y.shape == (tokens, n) and weight.grad.shape == weight.shape
    if tokens and n:
        assert k or same_bytes(y.detach(), bias.detach().repeat_interleave(offsets.diff(), 0))
        assert bias.grad[:, 0].tolist() == offsets.diff().tolist()


def test_no_tokens():
    p = {name: leaf(t) for name, t in layer.parameters(BF16).items()}
    x = leaf(torch.randn(0, layer.WIDTH, dtype=BF16))
    with old_memory(1000):
        y = layer.experts(x, p)
        y.sum().backward()
    assert y.shape == (0, layer.WIDTH) == x.grad.shape
    assert not any(bits(t.grad).any() for t in p.values())


def test_weights_of_rows_without_columns_have_no_gradient():
    x, weights = leaf(torch.zeros(3, 0)), leaf(drawn(3, 2, seed=1))
    indices = torch.tensor([[0, 3], [1, 2], [2, 0]], dtype=INT32)
    with old_memory(1000):
        rows, permutation = ck.moe.permute(x, indices, 4)
        ck.moe.combine(rows, weights, permutation).sum().backward()
    assert not bits(weights.grad).any()


OPS = torch.ops.cute_kernels


def test_the_gradient_of_a_bias_without_tokens_is_zero():
    with old_memory(1000):
        gradient = OPS.grouped_dbias(torch.zeros(0, 5), torch.zeros(4, dtype=INT32))
    assert gradient.shape == (3, 5) and not bits(gradient).any()


def test_a_gradient_that_is_main_grad_is_refused():
    """By the op itself, which is what a compiled graph calls."""
    state = drawn(3, 4, 4, seed=1)
    x, offsets = drawn(4, 4, seed=2), offsets_of([2, 0, 2])
    for dy in (state[0], state[1].mT):
        with pytest.raises(ck.errors.AliasError, match="main_grad"):
            OPS.grouped_dw_(dy, x, offsets, state)
    before = state.clone()
    OPS.grouped_dw_(before[0], x, offsets, state)
    assert same_bytes(state[1], before[1]) and not same_bytes(state, before)


@pytest.mark.parametrize("dynamic", [None, True])
def test_route_compiles_with_dynamic_numbers(dynamic):
    def route(logits, scale):
        return ck.moe.route(logits, 2, scale=scale).weights

    compiled = torch.compile(route, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows, scale in ((6, 1.0), (9, 2.5), (4, 0.3)):
        logits = drawn(rows, 4, seed=rows)
        assert same_bytes(compiled(logits, scale), route(logits, scale))


def test_contract_id_follows_linear(monkeypatch):
    before = ck.contract_id("grouped_linear"), ck.contract_id("moe")
    threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads + 1)
        assert ck.contract_id("grouped_linear") != before[0]
        assert ck.contract_id("moe") == before[1]


def test_weights_are_those_of_transformers_routers():
    """Weights of Mixtral's and DeepSeek-V3's formulas, within fp32's rounding."""
    logits = drawn(40, 16, seed=1)
    r = ck.moe.route(logits, 4)
    want, indices = logits.softmax(-1).topk(4)
    assert torch.equal(indices.int(), r.indices)
    assert (r.weights - want / want.sum(1, keepdim=True)).abs().max() <= 2.0**-20
    bias = drawn(16, seed=3)
    r = ck.moe.route(logits, 4, score="sigmoid", bias=bias, groups=4, topk_groups=2, scale=2.5)
    scores = logits.sigmoid()
    ranked = (scores + bias).view(40, 4, 4)
    best = ranked.topk(2).values.sum(-1).topk(2).indices
    mask = torch.zeros(40, 4).scatter_(1, best, 1).repeat_interleave(4, 1).bool()
    chosen = (scores + bias).masked_fill(~mask, -math.inf).topk(4).indices
    assert torch.equal(chosen.int(), r.indices)
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * 2.5
    assert (r.weights - weights).abs().max() <= 2.0**-19


# ---- the order tree, against ck.linear ----------------------------------------------------------


@DTYPES
def test_permuted_rows(dtype):
    permuted(lambda *operands: ck.grouped_linear(*operands, order="tree"), dtype)


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


def test_leaves_have_no_gradient():
    x, weight, offsets, _, _ = operands("few", FP32, 24, 40)
    with pytest.raises(UnsupportedTransformError, match="no gradient"):
        op.grouped_leaf_sums(leaf(x), weight, offsets, 16)
