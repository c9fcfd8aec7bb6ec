"""linear_logp on a GPU beside test_bits: schedules, streams, graphs, accuracy."""

from __future__ import annotations

import functools

import pytest
import torch

import cute_kernels as ck
from cute_kernels.logp import chunks, exact, launch, op, tiles
from cute_kernels.logp.tensors import Head
from cute_kernels.runtime import plan_cache, products
from tests import contract
from tests.logp.test_bits import SIZES, row_op

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

(V, D), SEED = SIZES["cuda"], 17
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ORDERS = ("chain", "tree")


def randn(*shape: int, seed: int = SEED, dtype=BF16) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


@functools.cache
def head(dtype=BF16, vocab: int = V, width: int = D) -> torch.Tensor:
    return randn(vocab, width, seed=1, dtype=dtype) * width**-0.5


def rows_of(count: int) -> torch.Tensor:
    return row_op("forward", BF16, "chain", "cuda").rows(count, SEED)


def target_of(rows: torch.Tensor, vocab: int = V) -> torch.Tensor:
    """A row's target follows from its own bits."""
    return rows[:, 0].float().contiguous().view(torch.int32).long().abs() % vocab


@pytest.mark.parametrize("order", ORDERS)
def test_no_schedule_shows(order, monkeypatch):
    """Runs of the vocabulary, and the number of clusters."""
    rows = rows_of(700)
    tokens = op.rows_of(target_of(rows), None, 1.0, -100, V)
    whole = Head(head(), None, 0, V, 0.0, order)
    want = exact.merge(launch.states(rows, whole, tokens, True))
    for runs in (1, 2, 7, 20):
        for clusters in (1, 3, 66):
            with monkeypatch.context() as patch:
                patch.setattr(tiles, "runs", lambda *sizes, runs=runs: runs)
                patch.setattr(launch, "max_clusters", lambda device, n=clusters: n)
                got = exact.merge(launch.states(rows, whole, tokens, True))
            assert contract.same_bytes(got, want), (runs, clusters)


def test_any_cut_of_the_vocabulary():
    rows = rows_of(200)
    tokens = op.rows_of(target_of(rows), None, 1.0, -100, V)
    whole = Head(head(), None, 0, V, 0.0, "chain")
    want = exact.merge(launch.states(rows, whole, tokens, True))
    for cut in (16, 256, 1008, 4992):
        parts = [whole.block(slice(0, cut)), whole.block(slice(cut, V))]
        states = torch.cat([launch.states(rows, part, tokens, True) for part in parts])
        assert contract.same_bytes(exact.merge(states), want), cut


