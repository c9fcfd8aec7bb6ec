"""Logits of inference engines in fp32: `ck.log_probs` of them are those of `ck.linear_logp`."""

from __future__ import annotations

import torch

from ..cpu.ieee import ieee_on
from ..runtime import products
from ..runtime.operands import flat_rows


def fp32_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    order: str = "chain",
) -> torch.Tensor:
    """Logits [..., V] in fp32: hidden weightᵀ + bias, as `ck.linear_logp` makes them."""
    rows = flat_rows(hidden, "logits")
    if not len(rows):
        return hidden.new_empty(*hidden.shape[:-1], len(weight), dtype=torch.float32)
    with ieee_on(rows):
        logits = products.sums(rows, weight, order)
        if bias is not None:
            logits += bias.float()
    return logits.view(*hidden.shape[:-1], len(weight))
