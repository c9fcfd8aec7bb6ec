"""A head is a site whose weights have the rows of H_pre alone: its op, its graph, its module."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from cute_kernels import mhc
from cute_kernels.mhc import HyperHead, Options, head, mix_and_aggregate
from tests.contract import same_bytes
from tests.mhc import cases, packed
from tests.mhc.cases import BF16, FP32, Case

MIX, BACKWARD = torch.ops.cute_kernels.mhc_mix, torch.ops.cute_kernels.mhc_mix_backward


def opcheck_cases(n: int) -> dict[str, tuple]:
    """Weights of [n, K], [1] and [n], where a site's have [N, K], [3] and [N]."""
    case = Case(61, 5, 6, n, "cn", (BF16, FP32), True, options=Options(iterations=3))
    i, up = packed.inputs_of("head", case), cases.upstream_of(case, cases.inputs_of(case))
    x, numbers, none = i.x.flatten(1), case.options.numbers(n), (None,) * 4
    weights = (i.phi, i.norm_weight, i.alpha, i.beta)
    out = MIX(x, *weights, *none, *numbers, False)[1:6]
    mains = [torch.ones(t.shape) for t in weights]
    leaves = [t.clone().requires_grad_() for t in (x, *weights)]
    back = (up.out, None, None, None, None, x, *weights, *out)
    return {
        "forward": (MIX, (*leaves, *none, *numbers, False)),
        "no tokens": (MIX, (x[:0], *weights, *none, *numbers, False)),
        "backward": (BACKWARD, (*back, *none, *numbers, [True] * 5)),
        "mains": (BACKWARD, (*back, *mains, *numbers, [True] * 5)),
        "some": (BACKWARD, (*back, mains[0], None, None, None, *numbers, [False, *[True] * 4])),
    }


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", list(opcheck_cases(4)))
def test_opcheck(name, n):
    target, args = opcheck_cases(n)[name]
    assert set(opcheck(target.default, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_it_is_a_site_whose_other_rows_are_zeros(dtype, n):
    """The bytes of out, of dx and of each weight's gradient, by way of torch's padding."""
    case = Case(62, 1500, 6, n, "nc", (dtype, BF16), True, options=Options(layout="nc"))
    i, found = packed.inputs_of("head", case), []
    d_out = cases.upstream_of(case, cases.inputs_of(case)).out
    for whole in (False, True):
        leaves = [t.clone().requires_grad_() for t in (i.x, i.phi, i.alpha, i.beta, i.norm_weight)]
        x, phi, alpha, beta, norm_weight = leaves
        inputs = {"norm_weight": norm_weight, "options": case.options}
        if whole:
            pad, rows = torch.nn.functional.pad, n + n * n
            padded = (pad(phi, (0, 0, 0, rows)), pad(alpha, (0, 2)), pad(beta, (0, rows)))
            out, *_ = mix_and_aggregate(x, *padded, **inputs)
        else:
            out = head(x, phi, alpha, beta, **inputs)
        out.backward(d_out)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
        assert all(t.grad.untyped_storage().nbytes() == t.nbytes for t in leaves)
    for one, other in zip(*found, strict=True):
        assert one.any() and same_bytes(one, other)


def of_module(pieces: list[int], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The main_grads of a module, after micro-batches of so many tokens."""
    torch.manual_seed(4)
    module = HyperHead(24, 4, norm_weight=True)
    module_parameters = dict(module.named_parameters())
    for weight in module_parameters.values():
        weight.main_grad = torch.zeros_like(weight)
        weight.grad_added_to_main_grad = False
    cotangents = cases.normal(len(tokens), 24, seed=8)
    for token, cotangent in zip(tokens.split(pieces), cotangents.split(pieces), strict=True):
        module(token).backward(cotangent)
    assert all(
        weight.grad is None and weight.grad_added_to_main_grad
        for weight in module_parameters.values()
    )
    return {name: weight.main_grad for name, weight in module_parameters.items()}


def test_a_modules_gradients_do_not_follow_the_split():
    tokens = cases.normal(2500, 24, 4, seed=9)
    whole = of_module([2500], tokens)
    assert set(whole) == {"phi", "alpha", "beta", "norm_weight"}
    assert all(t.any() for t in whole.values())
    cut = of_module([1024, 1024, 452], tokens)
    assert all(same_bytes(t, cut[name]) for name, t in whole.items())
    # Not a multiple of 1024: promised nothing, and other bytes show that this test can see them.
    # alpha and beta are few numbers, which may be the same by chance.
    elsewhere = of_module([1000, 1500], tokens)
    assert not any(same_bytes(whole[name], elsewhere[name]) for name in ("phi", "norm_weight"))


@pytest.mark.parametrize("layout", ["cn", "nc"])
@pytest.mark.parametrize("n", [2, 4])
def test_one_channel_keeps_its_dimension(n, layout):
    """K = n: the last dimension of x [..., 1, n] is as long as a whole row."""
    options = Options(layout=layout)
    size = 2 * n + n * n
    x = cases.normal(5, *((1, n) if layout == "cn" else (n, 1)), seed=71)
    phi, alpha, beta = (cases.normal(*shape, seed=72) for shape in ((size, n), (3,), (size,)))
    out = mhc.head(x, phi[:n].clone(), alpha[:1].clone(), beta[:n].clone(), options=options)
    assert out.shape == (5, 1)
    mixed, post, res = mhc.mix_and_aggregate(x, phi, alpha, beta, options=options)
    assert same_bytes(out, mixed)
    y = mhc.connect(x, torch.tanh, phi, alpha, beta, options=options)
    both = mhc.post_pre(torch.tanh(mixed), None, post, x, res, phi, alpha, beta, options=options)
    assert y.shape == x.shape and same_bytes(y, both[0]) and both[1].shape == (5, 1)
