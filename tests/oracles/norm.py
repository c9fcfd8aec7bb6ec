"""Float64 norms, their gradients and fp32 error bounds; for tests only.

    h = x + residual
    rms     y = h r w',  r = 1 / √(mean(h²) + eps),  w' = weight + offset
            dh += r (g - x̂ mean(g x̂)),  g = dy w', x̂ = h r
    layer   y = (h - μ) r w' + bias,  r = 1 / √(mean((h - μ)²) + eps)
            dh += r (g - mean(g) - x̂ mean(g x̂)),  x̂ = (h - μ) r
    dweight = Σ_m dy x̂;  dbias = Σ_m dy

Numbers are `Near`: each operation adds what fp32 may round (error_bounds.py).
"""

from __future__ import annotations

import torch

from cute_kernels.norm.config import LAYER, part_rows, room
from cute_kernels.norm.tensors import Rule, Scale, Upstream

from .error_bounds import Near, exact

#: Additions that an element of a row goes through: 64 in a thread, 5 levels of a warp, 32 warps.
_CHAIN = 101


def forward(h: torch.Tensor, scale: Scale, rule: Rule) -> tuple[Near, Near]:
    """Return (y, x̂) of rows h [M, D], of which h is exact."""
    scale = scale.with_weight(rule.offset, h)
    x_hat, _ = _standard(exact(h), rule)
    return _scaled(x_hat, scale, rule), x_hat


def backward(
    upstream: Upstream, h: torch.Tensor, scale: Scale, rule: Rule
) -> tuple[Near, Near, Near]:
    """Return (dh, dweight, dbias)."""
    scale = scale.with_weight(rule.offset, h)
    x_hat, r = _standard(exact(h), rule)
    dy = exact(upstream.dy)
    g = dy
    if scale.weight is not None:
        g = dy * (exact(scale.weight) + rule.offset)
    inner = g - x_hat * _mean(g * x_hat)
    if rule.kind == LAYER:
        inner = inner - _mean(g)
    dh = inner * r
    if upstream.dh is not None:
        dh = dh + exact(upstream.dh)
    return dh, _over_rows(dy * x_hat), _over_rows(dy)


def _standard(h: Near, rule: Rule) -> tuple[Near, Near]:
    """Return x̂ [M, D] and r [M, 1]."""
    if rule.kind == LAYER:
        h = h - _mean(h)
    r = exact(1.0, h) / (_mean(h * h) + rule.eps).sqrt()
    return h * r, r


def _scaled(x_hat: Near, scale: Scale, rule: Rule) -> Near:
    y = x_hat
    if scale.weight is not None:
        y = y * (exact(scale.weight) + rule.offset)
    return y if scale.bias is None else y + exact(scale.bias)


def _mean(t: Near) -> Near:
    width = t.value.shape[1]
    total = t.sum(1, chain=min(_CHAIN, room(width)))
    return total.reshape(-1, 1) / float(width)


def _over_rows(t: Near) -> Near:
    """Sum over rows: of a part, then of parts."""
    m, width = t.value.shape
    rows = part_rows(width)
    return t.sum(0, chain=rows + -(-m // rows))
