"""CPU backend: fp64 inside, one rounding at the end, one IEEE operation at a time.

No bit depends on how many rows there are, on threads, or on where a vector register ends: sums are
those of `_lane_sums`, functions those of elementary.py.  Work is cut into blocks that caches hold,
which shows in no bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..cpu import elementary
from ..cpu.ieee import ieee
from ..runtime.operands import empty_rows_like
from .config import SQUARES, lanes, promoted

#: Elements of a block.
_BLOCK = 2**17


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute f(x), contiguous, the dtype of x."""
    return _by_element(lambda v: elementary.value(kind, v), (x,), 1)[0]


def activation_backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute dy f'(x) in the dtype of x."""
    return _by_element(lambda g, v: elementary.derivative(kind, v) * g, (dy, x), 1)[0]


def gated(gate: torch.Tensor, up: torch.Tensor, kind: str, steps: bool) -> torch.Tensor:
    """Compute f(gate) up; ``steps``: f(gate) rounded, then torch's product."""
    if steps:
        return (activation(gate, kind) * up).contiguous()
    return _by_element(lambda v, u: elementary.value(kind, v) * u, (gate, up), 1)[0]


def gated_rows(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute `gated` in steps over rows [gate, up]."""
    return gated(*x.chunk(2, dim=-1), kind, True)


def gated_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str, steps: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dy up f'(gate), dy f(gate)); ``steps``: dy up and f(gate) rounded."""
    if steps:
        d_gate = activation_backward(dy * up, gate, kind)
        return d_gate, (dy * activation(gate, kind)).contiguous()

    def gradients(g: torch.Tensor, v: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return elementary.derivative(kind, v) * (g * u), elementary.value(kind, v) * g

    return _by_element(gradients, (dy, gate, up), 2)


def softmax(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute e^(x - max) / Σ e^(x - max) of rows [M, N]."""

    def run(block: torch.Tensor) -> torch.Tensor:
        power = elementary.exp(block - block.amax(1, keepdim=True))
        return power / _lane_sums(power)

    return _by_row(run, (x,), dtype)


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute y (dy - Σ y dy)."""
    return _by_row(lambda g, p: p * (g - _lane_sums(p * g)), (dy, y), dtype)


def log_softmax(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute (x - max) - ln Σ e^(x - max)."""

    def run(block: torch.Tensor) -> torch.Tensor:
        below = block - block.amax(1, keepdim=True)
        return below - elementary.log(_lane_sums(elementary.exp(below)))

    return _by_row(run, (x,), dtype)


def log_softmax_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute dy - softmax(x) Σ dy."""

    def run(g: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        power = elementary.exp(block - block.amax(1, keepdim=True))
        return g - power / _lane_sums(power) * _lane_sums(g)

    return _by_row(run, (dy, x), x.dtype)


def rotary_table(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin) [P, 2 F] of positions [P] and frequencies [F], the two halves equal."""
    with ieee():
        angle = positions[:, None].to(torch.float64) * inv_freq.to(torch.float64)
        tables = elementary.cos_sin(angle.to(torch.float32).to(torch.float64))
        return tuple(_rounded(torch.cat([t, t], 1) * scaling, dtype) for t in tables)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> torch.Tensor:
    """Return x [A, B, C, D] with its first R columns rotated by cos and sin [A, B, C, R].

    (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2); ``back``: (x1 cos1 + x2 sin2, x2 cos2 - x1 sin1).
    """
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    width = cos.shape[-1]
    out[..., width:] = x[..., width:]
    with ieee():
        for into, *operands in zip(out, x, cos, sin, strict=True):
            halves = (t[..., :width].to(torch.float64).chunk(2, -1) for t in operands)
            (x1, x2), (c1, c2), (s1, s2) = halves
            if back:
                turned = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
            else:
                turned = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
            into[..., :width] = _rounded(torch.cat(turned, -1), x.dtype)
    return out


def rotary_pair(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dim: int,
    dtype: torch.dtype,
    back: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k rotated by cos and sin, which are unsqueezed at ``dim``.

    y = round(round(x cos) + round(rotate_half(x) sin)): each step has the dtype that torch promotes
    x and cos to.  The results have ``dtype``, and the layout of q and k.

    ``back``: q and k are gradients, and so are the results, with the steps of torch's autograd.
    """
    rotate, tables = _rotate_back if back else _rotate, (cos.unsqueeze(dim), sin.unsqueeze(dim))
    with ieee():
        return tuple(rotate(x, *tables, dtype) for x in (q, k))


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    step, width = promoted(x.dtype, cos.dtype), cos.shape[-1]
    out = empty_rows_like(x, dtype)
    (x1, x2), (c1, c2), (s1, s2) = (_fp32_halves(t, width) for t in (x, cos, sin))
    y1 = _step(x1 * c1, step) - _step(x2 * s1, step)
    y2 = _step(x2 * c2, step) + _step(x1 * s2, step)
    out[..., :width] = _rounded(_step(torch.cat((y1, y2), -1), step), dtype)
    out[..., width:] = x[..., width:].to(step)
    return out


def _rotate_back(
    dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return dx of `_rotate`: what autograd adds for x cos and for the halves of x.

    Each slice of x has a gradient padded with 0, so a sum of zeros is never -0.
    """
    step, width = promoted(dtype, cos.dtype), cos.shape[-1]
    out = empty_rows_like(dy, dtype)
    dy = dy.to(step)
    (g1, g2), (c1, c2), (s1, s2) = (_fp32_halves(t, width) for t in (dy, cos, sin))
    # A product is rounded by its op, and to the dtype of x by autograd.
    of_cos, of_sin = (
        [_step(_step(p, step), dtype) for p in products]
        for products in ((g1 * c1, g2 * c2), (g1 * s1, g2 * s2))
    )
    d1 = (of_sin[1] + 0.0) + of_cos[0]
    d2 = (0.0 - of_sin[0]) + of_cos[1]
    out[..., :width] = _rounded(torch.cat((d1, d2), -1), dtype)
    out[..., width:] = dy[..., width:].to(dtype) + 0.0
    return out


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Look up weight[ids] by torch's lookup, which copies."""
    return torch.embedding(weight, ids)


def embedding_gradient(
    dy: torch.Tensor, ids: torch.Tensor, padding: int, into: torch.Tensor
) -> None:
    """Compute into [V, D] += Σ_{t: ids_t = v} dy_t in fp32, tokens ascending, without ``padding``.

    A sum starts from the value of ``into`` and is rounded to its dtype once.
    """
    order = ids.argsort(stable=True)
    order = order[ids[order] != padding]
    entry = ids[order]
    if not len(entry):
        return
    # The rank of a token among those of its entry: each round adds one token to every entry.
    starts = torch.ones_like(entry, dtype=torch.bool)
    starts[1:] = entry[1:] != entry[:-1]
    group = starts.cumsum(0) - 1
    position = torch.arange(len(entry), dtype=torch.int64, device="cpu")
    rank = position - position[starts][group]
    rounds = rank.argsort(stable=True).split(rank.bincount().tolist())
    with ieee():
        sums = into[entry[starts]].to(torch.float32)
        for round_tokens in rounds:
            sums[group[round_tokens]] = sums[group[round_tokens]] + dy[order[round_tokens]].to(
                torch.float32
            )
        into[entry[starts]] = _rounded(sums, into.dtype)


def square_sum(x: torch.Tensor) -> torch.Tensor:
    """Compute Σ x² in fp64 of x [N]: chunks of `SQUARES` in lanes, then their sums in lanes."""
    with ieee():
        chunks = [_lane_sums(_squares(chunk)[None]) for chunk in x.split(SQUARES)]
        return _lane_sums(torch.cat(chunks, 1))[0, 0]


def add_sums(sums: torch.Tensor) -> torch.Tensor:
    """Sum fp64 numbers [N], ascending."""
    with ieee():
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for value in sums:
            total += value
        return total


def scale_(x: torch.Tensor, factor: torch.Tensor) -> None:
    """Compute x *= factor, an fp32 number, in fp32 with one rounding."""
    with ieee():
        x.copy_(_rounded(x.to(torch.float32) * factor, x.dtype))


# ---- helpers -------------------------------------------------------------------------------------


def _lane_sums(v: torch.Tensor) -> torch.Tensor:
    """Sum [M, N] -> [M, 1]: lane l adds columns l + i L, ascending; then lanes are halved."""
    m, n = v.shape
    count = lanes(n)
    total = v.new_zeros(m, count)
    for first in range(0, n, count):
        part = v[:, first : first + count]
        total[:, : part.shape[1]] += part
    while count > 1:
        count //= 2
        total = total[:, :count] + total[:, count:]
    return total


def _fp32_halves(t: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the halves of the first ``width`` columns, in fp32."""
    return t[..., :width].to(torch.float32).chunk(2, -1)


def _step(v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 numbers rounded to ``dtype``."""
    return v.to(dtype).to(torch.float32)


def _squares(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float64)
    return wide * wide


def _by_element(
    function: Callable, operands: tuple[torch.Tensor, ...], results: int
) -> tuple[torch.Tensor, ...]:
    """Apply ``function`` to fp64 blocks of like tensors; results have the dtype of the last."""
    dtype, shape = operands[-1].dtype, operands[-1].shape
    flat = [t.reshape(-1) for t in operands]
    outs = [torch.empty(shape, dtype=dtype, device="cpu") for _ in range(results)]
    flat_out = [t.view(-1) for t in outs]
    with ieee():
        for first in range(0, flat_out[0].numel(), _BLOCK):
            block = slice(first, first + _BLOCK)
            values = function(*(t[block].to(torch.float64) for t in flat))
            for out, value in zip(flat_out, (values,) if results == 1 else values, strict=True):
                out[block] = _rounded(value, dtype)
    return tuple(outs)


def _by_row(
    function: Callable, operands: tuple[torch.Tensor, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Apply ``function`` to fp64 blocks of rows [M, N]."""
    m, n = operands[0].shape
    out = torch.empty(m, n, dtype=dtype, device="cpu")
    rows = max(1, _BLOCK // n)
    with ieee():
        for first in range(0, m, rows):
            block = slice(first, first + rows)
            values = function(*(t[block].to(torch.float64) for t in operands))
            out[block] = _rounded(values, dtype)
    return out


def _rounded(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to ``dtype`` through fp32; every NaN has one bit pattern, the positive quiet one."""
    return y.to(torch.float32).to(dtype).masked_fill_(y.isnan(), torch.nan)
