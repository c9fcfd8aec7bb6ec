"""Norms of nobody's library, for the tests of what is taken for one."""

from __future__ import annotations

import torch
from torch import nn

D = 96


class Base(nn.Module):
    """A norm of nobody's library: weight, eps, and a formula below."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(D, generator=torch.Generator().manual_seed(1)))
        self.tiny = eps

    def scaled(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.tiny).to(x.dtype)


class Rescale(Base):
    def forward(self, x):
        return self.scaled(x) * self.gain


class GainPlusOne(Base):
    def forward(self, values):
        return self.scaled(values) * (1 + self.gain)


class Centred(nn.Module):
    """A layer norm whose parameters have other names and another order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.shift = nn.Parameter(torch.randn(D, generator=generator))
        self.gain = nn.Parameter(torch.randn(D, generator=generator))
        self.small = 1e-6

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + self.small).sqrt() * self.gain + self.shift
