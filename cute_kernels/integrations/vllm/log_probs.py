"""Log-probs of chosen tokens from fp32 logits, with the bytes of `ck.linear_logp`."""

from __future__ import annotations

import torch

from ...logp import api as logp


def of_tokens(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | None = None
) -> torch.Tensor:
    """log p of tokens [B, K] under softmax(logits / temperature): fp32 [B, K].

    Args:
        logits: [B, V], before they are divided by a temperature; fp32 for the trainer's bytes.
            Tokens that a filter has taken out have -inf, and a log-prob of -inf.
        tokens: int64 or int32; entries of the vocabulary.
        temperature: fp32 [B], above 0; None: 1.
    """
    temperature = 1.0 if temperature is None else temperature
    columns = [
        logp.log_probs(logits, column, temperature=temperature)[:, None]
        for column in tokens.unbind(1)
    ]
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)
