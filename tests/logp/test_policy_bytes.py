"""linear_policy_loss has the bytes of its composed form, at any budget, and mistakes are seen."""

from __future__ import annotations

import functools

import pytest
import torch

from cute_kernels.logp import policy_losses, policy_op, policy_sweep
from cute_kernels.logp.policy_losses import LOSSES
from cute_kernels.runtime import plan_cache, products
from tests.contract import same_bytes
from tests.logp import policy_cases as cases
from tests.logp.policy_cases import BF16, FP32, MASKS


def differing(got: cases.Results, want: cases.Results) -> list[str]:
    """Names of the results whose bytes differ; the loss is a sum in another order."""
    return [
        name
        for name, a, b in zip(got._fields[1:], got[1:], want[1:], strict=True)
        if (a is None) != (b is None) or (a is not None and not same_bytes(a, b))
    ]


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def fresh_plans():
    """Cached plans have the launches of a budget, which tests change."""
    yield
    plan_cache.clear()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", LOSSES)
def test_the_bytes_of_the_composed_form(name, mask, device):
    x, options = cases.problem(name, mask, device=device), cases.options_of(name)
    got, want = cases.fused(name, x, **options), cases.composed(name, x, **options)
    assert not differing(got, want)
    assert (got.loss - want.loss).abs() <= 1e-5 * want.loss.abs() + 1e-6
    assert bool(got.weight.any()) == (mask != "nothing")


HEADS = {
    "fp32": ({}, {"dtype": FP32}),
    "bias": ({}, {"bias": True}),
    "softcap": ({"softcap": 3.0}, {}),
    "temperature": ({"temperature": 0.7}, {}),
    "fp16": ({}, {"dtype": torch.float16}),
    "padding": ({"vocab_size": 71}, {"bias": True}),
    "tree": ({"order": "tree"}, {"sizes": (3, 17, 150, 290)}),
    "blocks of the vocabulary": ({"order": "tree"}, {"sizes": (2, 9, 40, 9000)}),
    "a chain of blocks": ({}, {"sizes": (2, 9, 40, 2100), "bias": True}),
    "entropy": ({"entropy_weight": 0.05}, {"bias": True}),
    "entropy by tokens": ({"entropy_weight": 0.1, "entropy_reduction": "token_mean"}, {}),
    "k1": ({"kl": "k1"}, {}),
    "k2": ({"kl": "k2"}, {}),
    "k3_importance": ({"kl": "k3_importance"}, {}),
    "sum": ({"reduction": "sum"}, {}),
    "divisor": ({"reduction": "token_mean", "divisor": 7.0}, {}),
    "scale": ({"loss_scale": 0.3}, {}),
}


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("case", HEADS)
def test_the_bytes_of_other_heads_and_options(case, device, monkeypatch):
    options, of_problem = HEADS[case]
    x = cases.problem("grpo", "some", device=device, **of_problem)
    if "vocab_size" in options:
        x.target.clamp_(max=options["vocab_size"] - 1)
        x.weight[options["vocab_size"] :] = torch.nan
    options = cases.options_of("grpo", **options)
    want = cases.composed("grpo", x, **options)
    for tokens in (16,) if device == "cpu" else (16, 128, 1 << 20):
        cases.budget(monkeypatch, tokens, x)
        got = cases.fused("grpo", x, **options)
        assert (got.entropy is not None) == ("entropy_weight" in options)
        assert not differing(got, want) and got.hidden.any() and got.weight.any()


@pytest.mark.parametrize("needs", range(8))
def test_only_the_gradients_asked_for(needs):
    flags = [bool(needs >> i & 1) for i in range(3)]
    x, options = cases.problem("dapo", "some", bias=True), cases.options_of("dapo")
    if not needs:
        out = cases.ck.linear_policy_loss(
            *x[:2], x.target, x.bias, loss="dapo", mask=x.mask, **x.tensors, **options
        )
        assert not out.loss.requires_grad
        want = cases.fused("dapo", x, **options)
        assert same_bytes(out.logp, want.logp) and same_bytes(out.loss, want.loss)
        return
    got, want = (run("dapo", x, flags, **options) for run in (cases.fused, cases.composed))
    assert not differing(got, want)
    assert [t is not None for t in got[3:]] == flags


