"""linear_policy_loss against published formulas in float64, and a token's bytes in any batch."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError
from cute_kernels.logp import policy_losses
from cute_kernels.logp.policy_losses import KL, LOSSES, REDUCTIONS
from tests import contract
from tests.contract import same_bytes
from tests.logp import policy_cases as cases
from tests.logp.policy_cases import FP32


def require_close(got: cases.Results, want: cases.Results) -> None:
    """fp32 results of small sums: 2^-15 of the largest element of each, on a GPU 2^-14."""
    limit = 2.0**-14 if got.loss.is_cuda else 2.0**-15
    for name, a, b in zip(got._fields, got, want, strict=True):
        if a is not None:
            error, size = (a.double() - b).abs().max(), b.abs().max()
            assert error <= limit * size + 1e-9, (name, error.item(), size.item())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mask", ["none", "empty sequence"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_formula_in_float64(name, mask, device):
    """Other masks: test_policy_bytes.py."""
    x = cases.problem(name, mask, dtype=FP32, bias=True, seed=3, device=device)
    options = cases.options_of(name, entropy_weight=0.07, temperature=1.3)
    require_close(cases.fused(name, x, **options), cases.exact(name, x, **options))


OTHERS = {
    **{f"kl {kind}": {"kl": kind} for kind in KL},
    **{f"by {kind}": {"reduction": kind} for kind in REDUCTIONS},
    **{f"by {kind}, divided": {"reduction": kind, "divisor": 5.0} for kind in REDUCTIONS},
    "entropy by tokens": {"entropy_weight": 0.2, "entropy_reduction": "token_mean", "divisor": 9.0},
    "entropy divided": {"entropy_weight": 0.2, "divisor": 9.0},
    "scaled": {"loss_scale": 0.25, "entropy_weight": 0.2},
}


@pytest.mark.parametrize("case", OTHERS)
def test_options_in_float64(case):
    x, options = cases.problem("ppo", "empty sequence", dtype=FP32), OTHERS[case]
    options = cases.options_of("ppo", **options)
    require_close(cases.fused("ppo", x, **options), cases.exact("ppo", x, **options))


def test_metrics():
    x, options = cases.problem("dapo", "some", dtype=FP32), cases.options_of("dapo")
    out = ck.linear_policy_loss(
        *x[:2], x.target, loss="dapo", mask=x.mask, return_entropy=True, **x.tensors, **options
    )
    kept, metrics = x.mask, out.metrics
    ratio = (out.logp - x.tensors["old_logp"])[kept].double().exp()
    advantages, d = x.tensors["advantages"][kept], (x.tensors["reference_logp"] - out.logp)[kept]
    low, high = 1 - options["clip_low"], 1 + options["clip_high"]
    clipped = (ratio > high) & (advantages > 0) | (ratio < low) & (advantages < 0)
    clipped |= (ratio > options["max_ratio"]) & (advantages < 0)
    kl = (d.double().exp() - d - 1).mean()
    assert 0.1 < clipped.double().mean() < 0.9
    assert metrics.clip_fraction.item() == pytest.approx(clipped.double().mean().item(), rel=1e-6)
    assert metrics.ratio.item() == pytest.approx(ratio.mean().item(), rel=1e-5)
    assert metrics.kl.item() == pytest.approx(kl.item(), rel=1e-4)
    assert metrics.entropy.item() == pytest.approx(out.entropy[kept].mean().item(), rel=1e-5)
    whole = metrics.policy_loss + options["kl_weight"] * metrics.kl
    assert out.loss.item() == pytest.approx(whole.item(), rel=1e-5)
    plain = ck.linear_policy_loss(*x[:2], x.target, loss="cross_entropy", mask=x.mask)
    assert plain.metrics[1:] == (None,) * 4 and plain.entropy is None


def test_exp_is_accurate_and_ends_where_fp32_does():
    x = torch.cat([torch.linspace(-87, 88.3, 100_001), torch.linspace(-1e-3, 1e-3, 1001)])
    want = x.double().exp()
    assert ((policy_losses.exp(x).double() - want).abs() <= 2.0**-22 * want).all()
    edges = torch.tensor([0.0, -math.inf, math.inf, math.nan, -200.0, 200.0])
    got = policy_losses.exp(edges).tolist()
    assert got[:3] == [1.0, 0.0, math.inf] and math.isnan(got[3]) and got[4:] == [0.0, math.inf]


def test_a_clipped_ratio_that_overflows_has_no_gradient():
    x = cases.problem("ppo", "none", dtype=FP32)
    x.tensors["advantages"] = torch.ones_like(x.tensors["advantages"])
    x.tensors["old_logp"][0, 3] = -1000.0
    got = cases.fused("ppo", x, kl_weight=0.0)
    assert got.loss.isfinite() and not got.hidden[0, 3].any() and got.hidden.any()
    assert got.weight.isfinite().all()


IMPORTANCE = {"kl_weight": 1.0, "kl": "k3_importance"}
LOW = {"old_logp": -400.0, "advantages": -1.0}
#: A token of -200 nats: the loss, its options, and the token's old log p, reference and the like.
FAR = {
    "k3_importance": ("ppo", IMPORTANCE, {"old_logp": -1.0, "reference_logp": -1.0}),
    "k3_importance, r is 0": ("ppo", IMPORTANCE, {"old_logp": -99.0, "reference_logp": -99.5}),
    "k3_importance, r is inf": ("cispo", IMPORTANCE, {"old_logp": -400.0, "reference_logp": -1.0}),
    "k3_importance, d is 95": ("ppo", IMPORTANCE, {"old_logp": -110.0, "reference_logp": -107.0}),
    "k3": ("ppo", {"kl_weight": 1.0, "kl": "k3"}, {"old_logp": -200.0, "reference_logp": -1.0}),
    "spo": ("spo", {}, {"old_logp": -400.0, "advantages": 1.0}),
    "spo, A < 0": ("spo", {}, {"old_logp": -400.0, "advantages": -1.0}),
    "spo, A = 0": ("spo", {}, {"old_logp": -400.0}),
    "spo, r is 2^68": ("spo", {}, {"old_logp": -250.0, "advantages": 0.5}),
    "importance_ratio": ("importance_ratio", {}, {"old_logp": -400.0, "advantages": 1.0}),
    "importance_ratio, A = 0": ("importance_ratio", {}, {"old_logp": -400.0}),
    "ppo, A < 0": ("ppo", {"max_ratio": None}, LOW),
    "weight 0": ("ppo", {"max_ratio": None}, LOW | {"token_weights": 0.0}),
}


@pytest.mark.parametrize("case", FAR)
def test_a_token_far_out_leaves_no_nan(case):
    """Its loss is that of float64 in fp32's range; a gradient that fp32 does not hold is 0."""
    name, options, far = FAR[case]
    drawn = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(1, 5, 8, generator=drawn), torch.randn(6, 8, generator=drawn)
    bias, target = torch.tensor([0.0, -200.0, 0, 0, 0, 0]), torch.tensor([[0, 5, 1, 2, 3]])
    logp = ck.linear_logp(hidden, weight, target, bias)
    tensors = {"old_logp": logp + 0.1, "advantages": torch.randn(1, 5, generator=drawn)}
    tensors["advantages"][0, 2] = 0.0
    tensors |= {"reference_logp": logp - 0.2} if options else {}
    for key, value in far.items():
        tensors.setdefault(key, torch.ones(1, 5))[0, 2] = value
    x = cases.Problem(hidden, weight, bias, target, None, tensors)
    options = cases.options_of(name, reduction="sum") | {"kl_weight": 0.0} | options
    got = cases.fused(name, x, **options)
    want = cases.exact(name, x, **{k: math.inf if v is None else v for k, v in options.items()})
    exact = want.loss.float()
    assert exact.isinf() if got.loss.isinf() else abs(got.loss / exact - 1) < 1e-3
    assert got.loss.isinf() == (got.loss.abs() > 1e38) and want.loss.isfinite()
    others = x._replace(mask=torch.tensor([[True, True, False, True, True]]))
    alone = cases.fused(name, others, **options)
    row = torch.tensor([0, 1, 3, 4])
    assert same_bytes(got.hidden[0, row], alone.hidden[0, row])
    if got.loss.isinf():
        assert not got.hidden[0, 2].any()
        want = alone
    for a, b in zip(got[3:], want[3:], strict=True):
        assert (a.double() - b).abs().max() <= 1e-3 * b.abs().max()


