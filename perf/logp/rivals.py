"""Rivals of the logp bench: each starts the passes that it has.

A call gives per-token log-probabilities ("fwd"), the gradients of hidden and weight from per-token
upstream gradients ("bwd", on a graph that is made before), or both in one.  quack, Liger's
Triton kernel and fused losses make gradients in their forward, of a sum over the tokens: only
"both".
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ..core.passes import Op, backward, forward
from ..core.rival import Call, Rival, Start, by_name, module
from .cases import Inputs

Scores = Callable[[Inputs], torch.Tensor]


def _per_token(load: Callable[[], Scores]) -> dict[str, Start]:
    """The passes of a function of per-token log-probabilities, through autograd."""

    def op() -> Op:
        scores = load()
        return lambda t: (scores(t),)

    def both(case) -> Call:
        scores = load()
        return lambda t: torch.autograd.grad(scores(t), (t["hidden"], t["weight"]), t["d0"])

    return {"fwd": forward(op), "bwd": backward(op), "both": both}


def _of_a_sum(load: Callable[..., Scores]) -> dict[str, Start]:
    """ "both" of a function that sums over the tokens; ``load`` takes their number."""

    def both(case) -> Call:
        total = load(case.tokens)
        return lambda t: torch.autograd.grad(total(t), (t["hidden"], t["weight"]))

    return {"both": both}


#: Bytes of the logits that ``ours_kept`` keeps for its backward.
KEPT = 4 << 30


def _ours(order: str, logits_memory: int = 0) -> Scores:
    import cute_kernels as ck

    options = {"order": order, "logits_memory": logits_memory}
    linear_logp = ck.linear_logp
    return lambda t: linear_logp(t["hidden"], t["weight"], t["target"], **options)


def _ours_fused(tokens: int) -> Scores:
    import cute_kernels as ck

    options = {"loss": "cross_entropy", "reduction": "sum"}
    loss = ck.linear_policy_loss
    return lambda t: loss(t["hidden"], t["weight"], t["target"], **options).loss


#: Sequences of a GRPO loss: each has one advantage, and as many tokens.
SEQUENCES = 8


def _ours_grpo(tokens: int) -> Scores:
    import cute_kernels as ck

    loss = ck.linear_policy_loss

    def total(t: Inputs) -> torch.Tensor:
        # The first tokens alone keep their advantages and the divisor of the whole batch.
        advantages = t["d0"][:SEQUENCES].repeat_interleave(tokens // SEQUENCES)
        options = {"advantages": advantages[: len(t["target"])], "divisor": tokens}
        return loss(t["hidden"], t["weight"], t["target"], loss="dapo", **options).loss

    return total


def _liger_grpo(tokens: int) -> Scores:
    """Liger's loss of the same formula: no reference, ratios of 1, a mean over all tokens."""
    loss = module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, loss_type="dapo"
    )

    def total(t: Inputs) -> torch.Tensor:
        hidden = t["hidden"].view(SEQUENCES, -1, t["hidden"].shape[1])
        target = t["target"].view(SEQUENCES, -1)
        return loss(hidden, t["weight"], target, torch.ones_like(target), t["d0"][:SEQUENCES])[0]

    return total


def _liger() -> Scores:
    # Its check of the targets waits for the GPU.
    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"
    name = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    function = module(name).LigerFusedScaledCrossEntropySM90Function
    return lambda t: -function.apply(t["hidden"], t["weight"], t["target"])


def _liger_triton(tokens: int) -> Scores:
    name = "liger_kernel.ops.fused_linear_cross_entropy"
    function = module(name).LigerFusedLinearCrossEntropyFunction

    def total(t: Inputs) -> torch.Tensor:
        options = (None, None, -100, 0.0, 0.0, "sum")
        return function.apply(t["hidden"], t["weight"], t["target"], *options)[0]

    return total


def _quack(tokens: int) -> Scores:
    function = module("quack.linear_cross_entropy").chunked_linear_cross_entropy

    def total(t: Inputs) -> torch.Tensor:
        # quack 0.6.5 refuses chunks of as many tokens as hidden has columns.
        chunk = 2048 if t["hidden"].shape[1] == 4096 else 4096
        options = {"chunk_size": chunk, "reduction": "sum", "tuned": False}
        return function(t["hidden"], t["weight"], t["target"], **options)

    return total


def _cce() -> Scores:
    function = module("cut_cross_entropy").linear_cross_entropy
    return lambda t: -function(t["hidden"], t["weight"], t["target"], reduction="none")


def _torch() -> Scores:
    def scores(t: Inputs) -> torch.Tensor:
        logits = torch.nn.functional.linear(t["hidden"], t["weight"])
        return -torch.nn.functional.cross_entropy(logits.float(), t["target"], reduction="none")

    return scores


RIVALS = by_name(
    Rival("ours", _per_token(lambda: _ours("chain")), promised=True, ordered=True),
    Rival("ours_tree", _per_token(lambda: _ours("tree")), promised=True, ordered=True),
    Rival("ours_kept", _per_token(lambda: _ours("chain", KEPT)), promised=True, ordered=True),
    Rival("ours_fused", _of_a_sum(_ours_fused), promised=True, ordered=True),
    Rival("ours_grpo", _of_a_sum(_ours_grpo), promised=True, ordered=True),
    Rival("liger_grpo", _of_a_sum(_liger_grpo)),
    Rival("liger", _per_token(_liger)),
    Rival("liger_triton", _of_a_sum(_liger_triton)),
    Rival("quack", _of_a_sum(_quack)),
    Rival("cce", _per_token(_cce)),
    Rival("torch", _per_token(_torch)),
)
