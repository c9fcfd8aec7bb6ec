"""HyperConnection and HyperHead: how they start, what they compute, where they go."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import cute_kernels as ck
from cute_kernels.mhc import HyperConnection, HyperHead, Options
from tests import ranks
from tests.contract import same_bytes
from tests.mhc import fsdp_rank

C = 24
HALF_ULP = 2.0**-24  # of fp32, relative


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def streams(n: int, layout: str, *leading: int, channels: int = C, seed: int = 1) -> torch.Tensor:
    trailing = (channels, n) if layout == "cn" else (n, channels)
    return drawn(*leading, *trailing, seed=seed)


def site(n: int = 4, seed: int = 2, **others) -> HyperConnection:
    """One with a linear sublayer, and weights far from their start."""
    torch.manual_seed(seed)
    out = HyperConnection(nn.Linear(C, C), C, n, **others)
    with torch.no_grad():
        for weight in out.parameters():
            weight += 0.3 * torch.randn(weight.shape)
    return out


def results(run, x: torch.Tensor, module: nn.Module) -> dict[str, torch.Tensor]:
    """y, and the gradients of x and of every weight, by a random cotangent."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    y.backward(drawn(*y.shape, seed=9).to(y.dtype))
    grads = {name: weight.grad for name, weight in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def differing(one: dict, other: dict) -> list[str]:
    assert one.keys() == other.keys()
    return [
        name
        for name, t in one.items()
        if (t is None) != (other[name] is None)
        or (t is not None and not same_bytes(t, other[name]))
    ]


def coefficients(module: HyperConnection, x: torch.Tensor):
    """(pre, post, res, H / r), of the module's weights."""
    options, n = module.options, module.n
    h, ms = ck.mhc.projection(x, module.phi, norm_weight=module.norm_weight, layout=options.layout)
    numbers = {"eps": options.eps, "pre_eps": options.pre_eps, "post_scale": options.post_scale}
    pre, post, z = ck.mhc.scale(h, module.alpha, module.beta, ms, n, **numbers)
    res = ck.mhc.sinkhorn(
        z, n, iterations=options.iterations, form=options.form, eps=options.form_eps
    )
    return pre, post, res, h[:, : len(module.beta)] / (ms + options.eps).sqrt()[:, None]


# ---- the start -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["cn", "nc"])
@pytest.mark.parametrize("n", [2, 4])
@torch.no_grad()
def test_gates_start_where_the_documentation_says(n, layout):
    options = Options(layout=layout, pre_eps=0.03)
    module = HyperConnection(nn.Identity(), C, n, options=options, norm_weight=True)
    x = streams(n, layout, 50)
    *_, normed = coefficients(module, x)
    assert 0.5 < normed.std() < 2  # phi's standard deviation is that of N(0, 1/K)
    moved = 0.01 * normed.abs().max().item()
    for alpha, most in ((0.0, 0.0), (0.01, moved)):
        module.alpha.fill_(alpha)
        pre, post, res, _ = coefficients(module, x)
        # σ' is at most 1/4.  2^-19: e^x, beta and a sum of n, each within a few ulp.
        assert (pre - 1 / n).abs().max() <= most / 4 + 2.0**-19
        assert (post - 1).abs().max() <= most / 2 + 2.0**-19
        if not most:
            want = torch.full((n, n), 0.01 / (n - 1), dtype=torch.float64).fill_diagonal_(0.99)
            # 2 T normalisations, each a sum of n and a division.
            ulps = (2 * options.iterations * n + 8) * HALF_ULP
            assert ((res - want).abs() <= ulps * want).all()
        assert most == 0 or not same_bytes(res[0], res[1])


@pytest.mark.parametrize("n", [2, 4])
@torch.no_grad()
def test_starts_as_a_plain_residual_connection(n):
    module = HyperConnection(torch.tanh, C, n, bias=True)
    head = HyperHead(C, n)
    module.alpha.zero_()
    head.alpha.zero_()
    e = drawn(70, C)
    x = ck.mhc.expand_from_embedding(e, n)
    want = e.double() + e.double().tanh()
    # Gates to 2^-19 as above; tanh moves by no more than its argument.
    limit = 2.0**-18 * (e.abs() + 1)
    assert ((module(x) - want[..., None]).abs() <= limit[..., None]).all()
    assert ((head(x) - e).abs() <= limit).all()


@torch.no_grad()
def test_a_pre_eps_beyond_the_mean_starts_at_a_half():
    module = HyperConnection(nn.Identity(), C, 4, options=Options(pre_eps=0.5))
    assert not module.beta[:8].any() and module.beta[8:].any()


def test_reset_parameters_draws_phi_again_and_leaves_the_sublayer():
    module = site(bias=True, norm_weight=True)
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    module.reset_parameters()
    after = dict(module.named_parameters())
    assert {name for name in before if same_bytes(before[name], after[name])} == {
        "sublayer.weight",
        "sublayer.bias",
    }
    with torch.device("meta"):
        empty = HyperConnection(nn.Identity(), C, norm_weight=True)
    assert empty.phi.is_meta and empty(torch.empty(3, C, 4, device="meta")).is_meta
    empty.to_empty(device="cpu").reset_parameters()
    assert same_bytes(empty.beta, after["beta"]) and empty.phi.std() < 0.2
    assert not same_bytes(empty.phi, after["phi"])


# ---- what it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "layout", "dtype", "weights"),
    [
        (4, "cn", torch.float32, True),
        (2, "nc", torch.bfloat16, True),
        (4, "nc", torch.bfloat16, False),
    ],
)
def test_it_is_connect(n, layout, dtype, weights):
    options = Options(layout=layout, pre_eps=0.01, iterations=5, form="epsilon")
    module = site(n, bias=weights, norm_weight=weights, options=options)
    module.sublayer.to(dtype)
    x = streams(n, layout, 2, 17).to(dtype)

    def by_hand(x):
        own = (module.phi, module.alpha, module.beta)
        bias = module.bias.to(dtype) if weights else None
        also = {"bias": bias, "norm_weight": module.norm_weight, "options": options}
        return ck.mhc.connect(x, module.sublayer, *own, **also)

    got = results(module, x, module)
    assert not differing(got, results(by_hand, x, module))
    assert all(t is not None and t.any() for t in got.values())
    assert got["y"].dtype is dtype and got["y"].shape == x.shape
    assert got["phi"].dtype is torch.float32 and ("bias" in got) == weights


