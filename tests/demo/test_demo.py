"""The demo's claim at a tiny size, and mutants that break it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import cute_kernels as ck
from cute_kernels.demo import compare, model, rollout, training
from cute_kernels.gemm import api as gemm
from cute_kernels.norm import api as norm
from cute_kernels.sparse_attn import op as attention_op
from tests.demo.tiny import SETUP, SIZE


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _train(steps: int, order: str = "chain") -> tuple[model.Side, training.Trained]:
    learn, _ = training.split(training.corpus())
    ours = model.ours(SIZE, torch.device("cpu"), seed=1, order=order)
    told = {"seconds": 0, "steps": steps, "seed": 1, "progress": lambda done, words: None}
    return ours, training.train(ours, learn, **told)


def _trained(order: str) -> tuple[model.Side, model.Side, torch.Tensor]:
    ours, _ = _train(3, order)
    return model.plain(ours, SIZE), ours, training.split(training.corpus())[1]


@pytest.fixture(scope="module")
def trained():
    return _trained("chain")


def _measure(side: model.Side, held: torch.Tensor):
    work = compare.tasks(SETUP, held, seed=2)
    choose = rollout.sample(2, len(work))
    return compare.measure(side, SETUP, work, choose, 2, lambda: None)


@pytest.mark.parametrize("order", ["chain", pytest.param("tree", marks=pytest.mark.nightly)])
def test_ours_has_no_differing_byte(order, request):
    _, ours, held = request.getfixturevalue("trained") if order == "chain" else _trained(order)
    column, tokens = _measure(ours, held)
    total = column.total()
    assert total.differing_bytes == total.differing == 0
    told = sum(len(t) - 1 for t in tokens)
    weights = sum(w.numel() for w in model.weights(ours.model).values())
    assert told == sum(SETUP.prompts) + sum(SETUP.new) - 4
    assert total.numbers == 6 * told + 3 * weights and total.bytes == 4 * total.numbers
    assert all(gap.abs().max() == 0 for gap in column.drift)


def test_both_columns_are_the_same_model(trained):
    """Same weights, same tokens: log-probs and gradients agree as far as bf16 goes."""
    torch_side, ours, heldout = trained
    tokens = [heldout[index : index + 40] for index in (0, 100, 200, 300)]
    advantages = [1.0, -0.5, 0.25, 2.0]
    one, other = (
        training.score(side, SETUP.splits[0], tokens, advantages) for side in (ours, torch_side)
    )
    for actual, theirs in zip(one.logps, other.logps, strict=True):
        assert (actual - theirs).abs().max() < 0.1
    for name, actual in one.grads.items():
        theirs = other.grads[name]
        assert actual.any() and (actual - theirs).norm() < 0.05 * theirs.norm(), name


def test_training_learns_and_repeats_byte_for_byte():
    (ours, run), (other, _) = _train(12), _train(12)
    again = other.model.state_dict()
    for name, weight in ours.model.state_dict().items():
        assert weight.view(torch.uint8).equal(again[name].view(torch.uint8)), name
    assert run.steps == 12 and run.last_loss < run.first_loss - 0.5
    assert not any(hasattr(weight, "main_grad") for weight in ours.model.parameters())


def _linear_order_by_rows(x, weight, bias=None, **options):
    """K in two halves when there are few rows, as split-K does for skinny shapes."""
    if x.shape[:-1].numel() > 8:
        return _linear(x, weight, bias, **options)
    half = x.shape[-1] // 2
    return _linear(x[..., :half], weight[:, :half]) + _linear(x[..., half:], weight[:, half:])


def _norm_in_bf16_for_one_token(x, weight, eps, **options):
    """Sums in fp32 for a chunk, in bf16 for one token, as a fused decode kernel may."""
    if x.shape[1] > 1:
        return _rms_norm(x, weight, eps, **options)
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _keys_split_for_one_query(run, q, k, v, scale, softcap, sinks):
    """Two halves of the keys, joined by their log-sum-exps when there is one query, as in decoding
    kernels that split the keys to fill the machine."""
    queries, keys, values = run.cut_queries(q), run.cut_keys(k), run.cut_keys(v)
    if queries.shape[1] > 1 or keys.shape[1] < 2:
        return _attend(run, q, k, v, scale, softcap, sinks)
    half = keys.shape[1] // 2
    parts = [
        ck.block_sparse_attention(queries, keys[:, p], values[:, p], scale=scale, return_lse=True)
        for p in (slice(0, half), slice(half, None))
    ]
    lse = torch.stack([part[1] for part in parts])
    weights = lse.softmax(0).transpose(2, 3)[..., None]
    outs = torch.stack([part[0].float() for part in parts])
    return (weights * outs).sum(0).to(q.dtype), lse.logsumexp(0)


_linear, _rms_norm, _attend = gemm.linear, norm.rms_norm, attention_op._attend_run


def _no_main_grad(net, grads):
    """dW in bf16 per micro-batch, added up outside the product."""


def _cut_anywhere(side, sequences):
    return _logps(dataclasses.replace(side, granularity=5), sequences)


_logps = training._logps

#: mutant -> (owner, attribute, replacement, the comparisons that must fail).
MUTANTS = {
    "linear": (gemm, "linear", _linear_order_by_rows, "rollouts"),
    "norm": (norm, "rms_norm", _norm_in_bf16_for_one_token, "rollouts"),
    "split keys": (attention_op, "_attend_run", _keys_split_for_one_query, "rollouts"),
    "cut at 5 tokens": (training, "_logps", _cut_anywhere, "grads"),
    "no main_grad": (model, "set_main_grads", _no_main_grad, "grads"),
}


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(trained, monkeypatch, mutant):
    _, ours, heldout = trained
    owner, attribute, replacement, where = MUTANTS[mutant]
    monkeypatch.setattr(owner, attribute, replacement)
    column, _ = _measure(ours, heldout)
    assert sum(t.differing for t in getattr(column, where).values()) > 0
    assert column.total().differing_bytes > 0
