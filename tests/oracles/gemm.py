"""Oracles for tests, never dispatched: gemm in float64, its order in torch, its error bound."""

from __future__ import annotations

import math

import torch

from cute_kernels.gemm.config import K_GROUP
from cute_kernels.schedulers.tiles import leaves


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    accumulator: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a [M, K] · b [N, K]ᵀ + bias [N] + accumulator [M, N], in float64."""
    out = a.double() @ b.double().mT
    if bias is not None:
        out = out + bias.double()
    return out if accumulator is None else out + accumulator.double()


def chain(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    accumulator: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute by ``chain``: fp32 after each ascending group of 16, products and group sum exact.

    The last rounding is the caller's: the result is fp32, before the store to the output's dtype.
    """
    m, n = a.shape[0], b.shape[0]
    zeros = torch.zeros(m, n, dtype=torch.float32, device=a.device)
    total = zeros if accumulator is None else accumulator.float().clone()
    for first in range(0, a.shape[1], K_GROUP):
        group = slice(first, first + K_GROUP)
        total = (total.double() + a[:, group].double() @ b[:, group].double().mT).float()
    return total if bias is None else total + bias.float()


def tree(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute by ``tree``: each leaf of K a chain from zero; leaves added in fp32, ascending.

    The last rounding is the caller's, as in `chain`.
    """
    k = a.shape[1]
    length = leaves.length(k)
    total = chain(a[:, :length], b[:, :length])
    for first in range(length, k, length):
        leaf = slice(first, first + length)
        total = total + chain(a[:, leaf], b[:, leaf])
    return total if bias is None else total + bias.float()


def error_bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return T = 5.25 · ⌈K/16⌉ · 2⁻²³ · Σ|a_k b_k| per output, [M, N] float64.

    The bound of one Hopper WGMMA chain (truncating adder, arXiv 2511.10909; derived in
    docs/numerics.md).  A correct kernel's |y - exact| is at most ½ulp(y) + T(1 + 2⁻⁷).
    """
    groups = math.ceil(a.shape[1] / K_GROUP)
    magnitude = a.double().abs() @ b.double().abs().mT
    return 5.25 * groups * 2.0**-23 * magnitude


def tree_error_bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Error bound of ``tree``: 5.25 · ⌈n/8⌉ · 2⁻²³ · S, and 2⁻²⁴ · S for each leaf added.

    Source: docs/numerics.md; n = ⌈K/16⌉, S = Σ|a_k b_k|.
    """
    k = a.shape[1]
    magnitude = a.double().abs() @ b.double().abs().mT
    groups = math.ceil(leaves.length(k) / K_GROUP)
    return (5.25 * groups * 2.0**-23 + (leaves.count(k) - 1) * 2.0**-24) * magnitude
