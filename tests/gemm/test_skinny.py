"""`ck.skinny_linear` and the order ``tree`` on the CPU: rows, biases, accuracy, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import (
    NondeterministicError,
)
from cute_kernels.gemm import cpu, op
from cute_kernels.runtime import reduction
from cute_kernels.schedulers.tiles import leaves
from tests import contract
from tests.contract import ContractViolation, RowOp
from tests.oracles import gemm as reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEED = 23
#: Of vLLM's tests of its skinny kernels (anchors): K, N, and numbers of rows.
KS, NS, ROWS = (2880, 2888, 3072, 3080), (128, 144, 256, 272, 640, 656), (13, 16, 32, 64, 103, 128)


def randn(*shape: int, seed: int = SEED, dtype=BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Copy of the rows, with 24 elements of something else between them."""
    wide = torch.full((x.shape[0], x.shape[1] + 24), float("nan"), dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def check_rows(n: int, k: int, sizes, dtype=BF16) -> int:
    """Every number of rows has the bytes of 500 by `linear`; strides and biases change none."""
    x, weight = randn(500, k, dtype=dtype), randn(n, k, seed=1, dtype=dtype)
    vector, matrix = randn(n, seed=2, dtype=dtype), randn(500, n, seed=3, dtype=dtype)
    plain = ck.linear(x, weight, order="tree")
    added = ck.linear(x, weight, vector, order="tree")
    for rows in sizes:
        x_rows = x[:rows]
        assert contract.same_bytes(ck.skinny_linear(x_rows, weight), plain[:rows])
        assert contract.same_bytes(ck.skinny_linear(strided(x_rows), weight, vector), added[:rows])
        own = ck.skinny_linear(strided(x_rows), weight, vector.expand(rows, n))
        assert contract.same_bytes(own, added[:rows])
        each = ck.skinny_linear(x_rows, weight, matrix[:rows])
        alone = [ck.skinny_linear(x[i : i + 1], weight, matrix[i : i + 1]) for i in (0, rows - 1)]
        assert contract.same_bytes(each[[0, -1]], torch.cat(alone))
    return len(sizes)


@pytest.mark.parametrize(("dtype", "sizes"), [(BF16, range(1, 129)), (FP16, ROWS), (FP32, ROWS)])
def test_all_rows(dtype, sizes):
    assert check_rows(144, 392, sizes, dtype) == len(sizes)


@pytest.mark.parametrize(("n", "k"), [(128, 2880), (656, 3080), (1, 1), (3, 17), (40, 127)])
def test_sizes_of_vllm_and_tails(n, k):
    assert check_rows(n, k, ROWS) == len(ROWS)


@pytest.mark.nightly
@pytest.mark.parametrize(("n", "k"), itertools.product(NS, KS))
def test_all_sizes_of_vllm(n, k):
    assert check_rows(n, k, (1, 2, *ROWS)) == len(ROWS) + 2


@pytest.mark.parametrize("k", [8, 200, 1000])
def test_rows_of_the_tree(k):
    """The rows of the issue's list have the bytes that they have among 4096."""
    x, weight = randn(4096, k), randn(40, k, seed=1)
    whole = ck.linear(x, weight, order="tree")
    for m in (1, 2, 7, 16, 17, 64, 128, 129, 500):
        assert contract.same_bytes(ck.linear(x[:m], weight, order="tree"), whole[:m])


def tree_op(dtype=BF16) -> RowOp:
    weight, bias = randn(72, 600, seed=1, dtype=dtype), randn(72, seed=2, dtype=dtype)
    return RowOp("linear, tree", lambda x: ck.linear(x, weight, bias, order="tree"), 600, dtype)


def dx_op() -> RowOp:
    weight = randn(600, 72, seed=1)
    return RowOp("dx, tree", lambda dy: op.linear_dx(dy, weight, "tree"), 600, BF16)


@pytest.mark.parametrize("make", [tree_op, dx_op])
def test_battery(make):
    assert contract.check_rows(make(), 150, SEED) > 60


def test_leaves_that_follow_m_are_killed(monkeypatch):
    """Mutant: half of the leaves where there are many rows."""

    def spans(k, order, true=cpu._spans):
        return true(k, order) if rows["m"] < 100 else [slice(0, k // 2), slice(k // 2, k)]

    rows = {"m": 0}
    blocked = cpu._blocked
    monkeypatch.setattr(cpu, "_spans", spans)
    monkeypatch.setattr(
        cpu, "_blocked", lambda a, *rest: rows.update(m=len(a)) or blocked(a, *rest)
    )
    with pytest.raises(ContractViolation):
        contract.check_population(tree_op(FP32), 500, SEED, range(1, 100))


def test_the_order_of_the_leaves_and_their_start(monkeypatch):
    """What the CPU adds is the leaves, ascending, the first one not to +0."""
    x, weight = randn(5, 1000, dtype=FP32), randn(7, 1000, seed=1, dtype=FP32)
    length = leaves.length(1000)
    parts = [
        ck.linear(x[:, i : i + length], weight[:, i : i + length]) for i in range(0, 1000, length)
    ]
    assert len(parts) == 8
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    got = ck.linear(x, weight, order="tree")
    assert contract.same_bytes(got, total)
    descending = parts[-1]
    for part in reversed(parts[:-1]):
        descending = descending + part
    assert not contract.same_bytes(got, descending)
    assert not contract.same_bytes(got, ck.linear(x, weight))


def test_accuracy_and_the_misround_rate():
    """Leaves: 5.25 ⌈n/8⌉ 2⁻²³ S and 7 roundings of 2⁻²⁴ S; and no less accurate than the chain."""
    x, weight = randn(128, 4096), randn(256, 4096, seed=1)
    exact = reference.gemm(x, weight)
    bound = reference.tree_error_bound(x, weight)
    assert (bound < reference.error_bound(x, weight)).all()
    wrong = {}
    for order in ("chain", "tree"):
        got = ck.linear(x, weight, order=order)
        limit = bound if order == "tree" else reference.error_bound(x, weight)
        contract.check_accuracy(got, exact, limit, 0.01)
        wrong[order] = (got.double() != exact.to(BF16).double()).double().mean().item()
    assert wrong["tree"] < 0.01


def test_partials_in_bf16_are_killed():
    """The mutant of others' kernels: the misround rate shows what the bound may not."""
    x, weight = randn(128, 4096), randn(256, 4096, seed=1)
    length = leaves.length(4096)
    parts = [
        ck.linear(x[:, i : i + length], weight[:, i : i + length]).float()
        for i in range(0, 4096, length)
    ]
    exact = reference.gemm(x, weight)
    with pytest.raises(AssertionError):
        bound = reference.tree_error_bound(x, weight)
        contract.check_accuracy(sum(parts).to(BF16), exact, bound, 0.01)


def test_gradients_are_those_of_linear():
    x, weight, bias = randn(6, 40), randn(10, 40, seed=1), randn(10, seed=2)
    dy = randn(6, 10, seed=4)

    def gradients(call, bias):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        return torch.autograd.grad(call(*leaves), leaves, dy)

    want = gradients(lambda *t: ck.linear(*t, order="tree"), bias)
    assert all(map(contract.same_bytes, gradients(ck.skinny_linear, bias), want))
    # The gradient of a bias a row is dy itself.
    got = gradients(ck.skinny_linear, bias.expand(6, 10))
    assert all(map(contract.same_bytes, got, (*want[:2], dy)))


def test_gradient_of_a_row_that_is_a_vector():
    """x [K] with a bias [1, N]: dbias is [1, N]."""
    x, weight, bias, dy = randn(40), randn(10, 40, seed=1), randn(1, 10, seed=2), randn(10, seed=3)
    out = []
    for x_, dy_ in ((x, dy), (x[None], dy[None])):
        leaves = [t.clone().requires_grad_() for t in (x_, weight, bias)]
        ck.skinny_linear(*leaves).backward(dy_)
        out.append([t.grad for t in leaves])
    assert contract.same_bytes(out[0][0][None], out[1][0])
    assert all(map(contract.same_bytes, out[0][1:], out[1][1:]))
    assert contract.same_bytes(out[0][2], dy[None])


def test_leading_dimensions_and_empty_rows():
    x, weight, bias = randn(2, 3, 40), randn(10, 40, seed=1), randn(6, 10, seed=2)
    y = ck.skinny_linear(x, weight, bias)
    assert y.shape == (2, 3, 10)
    assert contract.same_bytes(y.view(6, 10), ck.skinny_linear(x.view(6, 40), weight, bias))
    assert contract.same_bytes(
        ck.skinny_linear(x[0, 0], weight), ck.skinny_linear(x[:1, 0], weight)[0]
    )
    assert ck.skinny_linear(x[:0], weight).shape == (0, 3, 10)
    assert contract.same_bytes(ck.skinny_linear(randn(6, 0), randn(10, 0), bias), bias)


def test_the_default_is_the_process_s(monkeypatch):
    recorded = []
    monkeypatch.setattr(op, "skinny_linear", lambda *args: recorded.append(args[-1]))
    x, weight = randn(2, 8), randn(4, 8)
    call = lambda **given: ck.skinny_linear(x, weight, **given)  # noqa: E731
    call()
    with ck.set_reduction(skinny="fast"):
        call()
        call(deterministic=True)
        with ck.set_reduction(skinny="deterministic"):
            call()
        call()
    call()
    ck.set_reduction(skinny="fast")
    call()
    ck.set_reduction(skinny=None)
    monkeypatch.setenv("CUTE_KERNELS_SKINNY", "fast")
    call()
    assert reduction.now() == {"skinny": "fast"} == ck.info()["reduction"]
    assert recorded == [True, False, True, True, False, True, False, False]


def test_torchs_flag_refuses_the_unordered_variant():
    x, weight = randn(2, 8), randn(4, 8)
    torch.use_deterministic_algorithms(True)
    try:
        with ck.set_reduction(skinny="fast"), pytest.raises(NondeterministicError, match="arrival"):
            ck.skinny_linear(x, weight)
        with pytest.raises(NondeterministicError, match="deterministic=True"):
            ck.skinny_linear(x, weight, deterministic=False)
        ck.skinny_linear(x, weight)
    finally:
        torch.use_deterministic_algorithms(False)
    ck.skinny_linear(x, weight, deterministic=False)