@pytest.mark.parametrize("order", ORDERS)
def test_the_bytes_of_log_probs(order):
    """Another backend's kernel, of logits as they are before their rounding."""
    rows = rows_of(300)
    target = target_of(rows)
    logits = products.sums(rows, head(), order)
    for options in ({}, {"temperature": 0.7, "return_entropy": True}, {"vocab_size": 4000}):
        given = target % options.get("vocab_size", V)
        got = ck.log_probs(logits, given, **options)
        want = ck.linear_logp(rows, head(), given, order=order, **options)
        pairs = zip(got, want, strict=True) if "return_entropy" in options else [(got, want)]
        for ours, theirs in pairs:
            assert contract.same_bytes(ours, theirs), options


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_do_not_show(order, monkeypatch):
    """Of the vocabulary and of tokens: the bytes of one walk."""
    hidden, weight = randn(700, D).requires_grad_(), head().detach().clone().requires_grad_()
    target = target_of(hidden.detach())

    def gradients():
        logp = ck.linear_logp(hidden, weight, target, order=order)
        return torch.autograd.grad(logp, (hidden, weight), torch.ones_like(logp))

    want = gradients()
    for workspace, block in ((1 << 21, (1 << 18, 1 << 19)), (1 << 18, (1 << 17, 1 << 17))):
        with monkeypatch.context() as patch:
            patch.setattr(chunks, "WORKSPACE", workspace)
            patch.setattr(chunks, "BLOCK", block)
            plan_cache.clear()  # a plan has the launches of its blocks
            for ours, theirs in zip(gradients(), want, strict=True):
                assert contract.same_bytes(ours, theirs), workspace
    plan_cache.clear()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_against_float64(order, dtype):
    """No less accurate than logits rounded to the dtype with an fp32 log-softmax."""
    hidden, target = randn(500, D, dtype=dtype), torch.arange(500, device="cuda")
    weight = head(dtype) * 3
    target[3] = -100
    logp, entropy = ck.linear_logp(hidden, weight, target, order=order, return_entropy=True)
    exactly = torch.log_softmax(hidden.double() @ weight.double().mT, 1)
    place = target.clamp(min=0)[:, None]
    want = torch.where(target < 0, 0.0, exactly.gather(1, place)[:, 0])
    rounded = torch.log_softmax((hidden @ weight.mT).float(), 1).gather(1, place)[:, 0]
    theirs = torch.where(target < 0, 0.0, rounded)
    assert (logp - want).abs().max() <= max((theirs - want).abs().max(), 2e-5)
    of_all = torch.where(target < 0, 0.0, -(exactly.exp() * exactly).sum(1))
    assert (entropy - of_all).abs().max() < 2e-5


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_no_budget_for_kept_logits_shows(order, dtype, softcap):
    """Also where tanh is made of an approximate reciprocal, which the simulator rounds exactly."""
    tokens = 300
    weight, bias = (t.clone().requires_grad_() for t in (head(dtype), randn(V, dtype=dtype)))
    options = {"order": order, "softcap": softcap, "temperature": 0.8, "return_entropy": True}

    def run(budget: int) -> list[torch.Tensor]:
        hidden = randn(tokens, D, seed=3, dtype=dtype).requires_grad_()
        target = target_of(hidden.detach())
        target[7] = -100
        results = ck.linear_logp(hidden, weight, target, bias, logits_memory=budget, **options)
        upstream = randn(2, tokens, seed=4, dtype=FP32)
        gradients = torch.autograd.grad(results, (hidden, weight, bias), tuple(upstream))
        return [*results, *gradients]

    want = run(0)
    for budget in (70 * 4 * (V + 1), 1 << 30):
        for got, expected in zip(run(budget), want, strict=True):
            assert contract.same_bytes(got, expected), budget


def test_graph_and_streams():
    rows = rows_of(300)
    target, weight = target_of(rows), head()
    want = ck.linear_logp(rows, weight, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ck.linear_logp(rows, weight, target)
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
        assert contract.same_bytes(got, want)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for stream in streams * 8:
        with torch.cuda.stream(stream):
            found.append(ck.linear_logp(rows, weight, target))
    torch.cuda.synchronize()
    assert all(contract.same_bytes(one, want) for one in found)


def test_masked_and_wrong_targets():
    rows = rows_of(70)
    rows[5] = torch.nan
    hidden, weight = rows.requires_grad_(), head().detach().clone().requires_grad_()
    target = torch.arange(70, device="cuda")
    target[5], target[6] = -100, V
    logp, entropy = ck.linear_logp(hidden, weight, target, return_entropy=True)
    assert logp[5] == 0 and entropy[5] == 0 and logp[6].isnan()
    kept = torch.arange(70, device="cuda") != 6
    grads = torch.autograd.grad(logp[kept].sum() + entropy[kept].sum(), (hidden, weight))
    assert not grads[0][5].any() and not grads[1].isnan().any()


@pytest.mark.parametrize("parts", [1, 40, 300])
def test_states_are_finished_in_one_launch_with_the_bytes_of_torchs_chain(parts):
    """The Triton kernel, as fp32 logits take it; not run so far."""
    from cute_kernels.logp.triton import launch as triton_launch

    from .finished_states import drawn

    states, rows = drawn(parts, entropy=True)
    want = exact.finish(states, rows)
    got = triton_launch.finish(states.cuda(), exact.Rows(*(t.cuda() for t in rows)))
    for ours, expected in zip(got, want, strict=True):
        known = ~expected.isnan()
        assert torch.equal(ours.cpu().isnan(), ~known)
        assert contract.same_bytes(ours.cpu()[known], expected[known])
