"""A stand-in of an engine: it decodes token by token with a cache, one sequence at a time."""

from __future__ import annotations

from collections.abc import Collection

import torch
import transformers

import cute_kernels as ck


@torch.no_grad()
def complete(
    model: torch.nn.Module,
    prompt: list[int],
    *,
    ends: Collection[int],
    most: int,
    temperature: float = 1.0,
    rounded: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[list[int], list[float]]:
    """Drawn tokens and their log-probs; ``rounded``: of logits in the model's dtype."""
    cache, inputs, tokens, scores = transformers.DynamicCache(), list(prompt), [], []
    head = model.get_output_embeddings().weight
    while len(tokens) < most and not set(ends) & set(tokens):
        hidden = model.model(torch.tensor([inputs]), past_key_values=cache).last_hidden_state[:, -1]
        logits = ck.linear(hidden, head)
        chances = (logits.float() / temperature).softmax(-1)
        token = torch.multinomial(chances, 1, generator=generator)[0]
        if rounded:
            score = ck.log_probs(logits, token, temperature=temperature)
        else:
            score = ck.linear_logp(hidden, head, token, temperature=temperature)
        inputs = token.tolist()
        tokens += inputs
        scores.append(score.item())
    return tokens, scores
