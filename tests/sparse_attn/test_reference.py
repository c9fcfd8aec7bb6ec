"""The oracle against other oracles, and 320 drawn cases of the CPU backend against it."""

from __future__ import annotations

import collections
import math

import pytest
import torch

from cute_kernels.schedulers import BlockMask
from tests.oracles import sparse_attn as reference
from tests.sparse_attn import cases
from tests.sparse_attn.against_float64 import checked, exact, excess, ours_of

DRAWN, BY_DAY, PER_TEST = 320, 80, 20
FIRSTS = [
    first if first < BY_DAY else pytest.param(first, marks=pytest.mark.nightly)
    for first in range(0, DRAWN, PER_TEST)
]


@pytest.mark.parametrize("first", FIRSTS)
def test_drawn_cases_against_float64(first):
    """Forward and gradients of every drawn case lie within the rounding bound, element by element.

    ``pytest -s`` shows the largest share of each bound that was used.
    """
    worst = collections.Counter()
    for seed in range(first, first + PER_TEST):
        case = cases.draw(seed)
        out = checked(case)
        assert max(out.values()) <= 1, f"{case}: {out}"
        worst |= collections.Counter(out)
    print({name: round(share, 3) for name, share in worst.items()})
    # A bound that nothing comes near would let mistakes pass.
    assert worst["out"] > 0.2 and worst["dv"] > 0.2 and worst["dq"] > 0.02 and worst["dk"] > 0.02


def test_the_draw_covers_what_it_claims():
    drawn = [cases.draw(seed) for seed in range(BY_DAY)]
    assert {case.kind for case in drawn} == set(cases.KINDS)
    assert {case.dim for case in drawn} == set(cases.HEAD_DIMS)
    assert {case.dtype for case in drawn} == set(cases.DTYPES)
    assert {(case.heads, case.kv_heads) for case in drawn} == set(cases.HEADS)
    assert {case.q_len for case in drawn} == {case.kv_len for case in drawn} == set(cases.LENGTHS)
    assert {type(case.schedule) for case in drawn} == {str, list}
    assert any(case.softcap for case in drawn) and any(case.causal for case in drawn)


def windowed(seed: int, q_len: int, kv_len: int, dim: int, softcap: float) -> cases.Case:
    window = BlockMask.sliding_window(q_len, kv_len, left=90, right=40)
    sizes = 2, 4, 2, q_len, kv_len, dim
    return cases.Case(seed, "by hand", *sizes, torch.bfloat16, softcap, "lpt", True, window)


CASE, WIDE = windowed(7, 200, 300, 64, 3.0), windowed(9, 100, 200, 192, 0.0)


@pytest.mark.parametrize("case", [CASE, WIDE], ids=["64", "192"])
def test_the_cases_of_the_mutants_are_right(case):
    assert max(checked(case).values()) <= 1


@pytest.mark.parametrize("name", ["delta", "lse gradient"])
def test_a_wrong_gradient_is_killed(name):
    """The bound sees a missing delta, and an lse gradient that is dropped."""
    x, scores = cases.inputs_of(CASE), reference.Scores(softcap=CASE.softcap)
    values, bounds = exact(x.leaves(), CASE.allowed(), x.dout, x.dlse, scores)
    dlse = x.dlse + (x.dout * values[0]).sum(-1).mT if name == "delta" else x.dlse * 0
    wrong = cases.Inputs(*x.leaves(), x.dout, dlse)
    assert excess(ours_of(wrong, CASE), values, bounds)["dq"] > 2


def test_against_torch_in_float64():
    """scaled_dot_product_attention with the same dense mask, values and gradients."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 50, 6, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(2, 70, 3, 16, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    allowed = torch.rand(2, 6, 50, 70, generator=generator) < 0.5
    allowed[..., 0] = True
    ours = reference.attention(q, k, v, allowed, scale=0.3)[0]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=allowed, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    assert (ours - theirs).abs().max() < 1e-12
    dout = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for actual, other in zip(
        *(torch.autograd.grad(t, (q, k, v), dout) for t in (ours, theirs)), strict=True
    ):
        assert (actual - other).abs().max() < 1e-12


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_gradcheck(softcap):
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 4, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(1, 5, 1, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    allowed = torch.rand(4, 5, generator=generator) < 0.6
    allowed[2] = False

    def run(*leaves):
        out, lse = reference.attention(*leaves, allowed, softcap=softcap)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(run, (q, k, v))


def test_no_keys_at_all():
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 0, 1, 8)
    out, lse = reference.attention(q, k, k, torch.ones(3, 0, dtype=torch.bool))
    assert (out == 0).all() and (lse == -math.inf).all()