def test_a_token_of_probability_0():
    """log p = -inf, as of a bias of -inf."""
    logp, one = torch.tensor([-math.inf]), torch.ones(1)
    for kind, want in (("k3", math.inf), ("k3_importance", math.exp(-0.5))):
        leaf = logp.clone().requires_grad_()
        kl = KL[kind](leaf, -1.5 * one, -one)
        assert kl.item() == pytest.approx(want)
    assert policy_losses.policy_gradient(logp, None, advantages=0.0 * one) == 0
    far_out = policy_losses.cispo(
        logp, None, advantages=0.0 * one, old_logp=-one, clip_low=1.0, clip_high=4.0
    )
    assert far_out == 0
    assert policy_losses.dynamic_fine_tuning(logp, None) == 0


def test_without_old_logp_a_ratio_is_one_and_has_a_gradient():
    x = cases.problem("grpo", "some")
    del x.tensors["old_logp"]
    got = cases.fused("grpo", x)
    x.tensors.pop("reference_logp")
    want = cases.fused("policy_gradient", x, reduction="sequence_mean")
    assert same_bytes(got.hidden, want.hidden) and got.hidden.any()


@pytest.mark.parametrize("divisor", [None, 7.0, torch.tensor(7.0)], ids=["own", "7", "tensor"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_weight_is_rounded_once(reduction, divisor):
    kept = torch.rand(5, 23, generator=torch.Generator().manual_seed(6)) > 0.3
    kept[3] = False
    lengths, scale, most = kept.sum(1).tolist(), 0.3, 11.0
    got = policy_losses.weights_of(kept, reduction, divisor, most, scale, None).view(5, 23)
    own = {"sum": 1.0, "token_mean": float(sum(lengths))}.get(reduction, 5.0)
    for row, length in enumerate(lengths):
        below = own if divisor is None else 7.0
        below *= {"sequence_mean": max(1, length), "constant": most}.get(reduction, 1.0)
        want = torch.tensor(scale / below, dtype=torch.float64).float()
        assert same_bytes(got[row], torch.where(kept[row], want, 0.0))


def halved(values: torch.Tensor) -> torch.Tensor:
    """Σ of fp64 [n], padded to a power of two, the second half added onto the first."""
    values = torch.cat(
        [values, values.new_zeros((1 << (len(values) - 1).bit_length()) - len(values))]
    )
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return values[0]


def test_the_bytes_of_the_loss_and_its_metrics():
    """Products and sums in fp64 over all tokens, of fp32 terms and weights; one rounding."""
    x = cases.problem("policy_gradient", "some", dtype=FP32, sizes=(3, 37, 24, 90))
    kept = x.mask.reshape(-1)
    advantages, reference = (
        torch.where(kept, x.tensors[name].reshape(-1), 0.0)
        for name in ("advantages", "reference_logp")
    )
    weights = cases.weights(x, "sequence_mean", {}).reshape(-1).double()
    # So that both sums cancel, and the last bits of a product show.
    logp = ck.linear_logp(*x[:2], torch.where(x.mask, x.target, cases.IGNORED)).reshape(-1)
    ballast = int(kept.nonzero()[-1])
    advantages[ballast] = 0.0
    total = (advantages.double() * logp * weights).sum()
    advantages[ballast] = -total / (logp[ballast] * weights[ballast])
    out = ck.linear_policy_loss(
        *x[:2], x.target, loss="policy_gradient", mask=x.mask, reduction="sequence_mean", kl="k1",
        advantages=advantages.view(x.target.shape), reference_logp=x.tensors["reference_logp"],
        kl_weight=0.3, entropy_weight=0.07,
    )  # fmt: skip
    entropy = out.entropy.reshape(-1).double()
    policy = halved((-(advantages * logp)).double() * weights)
    kl = torch.where(kept, -(reference - logp), 0.0).double()
    total = policy + 0.3 * halved(kl * weights) - 0.07 * halved(entropy * weights)
    assert same_bytes(out.loss, total.float())
    assert same_bytes(out.metrics.policy_loss, policy.float()) and policy.abs() < 1e-4
    count = kept.sum().double()
    assert same_bytes(out.metrics.kl, (halved(kl) / count).float())
    assert same_bytes(out.metrics.entropy, (halved(entropy) / count).float())


def test_a_token_without_an_advantage_is_not_clipped():
    x = cases.problem("ppo_dual_clip", "none")
    x.tensors["advantages"].zero_()
    options = cases.options_of("ppo_dual_clip")
    for far in (-3.0, 3.0):
        x.tensors["old_logp"] = ck.linear_logp(*x[:2], x.target) + far
        out = ck.linear_policy_loss(*x[:2], x.target, loss="ppo_dual_clip", **x.tensors, **options)
        assert out.metrics.clip_fraction == 0 and abs(out.metrics.ratio.log() + far) < 0.1


# ---- sequences -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_packed_sequences_are_padded_ones(reduction):
    """Lengths 5, 0 and 8, as rows with masked tails and one after another."""
    x = cases.problem("grpo", "none", sizes=(3, 8, 24, 60), dtype=FP32)
    lengths = torch.tensor([5, 0, 8])
    kept = torch.arange(8) < lengths[:, None]
    x = x._replace(mask=kept)
    x.tensors["advantages"] = torch.randn(3)
    options = cases.options_of("grpo", reduction=reduction)
    padded = cases.fused("grpo", x, **options)
    tensors = {k: t if t.dim() == 1 else t[kept] for k, t in x.tensors.items()}
    packed = x._replace(hidden=x.hidden[kept], target=x.target[kept], mask=None, tensors=tensors)
    cuts = torch.tensor([0, 5, 5, 13], dtype=torch.int32)
    got = cases.fused("grpo", packed, cu_seqlens=cuts, **options)
    assert same_bytes(got.hidden, padded.hidden[kept])
    assert got.loss.item() == pytest.approx(padded.loss.item(), rel=1e-6)


def test_values_of_sequences():
    x = cases.problem("grpo", "some")
    results = []
    for shape in ((3,), (3, 1), (3, 17)):
        x.tensors["advantages"] = torch.tensor([1.0, -2.0, 0.5])[:, None].expand(3, 17)
        if shape != (3, 17):
            x.tensors["advantages"] = x.tensors["advantages"][:, 0].reshape(shape)
        results.append(cases.fused("grpo", x))
    for got in results[1:]:
        assert all(a is None or same_bytes(a, b) for a, b in zip(got, results[0], strict=True))


# ---- a token alone and in a batch ----------------------------------------------------------------


def of_tokens(x: cases.Problem, index: torch.Tensor, loss, **options):
    """(logp, entropy, dhidden) of some tokens in some order."""
    hidden = x.hidden[0, index].clone().requires_grad_()
    tensors = {key: t[0, index] for key, t in x.tensors.items()}
    out = ck.linear_policy_loss(
        hidden, x.weight, x.target[0, index], loss=loss, reduction="sum", return_entropy=True,
        **tensors, **options,
    )  # fmt: skip
    out.loss.backward()
    return out.logp, out.entropy, hidden.grad


def torch_exponentials(logp, entropy, *, advantages, old_logp, reference_logp):
    """Of the user's, with torch's vectorised functions."""
    ratio = torch.exp(logp - old_logp)
    return -(torch.sigmoid(ratio * 3) * advantages) - 0.01 * torch.tanh(entropy)


@pytest.mark.parametrize("loss", ["grpo", "sapo", "cispo", "dft", torch_exponentials])
def test_a_token_has_its_bytes_in_any_batch(loss):
    name = loss if isinstance(loss, str) else "grpo"
    x = cases.problem(name, "none", sizes=(1, 83, 24, 70), dtype=FP32)
    options = (
        cases.options_of(name, reduction="sum") if isinstance(loss, str) else {"kl_weight": 0.2}
    )
    options.pop("reduction", None)
    whole = of_tokens(x, torch.arange(83), loss, **options)
    assert whole[2].any()
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 7, 15, 16, 17, 33, 65, 83):
        index = torch.randperm(83, generator=generator)[:count]
        for got, want in zip(of_tokens(x, index, loss, **options), whole, strict=True):
            assert same_bytes(got, want[index]), count


# ---- functions of the user's ---------------------------------------------------------------------


def test_a_function_of_the_entropy_and_of_other_tensors():
    x = cases.problem("cross_entropy", "some", dtype=FP32)
    scale = torch.rand(3, 17)
    x.tensors.clear()

    def loss(logp, entropy, *, scale):
        return -scale * logp - 0.1 * entropy

    got = cases.fused(loss, x, tensors={"scale": scale})
    leaves = cases.leaves_of(x)
    target = torch.where(x.mask, x.target, cases.IGNORED)
    logp, entropy = ck.linear_logp(leaves[0], leaves[1], target, return_entropy=True)
    weights = cases.weights(x, "token_mean", {})
    (loss(logp, entropy, scale=scale) * weights).sum().backward()
    assert same_bytes(got.hidden, leaves[0].grad) and same_bytes(got.weight, leaves[1].grad)


def test_a_function_without_a_gradient_is_refused_where_no_other_term_has_one():
    x = cases.problem("cross_entropy", "none")
    x.tensors.clear()
    functions = {
        "constant": lambda logp, entropy: torch.ones_like(logp),
        "detached": lambda logp, entropy: -logp.detach(),
        "no_grad": torch.no_grad()(lambda logp, entropy: -logp),
    }
    for function in functions.values():
        for needs in ((True, False, False), (False, True, False)):
            with pytest.raises(ArgumentValueError, match=r"^loss: expected a function of logp or"):
                cases.fused(function, x, needs)
        plain = ck.linear_policy_loss(*x[:2], x.target, loss=function)
        got = cases.fused(function, x, entropy_weight=0.1)
        assert plain.loss.isfinite() and got.hidden.any() and got.weight.any()
        kl = {"reference_logp": plain.logp - 0.3, "kl_weight": 0.1}
        with_kl = functools.partial(lambda f, *logps, reference_logp: f(*logps), function)
        assert cases.fused(with_kl, x, **kl).hidden.any()


def test_a_function_sees_zeros_of_tokens_that_do_not_count():
    """What those tensors hold is NaN."""
    x, seen = cases.problem("ppo", "some"), []

    def loss(logp, entropy, **tensors):
        seen.append(tensors)
        advantages = tensors["advantages"]
        return -(logp * (advantages - advantages.mean()))

    got, flat = cases.fused(loss, x), x.mask.reshape(-1)
    assert got.loss.isfinite() and got.hidden[x.mask].isfinite().all()
    (given,) = seen
    for name, t in x.tensors.items():
        assert same_bytes(given[name][: len(flat)], torch.where(flat, t.reshape(-1), 0.0)), name


# ---- the battery ---------------------------------------------------------------------------------

VOCAB, WIDTH = 70, 24
HEAD = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(8))


def rows_of_loss(rows: torch.Tensor) -> torch.Tensor:
    """[T, 2 + D]: log p, entropy and dhidden; what a token is given follows from its own bits."""
    bits = rows[:, 0].contiguous().view(torch.int32).long()
    leaf = rows.detach().requires_grad_()
    out = ck.linear_policy_loss(
        leaf, HEAD, bits // 65536 % VOCAB, loss="sapo", reduction="sum", entropy_weight=0.1,
        advantages=(bits % 7 - 3).float(), old_logp=-(bits % 11).float(),
    )  # fmt: skip
    out.loss.backward()
    return torch.cat([out.logp[:, None], out.entropy[:, None], leaf.grad], 1)


def test_battery():
    contract.check_rows(contract.RowOp("linear_policy_loss", rows_of_loss, WIDTH, FP32), 70, 11)
