"""Losses of single tokens: the table of policy losses, KL estimators and reductions.

Every loss is a torch function of tensors [tokens], differentiated by torch's autograd in fp32.  It
is made of sums, products, comparisons and `exp`, so a token's loss and gradient are the same bytes
at any position of any batch: a vectorised ``torch.exp`` promises that on no CPU.

    ratio r = e^(logp - old_logp)        A = advantages        all per token
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from ..cpu.ieee import EXP2, halves
from .config import LOG2E

#: Values of ``reduction``: what the weighted sum over tokens is divided by.
REDUCTIONS = ("sum", "token_mean", "sequence_mean", "constant")
#: Largest power of two of `exp`: beyond 127.5, its whole part has no exponent in fp32.
_LARGEST = 127.49


class _Exp(torch.autograd.Function):
    """e^x in fp32 by operations that are correctly rounded for each element."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        # e^x = 2^whole 2^f, f in [-1/2, 1/2]; the split in fp64, 2^f as in `ieee.exp2`.
        y = x.double() * LOG2E
        finite = torch.nan_to_num(y, nan=0.0).clamp(-126.0, _LARGEST)
        whole = finite.round()
        f = (finite - whole).float()
        series = torch.full_like(f, EXP2[-1])
        for c in EXP2[-2::-1]:
            series = series * f + c
        value = series * ((whole.to(torch.int32) + 127) << 23).view(torch.float32)
        value = torch.where(y < -126.0, 0.0, value)
        value = torch.where(y > _LARGEST, torch.inf, value)
        value = torch.where(y.isnan(), torch.nan, value)
        ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (value,) = ctx.saved_tensors
        # A clipped ratio has gradient 0, also where it has overflowed: 0 times inf is NaN.
        return torch.where(gradient == 0, gradient, gradient * value)


def exp(x: torch.Tensor) -> torch.Tensor:
    """Exponential of fp32, differentiable once; an element's bits depend on that element alone.

    0 below 2^-126, inf above 2^127.49, relative error below 2^-22.
    """
    return _Exp.apply(x)


def ratio_of(logp: torch.Tensor, old_logp: torch.Tensor | None) -> torch.Tensor:
    """Importance ratio; exactly 1, with a gradient, without ``old_logp``."""
    return exp(logp - (logp.detach() if old_logp is None else old_logp))


