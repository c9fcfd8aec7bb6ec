"""Layers of inference engines, computed with the bytes of a patched transformers model.

    logits = fp32_logits(hidden, weight)                the head, before the logits are rounded
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

from ..cpu.ieee import ieee_on
from ..errors import PatchError, expected
from ..moe import api as moe
from ..moe import routing_op
from ..moe.config import SOFTMAX
from ..rowwise import api as rowwise
from ..rowwise.op import gated_rows
from ..runtime import products
from ..runtime.operands import flat_rows


def require(layer: str, name: str, value: object, want: object = None) -> None:
    """Refuse an option by which an engine's layer computes something else than the trainer's.

    Raises:
        PatchError: the message names the layer and its option.
    """
    if value is not want and value != want:
        raise PatchError(expected(f"{layer}: {name}", want, value))


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    head_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k [T, heads · head_size] by a table (cos, sin) [1, T, width], in one launch."""
    heads = [t.view(1, t.shape[0], -1, head_size) for t in (query, key)]
    q, k = rowwise.apply_rotary_pos_emb(*heads, *table, unsqueeze_dim=2)
    return q.view(query.shape), k.view(key.shape)


def fp32_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    order: str = "chain",
) -> torch.Tensor:
    """Logits [..., V] in fp32: hidden weightᵀ + bias, as `ck.linear_logp` makes them.

    `ck.log_probs` of them are those of `ck.linear_logp`.
    """
    rows = flat_rows(hidden, "logits")
    if not len(rows):
        return hidden.new_empty(*hidden.shape[:-1], len(weight), dtype=torch.float32)
    with ieee_on(rows):
        logits = products.sums(rows, weight, order)
        if bias is not None:
            logits += bias.float()
    return logits.view(*hidden.shape[:-1], len(weight))


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


_SOFTMAX_ROUTERS = frozenset(
    f"{family}TopKRouter" for family in ("Olmoe", "Qwen2Moe", "Qwen3Moe", "Qwen3Next")
)


def rule_of(router: str, normalize: bool) -> Rule | None:
    """Return the rule of a router of transformers by the name of its class; None: it has none.

    Args:
        router: ``"MixtralTopKRouter"``, ``"Qwen3MoeTopKRouter"`` and so on.
        normalize: The config's ``norm_topk_prob``; Mixtral has none, and always divides.
    """
    if router == "MixtralTopKRouter":
        return Rule(normalize=True, rounded=False)
    if router in _SOFTMAX_ROUTERS:
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
