"""Logits that a forward keeps for its backward: no budget shows in a bit."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.logp import chunks, op
from tests.contract import same_bytes

T, V, D = 37, 1100, 24
#: Bytes of a token's logits.
TOKEN = 4 * V
BUDGETS = (0, TOKEN - 1, TOKEN, 7 * TOKEN + 5, 10**9)


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(hidden, weight, bias, target) of random values; one masked token that is NaN."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(T, D, generator=generator).to(dtype)
    weight, bias = (torch.randn(V, n, generator=generator).to(dtype) for n in (D, 1))
    target = torch.randint(0, V - 10, (T,), generator=generator)
    target[3], hidden[3] = -100, torch.nan
    leaves = (t.requires_grad_() for t in (hidden, weight, bias[:, 0].contiguous()))
    return *leaves, target


def gradients_of(logits_memory: int | None, dtype=torch.bfloat16, entropy=True, **options):
    """[log p, entropy, dhidden, dweight, dbias] of a weighted sum."""
    hidden, weight, bias, target = operands(dtype)
    results = ck.linear_logp(
        hidden, weight, target, bias, return_entropy=entropy, vocab_size=V - 10,
        logits_memory=logits_memory, **options,
    )  # fmt: skip
    results = results if entropy else (results,)
    weights = torch.linspace(-1, 2, T)
    if "main_grad" in options:
        sum((result * weights).sum() for result in results).backward()
        return [hidden.grad, options["main_grad"]]
    loss = sum((result * weights * (i + 1)).sum() for i, result in enumerate(results))
    return [*results, *torch.autograd.grad(loss, (hidden, weight, bias))]


def all_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(same_bytes(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("order", ["chain", "tree"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_budget_shows(dtype, order):
    options = {"order": order, "temperature": 0.7, "softcap": 5.0}
    want = gradients_of(0, dtype, **options)
    for budget in BUDGETS[1:]:
        assert all_equal(gradients_of(budget, dtype, **options), want), budget
    states = [torch.full((V, D), 0.1) for _ in range(2)]
    pair = [
        gradients_of(budget, dtype, main_grad=state, **options)
        for budget, state in zip((0, 9 * TOKEN), states, strict=True)
    ]
    assert all_equal(*pair)


def test_no_budget_shows_where_tokens_are_cut(monkeypatch):
    """DHidden in blocks of tokens, of which the kept ones end inside one."""
    want = gradients_of(0, entropy=False)
    monkeypatch.setattr(chunks, "WORKSPACE", 16 * D * 4)
    monkeypatch.setattr(chunks, "BLOCK", (1 << 11, 1 << 10))
    for budget in (20 * TOKEN, 10**9):
        assert all_equal(gradients_of(budget, entropy=False), want)


#: Defect -> what the backward reads instead of the kept logits ``sums`` of a head.
DEFECTS = {
    "rounded to bf16": lambda sums, head: sums.bfloat16().float(),
    "of the next token": lambda sums, head: sums.roll(1, 0),
    "with the bias, which is added again": lambda sums, head: torch.nn.functional.pad(
        sums[:, :V] + head.bias.float(), (0, sums.shape[1] - V)
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_of_what_is_kept_show(defect, monkeypatch):
    want = gradients_of(0)
    gradients = chunks.gradients

    def run(walk, needs, main_grad):
        sums = DEFECTS[defect](walk.sums, walk.head)
        return gradients(walk._replace(sums=sums), needs, main_grad)

    monkeypatch.setattr(chunks, "gradients", run)
    assert not all_equal(gradients_of(10**9), want)


def test_a_graph_is_differentiated_twice():
    hidden, weight, bias, target = operands(torch.bfloat16)
    loss = ck.linear_logp(hidden, weight, target, bias, logits_memory=10**9).sum()
    first = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    assert all_equal(list(first), list(torch.autograd.grad(loss, (hidden, weight, bias))))


@pytest.fixture
def kept(monkeypatch):
    """List of the numbers of tokens whose logits forwards with a budget kept."""
    counts = []
    make = op.kept_sums

    def kept_sums(hidden, weight, memory):
        sums = make(hidden, weight, memory)
        if memory:
            counts.append(len(sums))
        return sums

    monkeypatch.setattr(op, "kept_sums", kept_sums)
    return counts


def test_the_budget_is_kept(kept):
    for budget in BUDGETS:
        gradients_of(budget)
    assert kept == [0, 1, 7, T]  # without a budget nothing asks


def test_nothing_is_kept_without_a_gradient(kept):
    hidden, weight, bias, target = operands(torch.bfloat16)
    with torch.no_grad():
        ck.linear_logp(hidden, weight, target, bias, logits_memory=10**9)
    plain = (t.detach() for t in (hidden, weight))
    ck.linear_logp(*plain, target, logits_memory=10**9)
    assert not kept


def test_the_setting_is_the_default(kept, monkeypatch):
    want = gradients_of(None)
    assert not kept
    monkeypatch.setenv("CUTE_KERNELS_LOGITS_MEMORY_MIB", "1")
    assert all_equal(gradients_of(None), want)
    gradients_of(3 * TOKEN)
    assert kept == [T, 3]
