"""The loss of a policy gradient with a reference, from log-probabilities of tokens.

loss = Σ_t m_t (-A_t ρ_t + β k_t) / count

ρ = exp(logp - old), clipped to [1 - ε, 1 + ε] where that is worse; without ``old``: logp
k = exp(ref - logp) - (ref - logp) - 1, an estimate of KL(policy ‖ reference) that is never < 0
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import ArgumentValueError, ShapeError, expected
from ..logp.policy_checks import zeros_and_ones


class PolicyLoss(NamedTuple):
    """Sums over this rank's tokens, divided by ``count``; ``loss`` is differentiable."""

    loss: torch.Tensor
    policy: torch.Tensor
    kl: torch.Tensor


def policy_loss(
    logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    count: float,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
    clip: float = 0.2,
    kl_weight: float = 0.0,
) -> PolicyLoss:
    """Compute the loss of some of a batch's tokens.

    Args:
        logps: fp32, of the policy that is trained.
        advantages: The same shape, or [B, 1] of each sequence.
        mask: The same shape, 1 for tokens that count, else 0; other values are refused on a CPU.
            Tokens of 0 are selected away, not multiplied: what they hold harms nothing.
        count: What the sums are divided by: all tokens that count, on all ranks.
        old: logps of the policy that drew the tokens, or None: those of ``logps`` itself.
        reference: logps of the reference model, or None: there is no KL.
        clip: ε, in (0, 1).  kl_weight: β.

    Raises:
        ShapeError: shapes differ.  ArgumentValueError: ``count``, ``clip``, ``kl_weight`` or a
            value of ``mask``.
    """
    optional = {"mask": mask, "old": old, "reference": reference}
    for name, t in optional.items():
        if t is not None and t.shape != logps.shape:
            raise ShapeError(expected(name, f"the shape of logps, {list(logps.shape)}", t.shape))
    if advantages.shape not in (logps.shape, (logps.shape[0], 1)):
        want = f"{list(logps.shape)}, or a number a sequence"
        raise ShapeError(expected("advantages", want, list(advantages.shape)))
    for name, value, good, want in (
        ("count", count, count > 0, "above 0"),
        ("clip", clip, 0 < clip < 1, "between 0 and 1"),
        ("kl_weight", kl_weight, kl_weight >= 0, "0 or more"),
    ):
        if not good:
            raise ArgumentValueError(expected(name, want, value))
    zeros_and_ones(mask)
    selected = mask != 0
    advantages = advantages.to(logps.dtype).expand_as(logps)[selected]
    logps = logps[selected]
    ratio = torch.exp(logps - (logps.detach() if old is None else old[selected]))
    bounded = ratio.clamp(1 - clip, 1 + clip)
    policy = -torch.minimum(ratio * advantages, bounded * advantages).sum() / count
    kl = torch.zeros_like(policy)
    if reference is not None:
        away = reference[selected] - logps
        kl = (away.exp() - away - 1).sum() / count
    return PolicyLoss(policy + kl_weight * kl, policy.detach(), kl.detach())
