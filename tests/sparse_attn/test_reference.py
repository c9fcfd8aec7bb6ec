"""The oracle against other oracles, and 320 drawn cases of the CPU backend against it."""

from __future__ import annotations

import collections
import math

import pytest
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import config, cpu
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
true_allowed, true_attend, true_scores = cpu._allowed, cpu._attend, cpu._scores
true_delta, true_blocked = cpu._delta, cpu._blocked


def no_ends(mask, m, n, partial, tile):
    kv = torch.arange(n * 128, n * 128 + 128)
    return true_allowed(mask, m, n, partial, tile) | (kv >= mask.kv_len)


def one_wider(mask, m, n, partial, tile):
    allowed = true_allowed(mask, m, n, partial, tile)
    return allowed | allowed.roll(1, dims=1)


def stale_maximum(state, *args):
    """The old sum and values are not scaled to the new maximum."""
    top, total, acc = state
    above, new_total, new_acc = true_attend((top, total * 0, acc * 0), *args)
    return above, total + new_total, acc + new_acc


def no_slope(queries, keys, scale, softcap):
    scores, slope = true_scores(queries, keys, scale, softcap)
    return scores, torch.ones_like(slope)


def half_of_another_row(t):
    """The second half of v's columns from the row behind."""
    if t.shape[3] == 128:
        t = torch.cat((t[..., :64], t.roll(-1, 1)[..., 64:]), 3)
    return true_blocked(t)


#: What is wrong, with the result that shows it if one must -> (case, where, what instead).
MUTANTS = {
    "the rule is not evaluated": (
        *(CASE, cpu, "_allowed"),
        lambda mask, m, n, partial, tile: true_allowed(mask, m, n, 0, tile),
    ),
    "keys beyond Sk are taken": (CASE, cpu, "_allowed", no_ends),
    "the rule is one key too wide": (CASE, cpu, "_allowed", one_wider),
    "no rescaling": (CASE, cpu, "_attend", stale_maximum),
    "P and dS in fp8": (CASE, cpu, "_through", lambda t, _: t.to(torch.float8_e4m3fn).float()),
    "the softcap's slope is left out": (CASE, cpu, "_scores", no_slope),
    "out: a scale of v's head size": (
        *(WIDE, config, "score_scale"),
        lambda scale, head_dim: scale or config.VALUE_DIMS[head_dim] ** -0.5,
    ),
    "dq: delta over half of v": (
        *(WIDE, cpu, "_delta"),
        lambda dos, outs, dlse: true_delta(dos[..., :64], outs[..., :64], dlse),
    ),
    "out: scores over v's head size": (
        *(WIDE, cpu, "_scores"),
        lambda q, k, *rest: true_scores(q[:, :128], k[:, :128], *rest),
    ),
    "out: half of v from another row": (WIDE, cpu, "_blocked", half_of_another_row),
}


@pytest.mark.parametrize("case", [CASE, WIDE], ids=["64", "192"])
def test_the_cases_of_the_mutants_are_right(case):
    assert max(checked(case).values()) <= 1


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_value_is_killed(name, monkeypatch):
    case, module, target, mutant = MUTANTS[name]
    monkeypatch.setattr(module, target, mutant)
    above, (seen, *_) = checked(case), name.split(":")
    assert above.get(seen, max(above.values())) > 2


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
