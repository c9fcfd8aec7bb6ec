"""Oracles for tests, never dispatched: routing and its sums in plain Python and torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from cute_kernels.moe.config import EPSILON


def experts(offsets: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of every expert."""
    for expert, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
        yield expert, slice(first, end)


def choice(
    scores: torch.Tensor, bias: torch.Tensor | None, k: int, groups: int, topk_groups: int
) -> list[list[int]]:
    """The chosen experts of each row, by sorting Python numbers."""
    value = scores if bias is None else scores + bias.float()
    out = []
    for row in value.tolist():
        size = len(row) // groups
        parts = [row[g * size : (g + 1) * size] for g in range(groups)]
        ranks = [sorted(part, reverse=True) for part in parts]
        best = [_group_rank(rank, bias is not None) for rank in ranks]
        groups_kept = set(_largest(best, topk_groups))
        allowed = [i for i in range(len(row)) if i // size in groups_kept]
        out.append([allowed[i] for i in _largest([row[i] for i in allowed], k)])
    return out


def _group_rank(rank: list[float], biased: bool) -> float:
    if not biased or len(rank) < 2:
        return rank[0]
    return torch.tensor(rank[:2], dtype=torch.float32, device="cpu").sum().item()


def _largest(values: list[float], count: int) -> list[int]:
    """Indices of the largest values, descending; of equal ones the lowest first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def weights(
    scores: torch.Tensor, indices: torch.Tensor, normalize: bool, scale: float
) -> torch.Tensor:
    """Weights of the chosen experts in the dtype of ``scores``: fp32 gives bytes."""
    out = torch.empty(indices.shape, dtype=scores.dtype, device="cpu")
    for t, row in enumerate(indices.tolist()):
        total = None
        for expert in sorted(row):
            total = scores[t, expert] if total is None else total + scores[t, expert]
        for j, expert in enumerate(row):
            value = scores[t, expert]
            out[t, j] = (value / (total + EPSILON) if normalize else value) * scale
    return out


def permutation(
    indices: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(offsets, order, positions) by Python's stable sort."""
    flat = indices.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda slot: flat[slot])
    offsets = [sum(index < expert for index in flat) for expert in range(count + 1)]
    positions = [0] * len(flat)
    for position, slot in enumerate(order):
        positions[slot] = position
    sizes = ((offsets, (count + 1,)), (order, (-1,)), (positions, indices.shape))
    return tuple(torch.tensor(v, dtype=torch.int32, device="cpu").view(shape) for v, shape in sizes)


def combine(
    rows: torch.Tensor, weights: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    """Σ weight · row, positions ascending, product and sum rounded to the dtype of ``rows``."""
    out = torch.empty(positions.shape[0], rows.shape[1], dtype=rows.dtype, device="cpu")
    for t, places in enumerate(positions.tolist()):
        total = None
        for position in sorted(places):
            term = rows[position]
            if weights is not None:
                term = term * weights[t, places.index(position)]
            total = term if total is None else total + term
        out[t] = total
    return out
