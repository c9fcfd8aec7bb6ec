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


def keep_changed(
    logits: torch.Tensor, temperature: torch.Tensor, processed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and temperatures of rows, of which a processor has changed some.

    Args:
        logits: fp32 [B, V], before they are divided by the temperature.
        temperature: fp32 [B], above 0.
        processed: fp32 [B, V]: the logits as they are sampled from.

    Returns:
        (logits, temperature); a row whose quotient is not what is sampled from is the processed
        one, with a temperature of 1.
    """
    changed = (logits / temperature[:, None] != processed).any(1)
    return torch.where(changed[:, None], processed, logits), torch.where(changed, 1.0, temperature)