@pytest.mark.parametrize("upstream", [1.0, 4.0, 0.3])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_upstream_scalar_multiplies_once(dtype, upstream):
    x, options = cases.problem("ppo", "some", dtype=dtype), cases.options_of("ppo")
    plain = cases.fused("ppo", x, **options)
    got = cases.fused("ppo", x, upstream=torch.tensor(upstream), **options)
    for a, b in ((got.hidden, plain.hidden), (got.weight, plain.weight)):
        assert same_bytes(a, (b.double() * torch.tensor(upstream).double()).to(dtype))
    if upstream == 4.0:
        assert not differing(got, cases.composed("ppo", x, **options | {"loss_scale": 4.0}))


def test_a_gradient_scaler_of_fp16_is_a_loss_scale():
    """A gradient that fp16 cannot hold is lost before the upstream number comes."""
    x, scale = cases.problem("ppo", "some", dtype=torch.float16), 2.0**16
    options = cases.options_of("ppo", divisor=1e6, reduction="sum")
    scaled = cases.composed("ppo", x, **options | {"loss_scale": scale})
    assert not differing(cases.fused("ppo", x, **options | {"loss_scale": scale}), scaled)
    late = cases.fused("ppo", x, upstream=torch.tensor(scale), **options)
    assert "hidden" in differing(late, scaled)


def test_logits_are_made_once(monkeypatch):
    """Twice for a weight on a CPU and for a bias, of more than one chunk."""
    x, options = cases.problem("ppo", "some", bias=True), cases.options_of("ppo")
    counts = []
    true = products.sums

    def sums(a, b, order):
        counts[-1] += len(a) * (b.shape[1] == 24)
        return true(a, b, order)

    monkeypatch.setattr(products, "sums", sums)
    for tokens, needs in (
        (1 << 20, (True, True, True)),
        (16, (True, False, False)),
        (16, (True,) * 3),
    ):
        cases.budget(monkeypatch, tokens, x)
        counts.append(0)
        cases.fused("ppo", x, needs, **options)
    assert counts == [51, 51, 102]


# ---- chunks --------------------------------------------------------------------------------------

BUDGETS = (1, 16, 32, 48, 1 << 20)


@pytest.mark.parametrize("order", ["chain", "tree"])
def test_no_budget_shows(order, monkeypatch):
    x = cases.problem("grpo", "some", sizes=(4, 25, 150, 290))
    options = cases.options_of("grpo", order=order, entropy_weight=0.1)
    want = cases.composed("grpo", x, **options)
    losses, counts = set(), set()
    for tokens in BUDGETS:
        cases.budget(monkeypatch, tokens, x)
        got = cases.fused("grpo", x, **options)
        assert not differing(got, want), tokens
        losses.add(got.loss.item())
        parts = policy_sweep.token_chunks(100, 290, "cpu")
        counts.add(len(parts))
        assert all(some.start % 16 == 0 for some in parts) and parts[-1].stop == 100
    assert len(losses) == 1 and len(counts) >= 3


def chain(a, b, *, order="chain", accumulator=None, out=None, launch=None):
    """Products as a GPU's: fp32 chains over groups of 16, resumed from an accumulator."""
    total = torch.zeros(len(a), len(b)) if accumulator is None else accumulator
    for first in range(0, a.shape[1], 16):
        group = slice(first, first + 16)
        total += (a[:, group].double() @ b[:, group].double().mT).float()
    if accumulator is not None:
        return accumulator
    rounded = total.to(a.dtype)
    return rounded if out is None else out.copy_(rounded)


@pytest.fixture
def chained(monkeypatch):
    """A backend whose dW is a chain that an accumulator resumes, as those of GPUs are."""
    monkeypatch.setattr(policy_sweep, "chained", lambda t: True)
    monkeypatch.setattr(policy_sweep.dispatch, "backend", lambda *asked: "cute_sm90")
    monkeypatch.setattr(products, "product", chain)


