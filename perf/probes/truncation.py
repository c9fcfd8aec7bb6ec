"""Hopper's tensor-core arithmetic, as a model in plain torch (any device, every bit defined).

One bf16 WGMMA step adds 16 products to an fp32 accumulator.  The model (microsoft/MMA-Sim;
arXiv 2511.10909, 2512.07004): the 16 products and the accumulator are aligned to the largest
exponent among them (a product's exponent is the sum of its operands'), each is truncated toward
zero to 25 fractional bits, the terms are added exactly, the sum is truncated toward zero to fp32.

All arithmetic here is float64 and exact: a product of bf16 numbers has 16 significant bits, an
aligned term fits 28, and 17 of them fit 33.  Subnormal operands count with their true exponent.  A
sum is -0 only if every term is -0.  Infinities and NaN fall back to a plain float64 sum, and every
NaN has the bits 0x7fffffff.  These choices are those of ptxsim (`wgmma_math="hopper"`);
whether the card makes them is what the probe `model` measures.
"""

from __future__ import annotations

import torch

GROUP_K = 16
FRACTION_BITS = 25
_EXPONENT = 0x7FF0000000000000
_NAN_BITS = 0x7FFFFFFF


def _power(x: torch.Tensor) -> torch.Tensor:
    """The power of two below |x|: its exponent bits alone (0 for 0, inf for inf and NaN)."""
    return (x.view(torch.int64) & _EXPONENT).view(torch.float64)


def toward_zero(x: torch.Tensor) -> torch.Tensor:
    """Round float64 to fp32 toward zero; finite numbers stay finite."""
    nearest = x.to(torch.float32)
    away = nearest.to(torch.float64).abs() > x.abs()
    return torch.where(away, (nearest.view(torch.int32) - 1).view(torch.float32), nearest)


def step(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One k16 group: fp32 acc [M, N], float64 a [M, 16] and b [N, 16] -> fp32 [M, N]."""
    acc = acc.to(torch.float64)
    power_a, power_b = _power(a), _power(b)
    largest = _power(acc)
    for k in range(a.shape[1]):
        # maximum() would let a NaN through; a comparison keeps the finite one.
        candidate = torch.outer(power_a[:, k], power_b[:, k])
        largest = torch.where(candidate > largest, candidate, largest)
    unit = torch.where(largest > 0, largest, 1.0)
    scale = 2.0**FRACTION_BITS / unit
    total = torch.trunc(acc * scale)
    for k in range(a.shape[1]):
        total = total + torch.trunc(torch.outer(a[:, k], b[:, k]) * scale)
    total = total * (unit / 2.0**FRACTION_BITS)
    special = ~(largest < torch.inf) | total.isnan()
    out = toward_zero(torch.where(special, 0.0, total))
    if bool(special.any()):
        untruncated = acc
        for k in range(a.shape[1]):
            untruncated = untruncated + torch.outer(a[:, k], b[:, k])
        out = _one_nan(torch.where(special, untruncated.to(torch.float32), out))
    return out


def _one_nan(x: torch.Tensor) -> torch.Tensor:
    nan = torch.full_like(x.view(torch.int32), _NAN_BITS).view(torch.float32)
    return torch.where(x.isnan(), nan, x)


def _chain(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    for k in range(0, a.shape[1], GROUP_K):
        acc = step(acc, a[:, k : k + GROUP_K], b[:, k : k + GROUP_K])
    return acc


def chain(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    promote_every: int = 0,
    rows: int = 1024,
) -> torch.Tensor:
    """Result of `wgmma_kernel` if the model holds: fp32 [M, N].

    a [M, K] and b [N, K] bf16 with K a multiple of 16, c fp32 [M, N] or None for zero.
    promote_every = P adds leaves of P groups, each started from zero, to c in fp32 (round to
    nearest), in ascending order; 0 is one chain that starts from c.  rows bounds the scratch: about
    rows * N * 40 bytes.
    """
    if a.shape[1] % GROUP_K or a.shape[1] != b.shape[1]:
        raise ValueError(f"a, b: expected one K, a multiple of 16, got {a.shape[1]}, {b.shape[1]}")
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    columns = b.to(torch.float64)
    leaf = promote_every * GROUP_K
    for low in range(0, a.shape[0], rows):
        block = a[low : low + rows].to(torch.float64)
        zero = torch.zeros(block.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
        total = zero if c is None else c[low : low + rows].contiguous()
        if leaf == 0:
            total = _chain(total, block, columns)
        else:
            for k in range(0, a.shape[1], leaf):
                leaf_sum = _chain(zero, block[:, k : k + leaf], columns[:, k : k + leaf])
                total = _one_nan(total + leaf_sum)
        out[low : low + rows] = total
    return out
