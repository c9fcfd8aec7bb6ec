"""The sum over the vocabulary in integers: what a state is, how states meet, what they come to.

A unit is 16 neighbours of the vocabulary with M = round(max y) and s = Σ 2^(y - M) in fp32.  M has
a bin, M div 16, and a place in it, r = M mod 16; s 2^(24 + r) is a whole number.  A token's state
holds the highest bin of its units and the sums of that bin and the three below.  A unit of a lower
bin than those adds nothing, whenever it comes: so no order of units, and no cut of the vocabulary
at a multiple of 16, can be seen in a state.

    Σ 2^y   = 2^(16 top - 24) Σ_j S_j 2^(-16 j)
    Σ 2^y y = 2^(16 top - 24) Σ_j (A_j + 16 (top - j) S_j) 2^(-16 j)

with A_j the same of u = Σ 2^(y - M) (y - 16 bin).  Arithmetic is IEEE in fp64, one operation at a
time, so that every device comes to the same results.
"""

from __future__ import annotations

import torch

from ..cpu.ieee import ieee_on
from .config import (
    BIN,
    BINS,
    CHOSEN,
    EMPTY,
    FRACTION,
    LN2,
    LOG2_SERIES,
    LOST,
    MASKED,
    OUTSIDE,
    SQRT_HALF,
    SUMS,
    TOO_MUCH,
    TOP,
    WEIGHTED,
    columns_of_state,
)
from .tensors import Rows


def of_units(
    exponent: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor | None
) -> torch.Tensor:
    """The state [T, C] of units [T, U].

    Args:
        exponent: int64, M of each unit.
        total: fp32, s of each.
        weighted: fp32, Σ 2^(y - M) (y - M) of each, or None without an entropy.
    """
    bins = exponent >> 4
    place = exponent & (BIN - 1)
    alive = total > 0
    lost = ~(total < TOO_MUCH)
    top = torch.where(alive, bins, EMPTY)
    top = torch.where(lost, LOST, top).amax(1)
    states = total.new_zeros(len(total), columns_of_state(weighted is not None), dtype=torch.int64)
    states[:, TOP] = top
    unit = ((1023 + FRACTION + place) << 52).view(torch.float64)
    _into_bins(states[:, SUMS:CHOSEN], top, bins, alive, total.double() * unit)
    if weighted is not None:
        # y - 16 bin = (y - M) + place; one rounding, as of an fma.
        moved = (total.double() * place + weighted.double()).float()
        _into_bins(states[:, WEIGHTED:], top, bins, alive, moved.double() * unit)
    return states


def _into_bins(out, top, bins, alive, values) -> None:
    """out[:, j] = Σ of the values, as whole numbers, whose bin is j below the highest."""
    whole = torch.where(alive & (values.abs() < torch.inf), values, 0.0).round().to(torch.int64)
    below = top[:, None] - bins
    for j in range(BINS):
        out[:, j] = torch.where(alive & (below == j), whole, 0).sum(1)


def merge(states: torch.Tensor) -> torch.Tensor:
    """One state [T, C] of parts [P, T, C] of the vocabulary."""
    top = states[..., TOP].amax(0)
    below = top - states[..., TOP]
    out = torch.zeros_like(states[0])
    out[:, TOP] = top
    out[:, CHOSEN] = states[..., CHOSEN].sum(0)
    for first in (SUMS, WEIGHTED) if states.shape[-1] > WEIGHTED else (SUMS,):
        for j in range(BINS):
            for index in range(j + 1):
                part = torch.where(below == j - index, states[..., first + index], 0)
                out[:, first + j] += part.sum(0)
    return out


def finish(
    states: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(log p, log2 Σ 2^y, entropy in nats or None), fp32 [T], of states [P, T, C].

    0, with an entropy of 0, for a masked token; NaN for a target that the vocabulary has not, and
    where a logit was NaN or out of range.
    """
    with ieee_on(states):
        return _finish(states, rows)


def _finish(
    states: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    state = merge(states)
    total = _mantissas(state[:, SUMS:CHOSEN].double())
    known = (state[:, TOP] < LOST) & (total > 0)
    total = torch.where(known, total, 1.0)
    log2_of_mantissa = _log2(total) - FRACTION
    lse2 = state[:, TOP] * BIN + log2_of_mantissa
    lse2 = torch.where(known, lse2, torch.nan)
    chosen = state[:, CHOSEN].to(torch.int32).view(torch.float32)
    y = chosen.double() * rows.scale.double()
    logp = ((y - lse2) * LN2).clamp(max=0.0)
    logp = torch.where(rows.target == OUTSIDE, torch.nan, logp)
    masked = rows.target == MASKED
    logp = torch.where(masked, 0.0, logp).float()
    if state.shape[1] == WEIGHTED:
        return logp, lse2.float(), None
    # With y - 16 top in place of y - 16 bin.
    steps = torch.arange(BINS, dtype=torch.float64, device=state.device) * BIN
    weighted = _mantissas(state[:, WEIGHTED:].double() - state[:, SUMS:CHOSEN].double() * steps)
    entropy = ((log2_of_mantissa - weighted / total) * LN2).clamp(min=0.0)
    entropy = torch.where(known, entropy, torch.nan)
    return logp, lse2.float(), torch.where(masked, 0.0, entropy).float()


def _mantissas(bins: torch.Tensor) -> torch.Tensor:
    """Σ_j bins[:, j] 2^(-16 j), from the smallest on."""
    total = bins[:, BINS - 1]
    for j in range(BINS - 2, -1, -1):
        total = total * 2.0**-BIN + bins[:, j]
    return total


def _log2(x: torch.Tensor) -> torch.Tensor:
    """log2 of x > 0 in fp64, by additions, products and one division."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1022
    m = ((bits & ((1 << 52) - 1)) | (1022 << 52)).view(torch.float64)
    small = m < SQRT_HALF
    m = torch.where(small, m + m, m)
    exponent = torch.where(small, exponent - 1, exponent)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = torch.full_like(s, LOG2_SERIES[-1])
    for c in LOG2_SERIES[-2::-1]:
        series = series * square + c
    return series * s + exponent
