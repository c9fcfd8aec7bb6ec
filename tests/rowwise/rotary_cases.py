"""Rotary embeddings in torch's own ops, as transformers' models have them, and what is rotated."""

from __future__ import annotations

import torch

from tests.contract import same_bytes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_ODD = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-41, -1e-41, 1e-45, 3e38, 6e-8, -6e-8, 65504)


def rotate_half(x):
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-high, low), dim=-1)


def whole(q, k, cos, sin, dim=1):
    cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
    return tuple(x * cos + rotate_half(x) * sin for x in (q, k))


def keeping_dtype(q, k, cos, sin, dim=1):
    return tuple(y.to(x.dtype) for x, y in zip((q, k), whole(q, k, cos, sin, dim), strict=True))


def partial(q, k, cos, sin, dim=1):
    width = cos.shape[-1]
    turned = whole(q[..., :width], k[..., :width], cos, sin, dim)
    return tuple(torch.cat((y, x[..., width:]), -1) for x, y in zip((q, k), turned, strict=True))


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of many sizes; zeros of both signs, infinities, NaN and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-10, 10, shape, generator=generator).float().exp2()
    x = torch.randn(shape, generator=generator) * sizes
    odd = torch.rand(shape, generator=generator) < 0.3
    chosen = torch.randint(0, len(_ODD), shape, generator=generator)
    return torch.where(odd, torch.tensor(_ODD)[chosen], x).to(dtype)


def operands(
    dtype: torch.dtype, tables: torch.dtype, width: int, columns: int, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """(q, k, cos, sin): heads behind positions in memory, and one sin for both sequences."""
    q, k = (numbers(2, 7, h, columns, dtype=dtype, seed=seed + h).transpose(1, 2) for h in (4, 2))
    cos, sin = (numbers(b, 7, width, dtype=tables, seed=seed + 7 + b) for b in (2, 1))
    return q, k, cos, sin.expand(2, 7, width)


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bytes agree but those of NaNs, which are at the same places."""
    plain = (t.masked_fill(t.isnan(), 0.0) for t in (a, b))
    return same_bytes(a.isnan(), b.isnan()) and same_bytes(*plain)