def test_other_arguments_go_to_the_sublayer():
    recorded = []

    def sublayer(out, factor, *, x):
        recorded.append((out.shape, factor, x))
        return out * factor

    module = HyperConnection(sublayer, C)
    x = streams(4, "cn", 2, 5)
    y = module(x, 0.0, x="named as the streams are")
    assert recorded == [((2, 5, C), 0.0, "named as the streams are")]
    assert not same_bytes(module(x, 1.0, x=None), y)


@pytest.mark.parametrize(("n", "norm_weight"), [(2, False), (4, True)])
def test_the_head_is_head(n, norm_weight):
    torch.manual_seed(3)
    head = HyperHead(C, n, norm_weight=norm_weight, options=Options(layout="nc", pre_eps=0.1))
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.3 * torch.randn(weight.shape)
    x = streams(n, "nc", 3, 11)

    def by_hand(x):
        weights = (head.phi, head.alpha, head.beta)
        return ck.mhc.head(x, *weights, norm_weight=head.norm_weight, options=head.options)

    got = results(head, x, head)
    assert not differing(got, results(by_hand, x, head))
    assert all(t.any() for t in got.values()) and got["y"].shape == (3, 11, C)


# ---- main_grad -----------------------------------------------------------------------------------


MODULES = {
    "site": lambda: site(bias=True, norm_weight=True),
    "head": lambda: HyperHead(C, 4, norm_weight=True),
}


@pytest.mark.parametrize("kind", MODULES)
def test_gradients_go_into_main_grads(kind):
    module, x = MODULES[kind](), streams(4, "cn", 30)
    own, want = dict(module.named_parameters(recurse=False)), results(module, x, module)
    for weight in own.values():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    results(module, x, module)
    assert {"phi", "alpha", "beta", "norm_weight"} <= set(own)
    for name, weight in own.items():
        assert weight.grad is None and weight.grad_added_to_main_grad
        assert weight.main_grad.any() and same_bytes(weight.main_grad, want[name])


# ---- where it goes -------------------------------------------------------------------------------


def test_weights_travel():
    one = site(bias=True, norm_weight=True, seed=2)
    other = site(bias=True, norm_weight=True, seed=3)
    x = streams(4, "cn", 7)
    assert not same_bytes(one(x), other(x))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert same_bytes(one(x), other(x)) and same_bytes(one(x), copy.deepcopy(one)(x))
    kept = [name for name, value in vars(one).items() if isinstance(value, torch.Tensor)]
    assert kept == []  # fully_shard, to() and state_dict see parameters only


@pytest.mark.nightly
def test_sharded_by_fsdp2_it_has_the_bytes_of_one_process():
    first, second = ranks.run(fsdp_rank.WORLD, fsdp_rank.report)
    assert first == second
    recomputed = {"differing": [], "outputs": True, "streams": [2]}
    assert first == {
        "outputs": "same",
        "gradients": [],
        "refused": "main_grad: expected none",
        "recomputed": recomputed,
        "in DDP": recomputed,
    }


def test_it_prints_what_it_is():
    text = repr(site(2, bias=True, options=Options(layout="nc")))
    assert "channels=24, n=2, bias=True, Options(layout='nc'" in text
    assert "norm_weight" not in text and "norm_weight=True" in repr(HyperHead(8, norm_weight=True))
