"""Oracles for tests, never dispatched: formulas in float64, and the orders of sums in plain loops.

Bound of the CPU backend: half a unit in the last place of the result's dtype, 2% more for what
rounding twice and fp64 may add, and 2^-36 of the terms of a sum that cancels.  Bounds of a
reference's own tails: it uses erfc, cosh and the like, which do not cancel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from cute_kernels.cpu.elementary import GELU_CUBE, GELU_SCALE


def value(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Evaluate one of `config.KINDS`."""
    x = x.double()
    if kind == "gelu":
        return x * 0.5 * torch.special.erfc(-x / math.sqrt(2.0))
    if kind == "gelu_tanh":
        return x * torch.sigmoid(2.0 * GELU_SCALE * (x + GELU_CUBE * x**3))
    return {"silu": lambda: x * torch.sigmoid(x), "sigmoid": x.sigmoid, "tanh": x.tanh}[kind]()


def slope(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Derivative of `value`."""
    x = x.double()
    s, complement = torch.sigmoid(x), torch.sigmoid(-x)
    if kind == "silu":
        return s + x * s * complement
    if kind == "gelu":
        bell = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        return 0.5 * torch.special.erfc(-x / math.sqrt(2.0)) + x * bell
    if kind == "gelu_tanh":
        twice = 2.0 * GELU_SCALE * (x + GELU_CUBE * x**3)
        inner = 2.0 * GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * x * x)
        return torch.sigmoid(twice) * (1.0 + x * torch.sigmoid(-twice) * inner)
    return s * complement if kind == "sigmoid" else 1.0 / torch.cosh(x.clamp(-300, 300)) ** 2


def softmax_gradient(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradient of softmax, from its result."""
    dy, y = dy.double(), y.double()
    return y * (dy - (y * dy).sum(-1, keepdim=True))


def log_softmax_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of log_softmax, from x."""
    dy = dy.double()
    return dy - x.double().softmax(-1) * dy.sum(-1, keepdim=True)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute x cos + rotate_half(x) sin in the first columns; differentiable."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    width = cos.shape[-1]
    turned, unturned = x[..., :width], x[..., width:]
    half = torch.cat([-turned[..., width // 2 :], turned[..., : width // 2]], -1)
    return torch.cat([turned * cos + half * sin, unturned], -1)


def lane_sum(values: Iterable[float], most: int) -> float:
    """Sum in the order of config.py, a number at a time."""
    values = list(values)
    count = 2
    while count < min(len(values), most):
        count *= 2
    lanes = [0.0] * count
    for i, v in enumerate(values):
        lanes[i % count] += v
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


def embedding_chain(
    dy: torch.Tensor, ids: torch.Tensor, padding: int, start: torch.Tensor
) -> torch.Tensor:
    """Return fp32 [V, D]: start, with each token added to its entry in ascending order."""
    sums = start.to(torch.float32).clone()
    for token, entry in enumerate(ids.flatten().tolist()):
        if entry != padding:
            sums[entry] = sums[entry] + dy.reshape(-1, dy.shape[-1])[token].to(torch.float32)
    return sums