def budgets_of_chains(monkeypatch) -> None:
    x = cases.problem("grpo", "some", sizes=(4, 25, 40, 290))
    options = cases.options_of("grpo")
    want = cases.composed("grpo", x, **options)
    for tokens in BUDGETS:
        cases.budget(monkeypatch, tokens, x)
        assert not differing(cases.fused("grpo", x, **options), want), tokens


@pytest.mark.usefixtures("chained")
def test_the_chain_over_tokens_goes_on_from_chunk_to_chunk(monkeypatch):
    budgets_of_chains(monkeypatch)


# ---- mutants -------------------------------------------------------------------------------------


def changed_walk(patch, change) -> None:
    """Gradients of each chunk by ``change(true, walk, needs, total)``."""
    true = policy_sweep.chunks.gradients
    patch.setattr(policy_sweep.chunks, "gradients", functools.partial(change, true))


def rounded_between_chunks(patch) -> None:
    """dW is rounded to the dtype of the weight after every chunk."""

    def change(true, walk, needs, total):
        results = true(walk, needs, total)
        if total is not None:
            total.copy_(total.to(BF16))
        return results

    changed_walk(patch, change)


def chunks_added_apart(patch) -> None:
    """dW is the sum of the chunks' products."""

    def change(true, walk, needs, total):
        if total is None:
            return true(walk, needs, None)
        before = total.clone()
        results = true(walk, needs, total.zero_())
        total += before
        return results

    changed_walk(patch, change)


def cut_anywhere(patch) -> None:
    """Chunks are no multiples of 16 tokens."""
    patch.setattr(policy_sweep, "GROUP", 9)


def changed_sums(patch, change) -> None:
    """Kept logits of a chunk by ``change(sums)``."""

    def gradients(true, walk, needs, total):
        if walk.sums is not None:
            walk = walk._replace(sums=change(walk.sums))
        return true(walk, needs, total)

    changed_walk(patch, gradients)


def sums_of_another_chunk(patch) -> None:
    """A chunk's gradients read the kept logits of other tokens."""
    changed_sums(patch, lambda sums: sums.roll(1, 0))


def logits_rounded(patch) -> None:
    """Logits are kept in the dtype of hidden."""
    changed_sums(patch, lambda sums: sums.bfloat16().float())


def weights_after_the_gradient(patch) -> None:
    """Token weights multiply the rounded gradient's token, not the upstream gradient."""
    true = policy_sweep._gradients

    def gradients(term, leaves, weights):
        return [g if g is None else (g.bfloat16() * weights).float()
                for g in true(term, leaves, torch.ones_like(weights))]  # fmt: skip

    patch.setattr(policy_sweep, "_gradients", gradients)


def halves_at_a_tie(patch) -> None:
    """torch.minimum's gradient at a tie with a bound's zero gradient: half of it is lost."""

    def clipped(logp, entropy, *, advantages, old_logp=None, clip_low, clip_high, max_ratio=None):
        ratio = policy_losses.ratio_of(logp, old_logp)
        bound = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
        return -torch.minimum(ratio * advantages, bound * advantages)

    row = LOSSES["grpo"]
    patch.setitem(policy_op.__dict__, "LOSSES", {"grpo": row.__class__(
        **{**row.__dict__, "function": clipped}
    )})  # fmt: skip


def bytes_of_blocks(monkeypatch) -> None:
    x = cases.problem("grpo", "some", sizes=(2, 9, 40, 1300), dtype=FP32)
    options = cases.options_of("grpo")
    assert not differing(cases.fused("grpo", x, **options), cases.composed("grpo", x, **options))


#: Mutant -> the check that kills it.
MUTANTS = {
    rounded_between_chunks: budgets_of_chains,
    chunks_added_apart: budgets_of_chains,
    cut_anywhere: budgets_of_chains,
    sums_of_another_chunk: bytes_of_blocks,
    logits_rounded: bytes_of_blocks,
    weights_after_the_gradient: bytes_of_blocks,
    halves_at_a_tie: bytes_of_blocks,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_a_mutant_is_killed(mutant, monkeypatch, request):
    check = MUTANTS[mutant]
    if check is budgets_of_chains:
        request.getfixturevalue("chained")
    check(monkeypatch)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(monkeypatch)
