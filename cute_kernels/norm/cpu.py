"""CPU backend: sums over a row, and over the rows of a part, each by halving.

IEEE arithmetic, one operation at a time: an elementwise one has one result wherever its vectors
begin, and no sum is torch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cpu.ieee import halves, ieee
from ..runtime.operands import flat_rows
from .config import LAYER, part_rows, room
from .tensors import Normed, Parts, Rule, Scale, Upstream


def forward(x: torch.Tensor, residual: torch.Tensor | None, scale: Scale, rule: Rule) -> Normed:
    """Norm of the rows of x [..., D], or of h = x + residual, rounded to their dtype."""
    shape, scale = x.shape, scale.with_weight(rule.offset, x)
    # Elementwise results have the strides of their operands; results are row-major.
    x = flat_rows(x, "norm").contiguous()
    residual = None if residual is None else flat_rows(residual, "norm")
    with ieee():
        h = None if residual is None else (x.float() + residual.float()).to(x.dtype)
        rows = (x if h is None else h).to(torch.float32)
        mean = None
        if rule.kind == LAYER:
            mean = _row_sum(rows) / rows.shape[1]
            rows = rows - mean[:, None]
        variance = _row_sum(rows * rows) / rows.shape[1]
        # In fp64: sqrt of fp32 is an ulp off in some vector libraries.
        rstd = 1.0 / (variance + rule.eps).double().sqrt().float()
        y = rows * rstd[:, None]
        if scale.weight is not None:
            y = y * (scale.weight.float() + rule.offset)
        if scale.bias is not None:
            y = y + scale.bias.float()
        h = None if h is None else h.view(shape)
        return Normed(y.to(x.dtype).view(shape), h, mean, rstd)


def backward(
    upstream: Upstream,
    h: torch.Tensor,
    stats: tuple[torch.Tensor | None, torch.Tensor],
    scale: Scale,
    rule: Rule,
    parts: bool,
) -> tuple[torch.Tensor, Parts | None]:
    """Return (dx [..., D] = dh + the gradient through the norm, parts of dweight and dbias).

    ``stats``: mean and rstd of `forward`.
    """
    mean, rstd = stats
    shape, scale = h.shape, scale.with_weight(rule.offset, h)
    h, upstream = flat_rows(h, "norm").contiguous(), upstream.flat()
    with ieee():
        rows = h.to(torch.float32)
        if mean is not None:
            rows = rows - mean[:, None]
        # x̂ = (h - mean) rstd;  g = dy weight
        x_hat = rows * rstd[:, None]
        dy = upstream.dy.contiguous().to(torch.float32)
        g = dy
        if scale.weight is not None:
            g = dy * (scale.weight.float() + rule.offset)
        # dx = rstd (g - mean(g) - x̂ mean(g x̂)), an RMS norm without the mean
        inner = g - x_hat * (_row_sum(g * x_hat) / rows.shape[1])[:, None]
        if mean is not None:
            inner = inner - (_row_sum(g) / rows.shape[1])[:, None]
        dx = inner * rstd[:, None]
        if upstream.dh is not None:
            dx = dx + upstream.dh.to(torch.float32)
        parts_out = None
        if parts:
            of_bias = _parts(dy) if scale.bias is not None else None
            parts_out = Parts(_parts(dy * x_hat), of_bias)
        return dx.to(h.dtype).contiguous().view(shape), parts_out


def add_parts(
    parts: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor | None],
    like: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Add parts [P, D] to ``into`` [D], ascending; without ``into`` from zero, a tensor like
    ``like``."""
    return [_added(*operands) for operands in zip(parts, into, like, strict=True)]


def _added(
    parts: torch.Tensor, into: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    with ieee():
        total = into
        if into is None:
            total = torch.zeros(like.shape, dtype=torch.float32, device="cpu")
        for part in parts:
            total += part
        return total.to(like.dtype) if into is None else None


def _row_sum(t: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension of [M, D]."""
    return halves(torch.nn.functional.pad(t, (0, room(t.shape[1]) - t.shape[1])), 1)


def _parts(t: torch.Tensor) -> torch.Tensor:
    """Return the sums [P, D] over each `part_rows` of t [M, D]."""
    m, width = t.shape
    rows = part_rows(width)
    t = torch.nn.functional.pad(t, (0, 0, 0, -m % rows))
    return halves(t.view(-1, rows, width), 1)
