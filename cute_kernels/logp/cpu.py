"""The CPU backend: units and gradients of logits, element by element, in IEEE arithmetic.

2^y is `ieee.exp2`, a polynomial.
"""

from __future__ import annotations

import torch

from ..cpu.ieee import exp2, ieee
from ..runtime import products
from . import exact
from .config import CHOSEN, CPU, LN2, LOG2E, MAX_EXPONENT, MIN_POWER, UNIT
from .tensors import Head, Logits, Rows, Upstream

#: Elements of a gradient that are multiplied at a time, in fp32.
_SCALED = 1 << 22


def states(
    hidden: torch.Tensor, head: Head, rows: Rows, entropy: bool, sums: torch.Tensor | None = None
) -> torch.Tensor:
    """int64 [P, T, C]: the states of blocks of the head's rows.

    ``sums``: fp32 [T', V'] or None; it gets the first tokens' logits before bias and softcap.
    """
    parts = []
    for first in range(0, len(head.weight), CPU.columns):
        columns = slice(first, min(first + CPU.columns, len(head.weight)))
        block = head.block(columns)
        of_block = products.sums(hidden, block.weight, head.order)
        if sums is not None:
            sums[:, columns] = of_block[: len(sums)]
        layout = Logits(block.start, head.vocab, head.softcap)
        parts.append(states_of_logits(_biased(of_block, block), layout, rows, entropy))
    return torch.cat(parts)


def gradients(
    hidden: torch.Tensor,
    head: Head,
    rows: Rows,
    upstream: Upstream,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, V] of the dtype of ``hidden``, in ``out`` if given: the gradient of the head's logits."""
    if out is None:
        out = hidden.new_empty(len(hidden), len(head.weight))
    sums = products.sums(hidden, head.weight, head.order)
    gradients_of_sums(sums, head, rows, upstream, out)
    return out


def gradients_of_sums(
    sums: torch.Tensor, head: Head, rows: Rows, upstream: Upstream, out: torch.Tensor
) -> None:
    """``out`` [T, V] = `gradients` of kept sums [T, V], fp32 logits before bias and softcap."""
    layout = Logits(head.start, head.vocab, head.softcap)
    out.copy_(gradients_of_logits(_biased(sums, head), layout, rows, upstream, out.dtype))


def add_hidden(total: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> None:
    """total [T, D] fp32 += gradient [T, V] · weight [V, D], the block's product added once."""
    with ieee():
        total += products.sums(gradient, weight.mT, "chain")


def states_of_logits(
    logits: torch.Tensor, layout: Logits, rows: Rows, entropy: bool
) -> torch.Tensor:
    """int64 [1, T, C] of logits [T, n] of any dtype; they begin at ``place.start``."""
    with ieee():
        z = _capped(logits.to(torch.float32), layout.softcap)
        chosen = _chosen(z, layout, rows)
        z = _whole_units(z, layout)
        scale = rows.scale[:, None, None]
        top = (z.amax(2, keepdim=True) * scale).clamp(-MAX_EXPONENT, MAX_EXPONENT)
        # A NaN shows in the unit's sum.
        exponent = torch.nan_to_num(top.round(), nan=0.0)
        power = _fma(z, scale, -exponent)
        values = exp2(power)
        weighted = _unit_sum(values * power.clamp(min=MIN_POWER)) if entropy else None
        state = exact.of_units(exponent[..., 0].to(torch.int64), _unit_sum(values), weighted)
        state[:, CHOSEN] = chosen
        return state[None]


def gradients_of_logits(
    logits: torch.Tensor, layout: Logits, rows: Rows, upstream: Upstream, dtype: torch.dtype
) -> torch.Tensor:
    """dlogits [T, n] = (1[v = target] - p) dlogp / τ - p (ln p + H) dentropy / τ, in ``dtype``.

    Exactly 0 in rows without a target, and in columns that are padding of the vocabulary.
    """
    with ieee():
        z = _capped(logits.to(torch.float32), layout.softcap)
        column = torch.arange(layout.start, layout.start + z.shape[1], device="cpu")
        inside = column < layout.vocab
        power = _fma(z, rows.scale[:, None], -upstream.lse2[:, None])
        p = exp2(power)
        of_logp = upstream.of_logp[:, None]
        gradient = ((column == rows.target[:, None]).float() - p) * of_logp
        if upstream.of_entropy is not None:
            log_p = power.clamp(min=MIN_POWER) * LN2
            weight = p * upstream.of_entropy[:, None]
            gradient = gradient - weight * (log_p + upstream.entropy[:, None])
        if layout.softcap:
            gradient = gradient * (1.0 - (z / layout.softcap).square())
        counted = inside & (rows.target[:, None] >= 0)
        return torch.where(counted, gradient, 0.0).to(dtype)


def _biased(sums: torch.Tensor, head: Head) -> torch.Tensor:
    if head.bias is None:
        return sums
    with ieee():
        return sums + head.bias.to(torch.float32)


def _capped(z: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap tanh(z / softcap), as 1 - 2 / (1 + e^(2 z / softcap))."""
    if not softcap:
        return z
    power = exp2((z * (2.0 * LOG2E / softcap)).clamp(-120.0, 120.0))
    return (1.0 - 2.0 / (power + 1.0)) * softcap


def _chosen(z: torch.Tensor, layout: Logits, rows: Rows) -> torch.Tensor:
    """The bits of the target's logit where it is among these columns, else 0."""
    column = rows.target - layout.start
    here = (column >= 0) & (column < z.shape[1])
    value = z.gather(1, torch.where(here, column, 0)[:, None])[:, 0]
    return torch.where(here, value.view(torch.int32).to(torch.int64), 0)


def _whole_units(z: torch.Tensor, layout: Logits) -> torch.Tensor:
    """[T, U, 16], -inf behind the last column and in padding of the vocabulary."""
    count = -(-z.shape[1] // UNIT)
    out = z.new_full((len(z), count * UNIT), -torch.inf)
    valid = min(z.shape[1], max(0, layout.vocab - layout.start))
    out[:, :valid] = z[:, :valid]
    return out.view(len(z), count, UNIT)


def _unit_sum(v: torch.Tensor) -> torch.Tensor:
    """[T, U, 16] -> [T, U]: v and v + 8; then neighbours, and so on."""
    half = v[..., :8] + v[..., 8:]
    pair = half[..., 0::2] + half[..., 1::2]
    four = pair[..., 0::2] + pair[..., 1::2]
    return four[..., 0] + four[..., 1]


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a b + c in fp32 with one rounding of the sum; a product of fp32 is exact in fp64."""
    return (a.double() * b.double() + c.double()).float()


def scale(gradient: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` = ``gradient`` times fp32 ``factor`` [], in blocks; they may be one tensor."""
    if out.data_ptr() == gradient.data_ptr() and factor.item() == 1.0:
        return
    with ieee():
        blocks = (t.view(-1).split(_SCALED) for t in (gradient, out))
        for x, y in zip(*blocks, strict=True):
            y.copy_(x.float() * factor)
