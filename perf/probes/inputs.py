"""Operands that make tensor-core arithmetic show itself: A [M, K], B [N, K] bf16 and C [M, N] fp32.

Ordinary kinds are what training and serving feed a GEMM.  Extreme ones leave the range in which a
sum of products is an ordinary fp32 number; they are reported apart.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_GROUP_K = 16


class Draw:
    """Random tensors of one seed on one device."""

    def __init__(self, seed: int, device: str):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def power(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """2^e with e uniform in low..high."""
        e = torch.randint(low, high + 1, shape, generator=self.generator, device=self.device)
        return torch.exp2(e.to(torch.float32))

    def bits(self, count: int, *shape: int) -> torch.Tensor:
        """Whole numbers below 2^count."""
        return torch.randint(0, 1 << count, shape, generator=self.generator, device=self.device)


def _normal(d: Draw, m: int, n: int, k: int):
    return d.normal(m, k), d.normal(n, k), d.normal(m, n)


def _one_sign(d: Draw, m: int, n: int, k: int):
    return d.uniform(m, k), d.uniform(n, k), d.uniform(m, n)


def _wide(d: Draw, m: int, n: int, k: int):
    a, b, c = _normal(d, m, n, k)
    return a * d.power(-20, 20, m, k), b * d.power(-20, 20, n, k), c * d.power(-30, 30, m, n)


def _cancel(d: Draw, m: int, n: int, k: int):
    """Neighbouring products cancel up to a small remainder, at both places of a pair."""
    a, b, c = _normal(d, m, n, k)
    a[:, 1::2] = -a[:, 0::2] * (1 + d.power(-9, -7, m, k // 2) * d.normal(m, k // 2).sign())
    b[:, 1::2] = b[:, 0::2]
    return a, b, c * 2.0**-12


def _ratio(d: Draw, m: int, n: int, k: int):
    """Per group one product 2^18 to 2^30 times the others: the bits at the truncation's edge."""
    a, b, c = _normal(d, m, n, k)
    position = d.bits(4, m, k // _GROUP_K)
    one_hot = torch.nn.functional.one_hot(position, _GROUP_K).reshape(m, -1)[:, :k]
    big = d.power(9, 15, m, k)
    a = torch.where(one_hot.bool(), a * big, a / big)
    return a, b, c * d.power(-20, 10, m, n)


def _zeros(d: Draw, m: int, n: int, k: int):
    """Most entries are zeros of either sign; C is -0, +0 or small."""
    a, b, c = _normal(d, m, n, k)
    a = torch.where(d.uniform(m, k) < 0.8, 0.0 * a.sign(), a)
    b = torch.where(d.uniform(n, k) < 0.5, 0.0 * b.sign(), b)
    return a, b, torch.where(d.uniform(m, n) < 0.7, 0.0 * c.sign(), c)


def _subnormal(d: Draw, m: int, n: int, k: int):
    """Subnormal operands, products and sums."""
    a, b, c = _normal(d, m, n, k)
    a, b = a * d.power(-135, -70, m, k), b * d.power(-90, -58, n, k)
    return a, b, c * d.power(-149, -120, m, n)


def _overflow(d: Draw, m: int, n: int, k: int):
    a, b, c = _normal(d, m, n, k)
    return a * d.power(60, 64, m, k), b * d.power(60, 63, n, k), c * 2.0**126


def _bit_patterns(d: Draw, m: int, n: int, k: int):
    """Uniform finite bit patterns: every exponent, every significand."""

    def bf16(rows: int) -> torch.Tensor:
        raw = d.bits(16, rows, k)
        raw = torch.where((raw & 0x7F80) == 0x7F80, raw ^ 0x4000, raw)
        return raw.to(torch.int32).to(torch.int16).view(torch.bfloat16)

    raw = d.bits(32, m, n)
    raw = torch.where((raw & 0x7F800000) == 0x7F800000, raw ^ 0x40000000, raw)
    c = torch.where(raw >= 1 << 31, raw - (1 << 32), raw).to(torch.int32).view(torch.float32)
    return bf16(m), bf16(n), c


ORDINARY: dict[str, Callable] = {
    "normal": _normal,
    "one_sign": _one_sign,
    "wide": _wide,
    "cancel": _cancel,
    "ratio": _ratio,
    "zeros": _zeros,
}
EXTREME: dict[str, Callable] = {
    "subnormal": _subnormal,
    "overflow": _overflow,
    "bit_patterns": _bit_patterns,
}


def make(kind: str, m: int, n: int, k: int, *, device: str, seed: int = 0) -> Operands:
    """A [m, k] and B [n, k] bf16, C [m, n] fp32, of one kind; k a multiple of 16."""
    a, b, c = (ORDINARY | EXTREME)[kind](Draw(seed, device), m, n, k)
    return a.to(torch.bfloat16).contiguous(), b.to(torch.bfloat16).contiguous(), c.contiguous()


def every(m: int, n: int, k: int, *, device: str, seed: int = 0) -> dict[str, Operands]:
    """Operands of every kind."""
    return {kind: make(kind, m, n, k, device=device, seed=seed) for kind in ORDINARY | EXTREME}
