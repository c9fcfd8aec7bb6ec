"""Training: whole sequences in micro-batches, their log-probs and the weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from . import model as models
from . import text


@dataclass(frozen=True)
class Split:
    """One way to cut the batch: sequences per micro-batch, in order."""

    label: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """Per sequence the log-probs [n - 1] of tokens 1..n-1; per weight the fp32 gradient."""

    logps: list[torch.Tensor]
    grads: dict[str, torch.Tensor]


def score(
    side: models.Side,
    split: Split,
    sequences: Sequence[torch.Tensor],
    advantages: Sequence[float],
    progress: Callable[[int], None],
) -> Scored:
    """Forward and backward of a policy-gradient loss, -Σ advantage · log-prob / tokens.

    Each micro-batch is padded on the right to its longest sequence, rounded up to the
    side's granularity.  Our layers add into an fp32 main_grad inside the product.  Torch's give a
    bf16 gradient per micro-batch, which is added to an fp32 sum, as trainers with fp32 accumulation
    do.

    Args:
        side: The model.
        split: Its sizes add up to the number of sequences.
        sequences: int64 tokens, one tensor each.
        advantages: One number per sequence.
        progress: Called with the number of tokens scored since the last call.
    """
    weights = models.weights(side.model)
    grads = {name: torch.zeros_like(w, dtype=torch.float32) for name, w in weights.items()}
    models.set_main_grads(side.model, grads)
    total = sum(len(tokens) - 1 for tokens in sequences)
    logps: list[torch.Tensor] = []
    first = 0
    for size in split.sizes:
        micro = slice(first, first + size)
        scored = _logps(side, sequences[micro])
        weighted = [a * lp.sum() for a, lp in zip(advantages[micro], scored, strict=True)]
        (-torch.stack(weighted).sum() / total).backward()
        for name, weight in weights.items():
            if weight.grad is not None:
                grads[name] += weight.grad.float()
        side.model.zero_grad(set_to_none=True)
        logps += [lp.detach().cpu() for lp in scored]
        progress(sum(len(lp) for lp in scored))
        first += size
    models.set_main_grads(side.model, None)
    return Scored(logps, {name: grad.cpu() for name, grad in grads.items()})


def _logps(side: models.Side, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probs [n - 1] of each sequence from one forward pass over all of them."""
    device = side.model.device
    longest = max(len(tokens) for tokens in sequences)
    width = -(-longest // side.granularity) * side.granularity
    ids = torch.full((len(sequences), width), text.PAD)
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)] = tokens
    columns = torch.arange(width)
    mask = columns < torch.tensor([[len(tokens)] for tokens in sequences])
    hidden = side.hidden(
        input_ids=ids.to(device),
        attention_mask=mask.long().to(device),
        position_ids=columns[None].to(device),
    )
    next_ids = torch.where(mask.roll(-1, dims=1), ids.roll(-1, dims=1), models.IGNORED)
    next_ids[:, -1] = models.IGNORED
    picked = side.logps(hidden, next_ids.to(device))
    return [picked[row, : len(tokens) - 1] for row, tokens in enumerate(sequences)]
