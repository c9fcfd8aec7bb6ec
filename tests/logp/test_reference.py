"""The oracle against torch, and drawn cases of the CPU backend against the oracle."""

from __future__ import annotations

import collections

import pytest
import torch

from tests.logp import cases
from tests.oracles import logp as reference

DRAWN, PER_TEST = 2000, 200
FIRSTS = [
    first if first < 200 else pytest.param(first, marks=pytest.mark.nightly)
    for first in range(0, DRAWN, PER_TEST)
]


@pytest.mark.parametrize("first", FIRSTS)
def test_drawn_cases_against_float64(first):
    """log p, entropy and the gradients of every drawn case lie within the bounds."""
    worst = collections.Counter()
    for seed in range(first, first + PER_TEST):
        case = cases.draw(seed)
        x = cases.inputs_of(case)
        got = cases.run(case, x)
        found = cases.shares(got, *cases.exact(case, x))
        assert max(found.values()) <= 1, f"{case}: {found}"
        assert (got.logp <= 0).all() and (got.entropy >= 0).all()
        worst |= collections.Counter(found)
    print({name: round(share, 3) for name, share in worst.items()})
    # A bound that nothing comes near would let mistakes pass.  Those of sums are a Hopper chain's,
    # which truncates; the gradients' are mostly the one rounding to their dtype.
    assert worst["hidden"] > 0.4 and worst["weight"] > 0.4 and worst["bias"] > 0.4
    assert worst["logp"] > 0.05 and worst["entropy"] > 0.02


def drawn(*shapes, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]


TARGET = torch.tensor([3, -100, 0, 8, 3])
OPTIONS = [
    reference.Options(),
    reference.Options(temperature=0.7, softcap=2.0, vocab_size=9),
    reference.Options(temperature=torch.tensor([0.5, 1.0, 2.0, 3.0, 0.9]), vocab_size=9),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "softcap", "temperatures"])
def test_gradcheck_and_the_closed_form(options):
    """torch's derivative of the oracle is the numerical one, and the closed form's."""
    leaves = [t.requires_grad_() for t in drawn((5, 6), (11, 6), (11,))]

    def run(hidden, weight, bias):
        return reference.linear_logp(hidden, weight, TARGET, bias, options)

    assert torch.autograd.gradcheck(run, tuple(leaves))
    upstream = drawn((5,), (5,), seed=1)
    want = torch.autograd.grad(run(*leaves), leaves, upstream)
    tensors = [t.detach() for t in leaves]
    got = reference.gradients(tensors, TARGET, upstream, options)
    for a, e in zip(got, want, strict=True):
        assert (a - e).abs().max() < 1e-12


def test_no_worse_than_bf16_logits():
    """The error against float64, on average and at worst, is below bf16 logits' by far.

    And not above that of fp32 logits with fp32 log_softmax, by more than the rounding of y.
    """
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(128, 256, generator=generator).bfloat16()
    weight = torch.randn(1000, 256, generator=generator).bfloat16() * 0.1
    target = torch.randint(0, 1000, (128,), generator=generator)
    exact = reference.linear_logp(hidden, weight, target)[0]
    case = cases.Case(0, 128, 256, 1000, 1000, cases.BF16, "chain", False, 0, "one", False, 1)
    for order in ("chain", "tree"):
        x = cases.Inputs(hidden, weight, None, target, 1.0, (torch.ones(128), torch.zeros(128)))
        got = cases.run(case._replace(order=order), x)
        ours = (got.logp.double() - exact).abs()
        theirs = torch.log_softmax((hidden @ weight.mT).float(), 1).gather(1, target[:, None])
        theirs = (theirs[:, 0].double() - exact).abs()
        assert ours.mean() < theirs.mean() / 1000 and ours.max() < theirs.max() / 100
        plain = torch.log_softmax(hidden.float() @ weight.float().mT, 1).gather(1, target[:, None])
        assert ours.max() < 2 * (plain[:, 0].double() - exact).abs().max()
        # And so are the gradients, of which the logits' are rounded to bf16.
        leaf = hidden.clone().requires_grad_()
        z = torch.log_softmax((leaf @ weight.mT).float(), 1).gather(1, target[:, None])
        z.sum().backward()
        want = reference.gradients((hidden, weight, None), target, x.upstream)[0]
        assert (got.hidden - want).norm() <= 1.01 * (leaf.grad - want).norm()


def wrong_values(case, x) -> dict[str, object]:
    """Mistakes that the bounds have to see, as options that the oracle is given."""
    return {
        "temperature": reference.Options(x.temperature * 1.001, 0.0, -100, case.vocab),
        "padding is counted": reference.Options(x.temperature, 0.0, -100, case.rows),
        "softcap": reference.Options(x.temperature, 300.0, -100, case.vocab),
    }


@pytest.mark.parametrize("name", ["temperature", "padding is counted", "softcap"])
def test_a_wrong_value_is_killed(name):
    case = cases.Case(0, 16, 48, 100, 116, cases.BF16, "chain", True, 0.0, "number", False, 0.1)
    x = cases.inputs_of(case)
    got, (_, bounds) = cases.run(case, x), cases.exact(case, x)
    options = wrong_values(case, x)[name]
    logp, _ = reference.linear_logp(x.hidden, x.weight, x.target, x.bias, options)
    assert ((got.logp - logp).abs() / bounds.logp).max() > 2
