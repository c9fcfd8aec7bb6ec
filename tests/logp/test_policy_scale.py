"""The backward of linear_policy_loss: rounding of the product, ownership, chunks by memory."""

from __future__ import annotations

import itertools

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError
from cute_kernels.logp import cpu, policy_op, policy_sweep
from tests.contract import same_bytes
from tests.logp import policy_cases as cases
from tests.logp.policy_cases import BF16, FP32, HALVES_AND_FP32, values
from tests.watchers import Seen

FACTORS = [1.0, -2.0, 0.3, 1e-6, float("inf")]


def rounded_once(t: torch.Tensor, factor: float) -> torch.Tensor:
    """An fp32 product, rounded to the dtype."""
    return (t.double() * torch.tensor(factor).double()).float().to(t.dtype)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", HALVES_AND_FP32, ids=str)
def test_one_rounding_in_place_and_out_of_place(dtype, factor, monkeypatch):
    monkeypatch.setattr(cpu, "_SCALED", 50)
    x, number = values(dtype), torch.tensor(factor)
    want = rounded_once(x, factor)
    out = policy_op.scale_gradient(x, number)
    assert torch.equal(out.isnan(), want.isnan()) and out.data_ptr() != x.data_ptr()
    assert same_bytes(out.nan_to_num(), want.nan_to_num()) and same_bytes(x, values(dtype))
    assert policy_op._scale_in_place(x, number) is x
    assert same_bytes(x, out)


def loss_of(leaves, x: cases.Problem):
    return ck.linear_policy_loss(
        *leaves[:2], x.target, leaves[2], loss="ppo", mask=x.mask, **x.tensors,
        **cases.options_of("ppo"),
    ).loss  # fmt: skip


@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_kept_graph_gives_the_same_gradients_again(dtype, factor):
    x = cases.problem("ppo", "some", dtype=dtype, bias=True)
    leaves, upstream = cases.leaves_of(x), torch.tensor(factor)
    loss = loss_of(leaves, x)
    first = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
    want = [t.clone() for t in first]
    for t in first:
        t.mul_(7.0)  # the caller's own
    loss.backward(upstream, retain_graph=True)
    second = [t.grad for t in leaves]
    for t in leaves:
        t.grad = None
    for t in second:
        t.zero_()
    third = torch.autograd.grad(loss, leaves, upstream)
    assert all(map(same_bytes, third, want)) and all(t.any() for t in want)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_the_last_backward_gives_its_memory_away():
    """Neither the product nor ``.grad`` copies a gradient; a kept graph's are copies."""
    x = cases.problem("ppo", "some", bias=True)
    for keeps in (False, True):
        leaves = cases.leaves_of(x)
        loss = loss_of(leaves, x)
        made = [t.data_ptr() for t in loss.grad_fn.saved_tensors]
        loss.backward(torch.tensor(0.3), retain_graph=keeps)
        assert [t.grad.data_ptr() == p for t, p in zip(leaves, made, strict=True)] == [
            not keeps
        ] * 3


def test_a_mode_sees_the_products_of_the_last_backward():
    x = cases.problem("ppo", "some", bias=True)
    leaves = cases.leaves_of(x)
    want = torch.autograd.grad(loss_of(leaves, x), leaves, torch.tensor(0.3))
    loss = loss_of(leaves, x)
    with Seen() as seen:
        got = torch.autograd.grad(loss, leaves, torch.tensor(0.3))
    assert seen.names.count("cute_kernels::scale_gradient") == 3
    assert all(map(same_bytes, got, want))


def test_results_of_the_op_itself_stay(monkeypatch):
    """A caller of the torch op has the gradients as results: no backward changes them."""
    results = []
    true = policy_op.linear_policy_loss

    def call(*args):
        results.append(true(*args[:-2], False, args[-1]))
        return results[-1]

    monkeypatch.setattr(policy_op, "linear_policy_loss", call)
    x = cases.problem("ppo", "some", bias=True)
    leaves = cases.leaves_of(x)
    loss = loss_of(leaves, x)
    before = [t.clone() for t in results[0][-3:]]
    loss.backward(torch.tensor(0.3))
    assert all(map(same_bytes, results[0][-3:], before))


GIB = 1 << 30


@pytest.mark.parametrize(
    ("tokens", "vocab", "memory", "chunks"),
    [
        (3000, 202048, 0, 1),
        (16384, 128256, 0, 4),
        (16384, 128256, GIB, 4),
        (16384, 128256, 8 * GIB, 1),
        (32768, 128256, 8 * GIB, 2),
        (8191, 131072, 0, 1),
        (8193, 131072, 0, 3),
    ],
)
def test_chunks(tokens, vocab, memory, chunks):
    parts = policy_sweep.token_chunks(tokens, vocab, "cuda", memory)
    assert len(parts) == chunks and parts[0].start == 0 and parts[-1].stop == tokens
    assert all(a.stop == b.start and b.start % 128 == 0 for a, b in itertools.pairwise(parts))
    if chunks > 1:
        longest = max(some.stop - some.start for some in parts)
        assert longest * vocab * 4 <= max(2 * GIB, memory)


def test_logits_memory_reaches_the_sweep_and_shows_in_no_bit(monkeypatch):
    x = cases.problem("grpo", "some", sizes=(4, 25, 40, 290))
    options = cases.options_of("grpo")
    cases.budget(monkeypatch, 16, x)
    true, counts = policy_sweep.token_chunks, []

    def token_chunks(*args):
        counts.append(len(true(*args)))
        return true(*args)

    monkeypatch.setattr(policy_sweep, "token_chunks", token_chunks)
    row = 4 * len(x.weight)
    results = [
        cases.fused("grpo", x, logits_memory=memory, **options) for memory in (0, 48 * row, 1 << 40)
    ]
    monkeypatch.setenv("CUTE_KERNELS_LOGITS_MEMORY_MIB", "1")
    results.append(cases.fused("grpo", x, **options))
    assert counts == [7, 3, 1, 1]
    for one in results[1:]:
        for a, b in zip(results[0], one, strict=True):
            assert (a is None and b is None) or same_bytes(a, b)
    with pytest.raises(ArgumentValueError, match=r"^logits_memory: expected"):
        cases.fused("grpo", x, logits_memory=-1, **options)
