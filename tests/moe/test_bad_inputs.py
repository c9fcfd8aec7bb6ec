"""Bad inputs of moe: the exception, and what its message names."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailable,
    DtypeError,
    ShapeError,
    UnsupportedTransformError,
)

INT32 = torch.int32
X, W = torch.randn(6, 4), torch.randn(2, 3, 4)
OFFSETS = torch.tensor([0, 2, 6], dtype=INT32)
LOGITS = torch.randn(6, 8)
INDICES = torch.tensor([[0, 1]] * 6)
ROWS, PERMUTATION = ck.moe.permute(X, INDICES, 2)


def grouped(x=X, weight=W, offsets=OFFSETS, bias=None, **options):
    return lambda: ck.grouped_linear(x, weight, offsets, bias, **options)


def offsets(*values, dtype=INT32):
    return torch.tensor(values, dtype=dtype)


def route(logits=LOGITS, k=2, **options):
    return lambda: ck.moe.route(logits, k, **options)


def second_gradient():
    weight = W.clone().requires_grad_()
    y = ck.grouped_linear(X, weight, OFFSETS, main_grad=torch.zeros(2, 3, 4))
    torch.autograd.grad(y.sum(), weight, create_graph=True)


TABLE = [
    (grouped(x=X[None]), ShapeError, "x: expected 2 dimensions [T, K]"),
    (grouped(weight=W[0]), ShapeError, "weight: expected 3 dimensions [E, N, K]"),
    (grouped(x=X[:, :3]), ShapeError, "x: expected last dimension 4"),
    (grouped(weight=W.half()), DtypeError, "weight: expected torch.float32, the dtype of x"),
    (grouped(weight=torch.randn(0, 3, 4)), ShapeError, "weight: expected 1 to 1024 experts, got 0"),
    (grouped(weight=torch.randn(1025, 1, 4)), ShapeError, "1 to 1024 experts, got 1025"),
    (grouped(offsets=OFFSETS[1:]), ShapeError, "expert_offsets: expected shape [3], E + 1"),
    (grouped(offsets=OFFSETS[None]), ShapeError, "expert_offsets: expected 1 dimension"),
    (grouped(offsets=offsets(1, 2, 6)), ArgumentValueError, "expected a first offset of 0, got 1"),
    (grouped(offsets=offsets(0, 7, 6)), ArgumentValueError, "do not descend, got 7, 6 at 1 and 2"),
    (grouped(offsets=offsets(0, 2, 7)), ArgumentValueError, "a last offset of at most 6, T, got 7"),
    (grouped(bias=torch.randn(3)), ShapeError, "bias: expected 2 dimensions [E, N]"),
    (grouped(bias=torch.randn(3, 2)), ShapeError, "bias: expected shape [2, 3]"),
    (grouped(order="ring"), ArgumentValueError, "order: expected one of 'chain', 'tree'"),
    (second_gradient, UnsupportedTransformError, "main_grad"),
    (lambda: torch.func.vmap(lambda x: ck.grouped_linear(x, W, OFFSETS))(X[None]),
     UnsupportedTransformError, "vmap"),
    (route(logits=LOGITS[0]), ShapeError, "logits: expected 2 dimensions [T, E]"),
    (route(k=0), ArgumentValueError, "k: expected 1 to 8 (E), got 0"),
    (route(k=9), ArgumentValueError, "k: expected 1 to 8 (E), got 9"),
    (route(score="relu"), ArgumentValueError, "score: expected one of 'softmax', 'sigmoid'"),
    (route(groups=4), ArgumentValueError, "topk_groups: expected a number, as groups is one"),
    (route(topk_groups=4), ArgumentValueError, "groups: expected a number, as topk_groups is one"),
    (route(groups=3, topk_groups=1), ArgumentValueError, "groups: expected a divisor of E = 8"),
    (route(groups=4, topk_groups=5), ArgumentValueError, "topk_groups: expected 1 to 4 (groups)"),
    (route(k=3, groups=4, topk_groups=1), ArgumentValueError, "that hold k = 3, got 1"),
    (route(scale=float("nan")), ArgumentValueError, "scale: expected a finite number"),
    (route(bias=torch.randn(7)), ShapeError, "bias: expected shape [8], the E of logits"),
    (route(indices=INDICES[:2]), ShapeError, "indices: expected shape [6, 2], [T, k]"),
    (route(indices=INDICES.float()), DtypeError, "indices: expected one of"),
    (lambda: ck.moe.permute(X[:5], INDICES, 2), ShapeError, "indices: expected 5 rows"),
    (lambda: ck.moe.permute(X, INDICES[:, :0], 2), ShapeError, "at least 1 expert a token"),
    (lambda: ck.moe.permute(X, INDICES, 1025), ArgumentValueError, "experts: expected 1 to 1024"),
    (lambda: ck.moe.combine(ROWS[1:], None, PERMUTATION), ShapeError, "rows: expected 12 rows"),
    (lambda: ck.moe.combine(ROWS, torch.ones(6, 3), PERMUTATION), ShapeError, "weights: expected"),
    (lambda: ck.moe.combine(ROWS, None, tuple(PERMUTATION)), ArgumentTypeError, "permutation"),
    (lambda: ck.moe.combine(ROWS, None, PERMUTATION._replace(offsets=OFFSETS[:0])),
     ShapeError, "permutation.offsets: expected at least 1"),
    (lambda: ck.moe.load_balance_loss(LOGITS[:0], INDICES[:0]), ShapeError, "at least 1 row"),
    (lambda: ck.moe.load_balance_loss(LOGITS.half(), INDICES), DtypeError, "scores: expected"),
    (lambda: ck.moe.z_loss(LOGITS[:0]), ShapeError, "logits: expected at least 1 row"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), TABLE, ids=[row[2] for row in TABLE])
def test_refused_by_name(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def test_another_device_is_named(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "triton")
    for call in (grouped(), route()):
        with pytest.raises(BackendUnavailable, match="no backend for cpu"):
            call()
