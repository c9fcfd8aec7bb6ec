"""Formulas of linear attention in float64, and how far a result may be from them."""

from __future__ import annotations

import torch
from torch.nn import functional


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """Causal convolution of one batch x [B, D, T], by torch's own in float64."""
    width = weight.shape[1]
    if initial is None:
        initial = x.new_zeros(*x.shape[:2], width - 1)
    rows = torch.cat([initial.double(), x.double()], 2)
    bias = None if bias is None else bias.double()
    y = functional.conv1d(rows, weight.double()[:, None], bias, groups=x.shape[1])
    return functional.silu(y) if silu else y


def conv_bound(exact: torch.Tensor, terms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Error bound: one rounding to ``dtype``, and fp32 sums of at most eight ``terms``."""
    return exact.abs() * torch.finfo(dtype).eps + terms * 2.0**-20 + torch.finfo(dtype).tiny
