"""Mixtures of experts of inference engines, with the bytes of a patched transformers model.

    weights, indices = route(logits, k, rule)           the router of a family, after its product
    y = experts(x, w13, w2, weights, indices)           permute, two grouped products, combine
    y += gated(rows, gate)                              the expert of all tokens, where there is one

A trainer's router is its author's forward with `ck.batch_invariant`'s functions: softmax in fp32,
the k largest, their sum in the order of slots, a rounding.  `Rule` says which of these steps a
family takes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..moe import api as moe
from ..moe import routing_op
from ..moe.config import SOFTMAX
from ..rowwise import api as rowwise
from ..rowwise.op import gated_rows


class Rule(NamedTuple):
    """Router of a family: how it makes the weights of the chosen experts.

    Attributes:
        normalize: Divide the scores by their sum, slots added by halves.
        rounded: Round the weights to the dtype of the logits; False: they stay in fp32.
    """

    normalize: bool
    rounded: bool

    @property
    def formula(self) -> str:
        """The formula, for a contract."""
        weight = "score / sum of the slots by halves" if self.normalize else "score"
        dtype = "the dtype of the logits" if self.rounded else "fp32"
        return f"ck.softmax in fp32, k largest, ties: the lowest index; {weight}, in {dtype}"


def rule_of(router: str, normalize: bool) -> Rule | None:
    """Return the rule of a router of transformers by the name of its class; None: it has none.

    Args:
        router: ``"MixtralTopKRouter"``, ``"Qwen3MoeTopKRouter"`` and so on.
        normalize: The config's ``norm_topk_prob``; Mixtral has none, and always divides.
    """
    if router == "MixtralTopKRouter":
        return Rule(normalize=True, rounded=False)
    if router in ("OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter"):
        return Rule(normalize, rounded=True)
    return None


def route(logits: torch.Tensor, k: int, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts for each token, and their weights.

    Args:
        logits: [T, E], of `ck.linear`; bf16, fp16 or fp32.
        k: Experts of a token.
        rule: Of the family.

    Returns:
        (weights [T, k], fp32 or the dtype of the logits; indices int32 [T, k]).
    """
    scores = routing_op.scores(logits, SOFTMAX)
    indices = routing_op.select(scores, None, k, 1, 1)
    dtype = logits.dtype if rule.rounded else torch.float32
    return routing_op.slot_weights(scores, indices, rule.normalize, dtype), indices


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Σ_j weights[t, j] w2[e] (silu(gate) up), with gate and up of w13[e] x[t], e = indices[t, j].

    Args:
        x: [T, K]; the dtype of the weights of experts.
        w13: [E, 2 N, K], gate before up.  w2: [E, K, N].
        weights, indices: [T, k], of `route`.

    Returns:
        [T, K].  silu(gate) is rounded before the product with up; experts of a token are added in
        their order in fp32 and rounded once.
    """
    rows, permutation = moe.permute(x, indices, len(w13))
    rows = moe.grouped_linear(rows, w13, permutation.offsets)
    rows = moe.grouped_linear(gated_rows(rows, "silu"), w2, permutation.offsets)
    return moe.combine(rows, weights, permutation)


def gated(rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return sigmoid(gate) rows, the sigmoid rounded; rows [T, K], gate [T, 1]."""
    return rowwise.sigmoid(gate) * rows