def product(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x times the factor; where the factor is 0 also 0 for an infinite x."""
    return x.masked_fill(x.isinf() & (factor == 0), 0.0) * factor


# ---- losses of a token ---------------------------------------------------------------------------


def cross_entropy(logp, entropy):
    """-log p."""
    return -logp


def dynamic_fine_tuning(logp, entropy):
    """Cross entropy weighted by the token's own probability."""
    return -product(logp, exp(logp.detach()))


def policy_gradient(logp, entropy, *, advantages):
    """REINFORCE: the score function times the advantage."""
    return -product(logp, advantages)


def importance_ratio(logp, entropy, *, advantages, old_logp=None):
    """Unclipped surrogate of off-policy tokens."""
    return -product(ratio_of(logp, old_logp), advantages)


def clipped_ratio(logp, entropy, *, advantages, old_logp=None, clip_low, clip_high, max_ratio=None):
    """PPO's surrogate; ``max_ratio`` bounds it where the advantage is negative."""
    ratio = ratio_of(logp, old_logp)
    capped = ratio if max_ratio is None else ratio.clamp(max=max_ratio)
    plain = capped * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.where(plain <= clipped, plain, clipped)


def cispo(logp, entropy, *, advantages, old_logp=None, clip_low, clip_high):
    """Score function weighted by a clipped ratio that has no gradient: no token loses its own."""
    ratio = ratio_of(logp, old_logp).detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -product(logp, ratio * advantages)


def sapo(logp, entropy, *, advantages, old_logp=None, gate_positive, gate_negative):
    """A sigmoid gate of the ratio in place of clipping."""
    ratio = ratio_of(logp, old_logp)
    tau = torch.full_like(ratio, gate_negative).masked_fill(advantages > 0, gate_positive)
    gate = 1.0 / (1.0 + exp(-(tau * (ratio - 1.0))))
    return -(gate * (4.0 / tau) * advantages)


def spo(logp, entropy, *, advantages, old_logp=None, clip_high):
    """A quadratic penalty of the ratio in place of clipping."""
    ratio = ratio_of(logp, old_logp)
    # From 2^64 on the square is inf: no inf - inf with it, and no 0 inf.
    away = (ratio - 1.0).masked_fill((ratio > 2.0**63) & (advantages == 0), 0.0)
    penalty = advantages.abs() * (away * away) / (2.0 * clip_high)
    return -(ratio.clamp(max=2.0**64) * advantages - penalty)


@dataclass(frozen=True)
class PolicyLossRow:
    """One loss of the table.

    Attributes:
        name: Value of ``loss=``.
        formula: Loss of one token.
        source: Where the formula is from.
        function: ``function(logp, entropy, **tensors, **options)``, [tokens] each.
        options: Option -> its default; options that are not here are refused.
        reduction: Default of ``reduction=``.
        advantages, old_logp: Whether the loss takes these tensors.
        clips: Whether a clip fraction is reported.
    """

    name: str
    formula: str
    source: str
    function: Callable[..., torch.Tensor]
    options: Mapping[str, float | None] = field(default_factory=lambda: MappingProxyType({}))
    reduction: str = "token_mean"
    advantages: bool = True
    old_logp: bool = True
    clips: bool = False


def _clip(low: float, high: float, most: float | None = None) -> Mapping[str, float | None]:
    return MappingProxyType({"clip_low": low, "clip_high": high, "max_ratio": most})


_CLIPPED = "-min(min(r, max_ratio) A, clip(r, 1 - clip_low, 1 + clip_high) A)"

#: Every loss that ``loss=`` names.
LOSSES: Mapping[str, PolicyLossRow] = MappingProxyType(
    {
        row.name: row
        for row in (
            PolicyLossRow(
                "cross_entropy", "-log p", "negative log-likelihood",
                cross_entropy, advantages=False, old_logp=False,
            ),
            PolicyLossRow(
                "dft", "-sg(p) log p", "Wu et al. 2025, arXiv 2508.05629",
                dynamic_fine_tuning, advantages=False, old_logp=False,
            ),
            PolicyLossRow(
                "policy_gradient", "-A log p", "Williams 1992 (REINFORCE)",
                policy_gradient, old_logp=False,
            ),
            PolicyLossRow(
                "importance_ratio", "-r A", "Schulman et al. 2017, arXiv 1707.06347, eq. 6",
                importance_ratio,
            ),
            PolicyLossRow(
                "ppo", _CLIPPED, "Schulman et al. 2017, arXiv 1707.06347, eq. 7",
                clipped_ratio, _clip(0.2, 0.2), clips=True,
            ),
            PolicyLossRow(
                "ppo_dual_clip", _CLIPPED, "Ye et al. 2019, arXiv 1912.09729",
                clipped_ratio, _clip(0.2, 0.2, 3.0), clips=True,
            ),
            PolicyLossRow(
                "grpo", _CLIPPED, "Shao et al. 2024, arXiv 2402.03300, eq. 3",
                clipped_ratio, _clip(0.2, 0.2), "sequence_mean", clips=True,
            ),
            PolicyLossRow(
                "dapo", _CLIPPED, "Yu et al. 2025, arXiv 2503.14476, eq. 8",
                clipped_ratio, _clip(0.2, 0.28), "token_mean", clips=True,
            ),
            PolicyLossRow(
                "dr_grpo", _CLIPPED, "Liu et al. 2025, arXiv 2503.20783, section 3",
                clipped_ratio, _clip(0.2, 0.2), "constant", clips=True,
            ),
            PolicyLossRow(
                "cispo", "-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p",
                "MiniMax 2025, arXiv 2506.13585",
                cispo, MappingProxyType({"clip_low": 1.0, "clip_high": 4.0}), clips=True,
            ),
            PolicyLossRow(
                "sapo", "-4 / tau sigmoid(tau (r - 1)) A, tau = gate_positive where A > 0, else "
                "gate_negative", "Gao et al. 2025, arXiv 2511.20347",
                sapo, MappingProxyType({"gate_positive": 1.0, "gate_negative": 1.05}),
                "sequence_mean",
            ),
            PolicyLossRow(
                "spo", "-(r A - |A| (r - 1)^2 / (2 clip_high))",
                "Xie et al. 2024, arXiv 2401.16025",
                spo, MappingProxyType({"clip_high": 0.2}),
            ),
        )
    }
)  # fmt: skip


# ---- KL to a reference ---------------------------------------------------------------------------


#: In nats: e^d is inf from 88.4 on, and r e^d is not the product of its factors.
_FAR = 64.0


def _k1(logp, reference_logp, old_logp):
    return -(reference_logp - logp)


def _k2(logp, reference_logp, old_logp):
    away = reference_logp - logp
    return 0.5 * (away * away)


def _k3(logp, reference_logp, old_logp):
    return _k3_of(reference_logp - logp)


def _k3_of(away):
    # Without a bound inf - inf where log p is -inf.
    return exp(away) - away.clamp(max=2 * _FAR) - 1.0


def _k3_importance(logp, reference_logp, old_logp):
    ratio, away = ratio_of(logp, old_logp), reference_logp - logp
    far = away > _FAR
    near = product(ratio, _k3_of(away.masked_fill(far, 0.0)))
    # e^(reference - old) - r (d + 1): inf without its second term where r is beyond 2^64, too.
    first = exp(reference_logp - (logp.detach() if old_logp is None else old_logp))
    ratio = ratio.masked_fill(~far | (ratio > 2.0**64), 0.0)
    return torch.where(far, first - product(away.masked_fill(~far, 0.0) + 1.0, ratio), near)


#: Estimators of KL(policy ‖ reference) from one token, d = reference_logp - logp: -d, d^2 / 2,
#: e^d - d - 1 (J. Schulman, "Approximating KL divergence", 2020); and r times the last, which is
#: unbiased for tokens of an older policy (DeepSeek-V3.2, 2025): ``f(logp, reference_logp, old)``.
KL = MappingProxyType({"k1": _k1, "k2": _k2, "k3": _k3, "k3_importance": _k3_importance})


def clipped_tokens(
    ratio: torch.Tensor, advantages: torch.Tensor, options: Mapping[str, float | None]
) -> torch.Tensor:
    """Tokens whose ratio is beyond its bound on the side that the advantage pushes to."""
    up, down = advantages > 0, advantages < 0
    clipped = (ratio > 1.0 + options["clip_high"]) & up
    clipped = clipped | (ratio < 1.0 - options["clip_low"]) & down
    most = options.get("max_ratio")
    return clipped if most is None else clipped | (ratio > most) & down


# ---- sums over tokens ----------------------------------------------------------------------------


def weights_of(
    counted: torch.Tensor,
    reduction: str,
    divisor: torch.Tensor | float | None,
    max_length: float,
    scale: float,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """Weight of each token's loss: fp32, flat; 0 where not counted.

    counted: bool [..., L], sequences along the last dimension; or [T] with ``cu_seqlens`` [B + 1].
    A weight is made in fp64 and rounded once.
    """
    lengths = counted.sum(-1, keepdim=True)
    sequences = lengths.numel()
    if cu_seqlens is not None:
        sequences = len(cu_seqlens) - 1
        lengths = _lengths_of_packed(counted, cu_seqlens)
    if reduction == "sum":
        default = 1.0
    elif reduction == "token_mean":
        default = counted.sum().clamp(min=1).double()
    else:
        default = float(max(1, sequences))
    if divisor is None:
        divisor = default
    elif isinstance(divisor, torch.Tensor):
        divisor = divisor.double()
    below = torch.ones_like(counted, dtype=torch.float64) * divisor
    if reduction == "sequence_mean":
        below = below * lengths.clamp(min=1).double()
    elif reduction == "constant":
        below = below * max_length
    return torch.where(counted, scale / below, 0.0).float().reshape(-1)


def _lengths_of_packed(counted: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Counted tokens of the sequence of each token: int64 [T]."""
    before = torch.nn.functional.pad(counted.cumsum(0), (1, 0))
    edges = cu_seqlens.to(torch.int64)
    return (before[edges[1:]] - before[edges[:-1]])[sequence_of(counted, edges)]


def sequence_of(tokens: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Number of the sequence of each of T packed tokens: int64 [T]."""
    index = torch.arange(len(tokens), device=tokens.device)
    return torch.searchsorted(cu_seqlens[1:].to(torch.int64).contiguous(), index, right=True)


def ordered_sum(values: torch.Tensor) -> torch.Tensor:
    """Σ of fp64 [n], each half onto half: an order that n alone decides.  fp64, no dimensions."""
    return halves(values, 0).clone()
