"""CPU backend: each expert's rows by the products of ``ck.linear``; routing in IEEE arithmetic.

No bit depends on how many rows there are, on which expert has them, or on where a vector register
ends: sums are elementwise adds in a written order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch

from ..cpu.ieee import halves, ieee
from ..runtime import products
from .config import EPSILON, GROUP_BEST, LANES, ORDER, TREE

#: Elements of a block of rows, which shows in no bit.
_BLOCK = 2**17


# ---- grouped products ----------------------------------------------------------------------------


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    order: str = ORDER,
) -> torch.Tensor:
    """a [T, K] · b[e] [N, K]ᵀ (+ bias[e] [N]) for the rows of each expert e: [T, N]."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device="cpu")
    out[int(offsets[-1]) :] = 0
    for expert, rows in _experts(offsets):
        bias_e = None if bias is None else bias[expert]
        products.product(a[rows], b[expert], order=order, bias=bias_e, out=out[rows])
    return out


grouped_tree = functools.partial(grouped_gemm, order=TREE)


def grouped_leaf_sums(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, length: int
) -> torch.Tensor:
    """The chains over leaves of ``length`` of a · b[e]ᵀ: fp32 [leaves, T, N]."""
    shape = -(-a.shape[1] // length), a.shape[0], b.shape[1]
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    out[:, int(offsets[-1]) :] = 0
    for expert, rows in _experts(offsets):
        out[:, rows] = products.leaf_sums(a[rows], b[expert], length)
    return out


def grouped_dw(
    dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, accumulator: torch.Tensor | None
) -> torch.Tensor:
    """Σ over the rows t of each expert of dy[t] x[t]ᵀ: [E, N, K], or added to ``accumulator``."""
    shape = len(offsets) - 1, dy.shape[1], x.shape[1]
    out = accumulator
    if out is None:
        out = torch.zeros(shape, dtype=x.dtype, device="cpu")
    for expert, rows in _experts(offsets):
        factors = dy[rows].mT, x[rows].mT
        if accumulator is None:
            products.product(*factors, out=out[expert])
        else:
            products.product(*factors, accumulator=out[expert])
    return out


def grouped_column_sum(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Σ over the rows of each expert: [E, N]."""
    out = torch.zeros(len(offsets) - 1, rows.shape[1], dtype=rows.dtype, device="cpu")
    for expert, span in _experts(offsets):
        out[expert] = products.column_sum(rows[span])
    return out


def _experts(offsets: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows), for those that have any."""
    for expert, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
        if first < end:
            yield expert, slice(first, end)


# ---- choice --------------------------------------------------------------------------------------


def select(
    scores: torch.Tensor, bias: torch.Tensor | None, k: int, groups: int, topk_groups: int
) -> torch.Tensor:
    """The experts of the k largest scores + bias, descending; ties: the lowest index; [T, k]."""
    tokens, experts = scores.shape
    with ieee():
        value = scores if bias is None else scores + bias.float()
        key = _ordered(value)
        if groups > 1:
            by_group = key.view(tokens, groups, experts // groups)
            best = by_group.sort(dim=-1, descending=True).values
            group = best[..., 0]
            if bias is not None and best.shape[-1] >= GROUP_BEST:
                group = _ordered(_number(best[..., 0]) + _number(best[..., 1]))
            chosen = group.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
            allowed = torch.zeros(tokens, groups, dtype=torch.bool, device="cpu")
            allowed.scatter_(1, chosen, True)
            allowed = allowed.repeat_interleave(experts // groups, dim=1)
            # No key of a number is the least one.
            key = key.masked_fill(~allowed, torch.iinfo(torch.int32).min)
    indices = key.sort(dim=-1, descending=True, stable=True).indices
    return indices[:, :k].to(torch.int32).contiguous()


def _ordered(value: torch.Tensor) -> torch.Tensor:
    """Integers in the order of fp32 numbers; both zeros are one, and NaN is the largest."""
    bits = (value + 0.0).contiguous().view(torch.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key.masked_fill(value.isnan(), torch.iinfo(torch.int32).max)


def _number(key: torch.Tensor) -> torch.Tensor:
    """The fp32 number of an integer of `_ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).contiguous().view(torch.float32)


# ---- weights -------------------------------------------------------------------------------------


def weights(
    scores: torch.Tensor, indices: torch.Tensor, normalize: bool, scale: float
) -> torch.Tensor:
    """scale s / (Σ s + ε) of the scores s of the chosen experts, or scale s; fp32 [T, k]."""
    keys = _keys(indices, scores.shape[1])
    with ieee():
        chosen = _chosen(scores, keys)
        if normalize:
            chosen = chosen / (_over_experts(chosen, keys) + EPSILON)[:, None]
        return chosen * scale


def slot_weights(
    scores: torch.Tensor, indices: torch.Tensor, normalize: bool, dtype: torch.dtype
) -> torch.Tensor:
    """s / Σ s of the scores s of the chosen experts, slots by halves, or s; [T, k] in a dtype."""
    chosen = _chosen(scores, _keys(indices, scores.shape[1]))
    with ieee():
        if normalize:
            chosen = chosen / halves(chosen, 1)[:, None]
        return chosen.to(dtype)


def weights_backward(
    dweights: torch.Tensor,
    scores: torch.Tensor,
    indices: torch.Tensor,
    normalize: bool,
    scale: float,
) -> torch.Tensor:
    """ds = scale g, or scale (g - Σ g s / (Σ s + ε)) / (Σ s + ε), of the chosen; fp32 [T, E]."""
    experts = scores.shape[1]
    keys = _keys(indices, experts)
    # The last column has what slots without an expert add.
    out = torch.zeros(len(scores), experts + 1, dtype=torch.float32, device="cpu")
    with ieee():
        # The weight of no expert is 0, whatever gradient comes in.
        g = dweights.masked_fill(keys == experts, 0.0)
        if normalize:
            chosen = _chosen(scores, keys)
            total = _over_experts(chosen, keys) + EPSILON
            mean = _over_experts(g * chosen, keys) / total
            g = (g - mean[:, None]) / total[:, None]
        g = g * scale
        token = torch.arange(len(scores), device="cpu")
        for expert, d_weight in zip(keys.unbind(1), g.unbind(1), strict=True):
            out[token, expert] = out[token, expert] + d_weight
    return out[:, :experts].contiguous()


def _keys(indices: torch.Tensor, experts: int) -> torch.Tensor:
    """The indices in int64; ``experts`` where one is no expert."""
    return torch.where((indices >= 0) & (indices < experts), indices, experts).long()


def _chosen(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The scores [T, E] of keys [T, k]; 0 of no expert."""
    return torch.nn.functional.pad(scores, (0, 1)).gather(1, keys)


def _over_experts(values: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Σ over the slots of values [T, k], experts ascending: [T]."""
    values = values.gather(1, keys.sort(dim=1, stable=True).indices)
    total = values[:, 0]
    for slot in range(1, values.shape[1]):
        total = total + values[:, slot]
    return total


# ---- permutation ---------------------------------------------------------------------------------


def sort(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(offsets [E + 1], slots in the order of experts [T k], the place of each slot [T, k])."""
    flat = _keys(indices, experts).reshape(-1)
    ordered, order = flat.sort(stable=True)
    edges = torch.arange(experts + 1, dtype=flat.dtype, device="cpu")
    offsets = torch.searchsorted(ordered, edges, out_int32=True)
    positions = torch.empty(len(flat), dtype=torch.int32, device="cpu")
    positions[order] = torch.arange(len(flat), dtype=torch.int32, device="cpu")
    return offsets, order.to(torch.int32), positions.view(indices.shape)


def gather(
    x: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """x[order // k], the row of each slot's token, 0 from row offsets[E] on: [T k, D]."""
    rows = x.index_select(0, order.long() // positions.shape[1]).contiguous()
    rows[int(offsets[-1]) :] = 0
    return rows


def combine(
    rows: torch.Tensor, weights: torch.Tensor | None, offsets: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Σ over a token's slots with an expert of weight · row, positions ascending, fp32: [T, D]."""
    tokens, k = positions.shape
    width = rows.shape[1]
    out = torch.empty(tokens, width, dtype=rows.dtype, device="cpu")
    place, slots = positions.long().sort(dim=1)
    step = max(1, _BLOCK // max(1, width))
    with ieee():
        for first in range(0, tokens, step):
            block = slice(first, first + step)
            total = torch.zeros((), dtype=torch.float32, device="cpu")
            for slot in range(k):
                term = rows[place[block, slot]].to(torch.float32)
                if weights is not None:
                    weight = weights[block].to(torch.float32).gather(1, slots[block])
                    term = term * weight[:, slot, None]
                # The first term as it is: a sum from +0 would lose the sign of -0.
                added = total + term if slot else term
                has_expert = place[block, slot, None] < offsets[-1]
                total = torch.where(has_expert, added, total)
            out[block] = total
    return out


def combine_backward(
    dy: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    order: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight · dy of each row, rounded once: [T k, D]; Σ row · dy in lanes: fp32 [T, k]).

    Both are 0 for slots without an expert.
    """
    k, placed = weights.shape[1], int(offsets[-1])
    d_rows = torch.empty(rows.shape, dtype=rows.dtype, device="cpu")
    d_rows[placed:] = 0
    d_weights = torch.zeros(weights.numel(), dtype=torch.float32, device="cpu")
    flat, slots = weights.reshape(-1), order.long()
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    with ieee():
        for first in range(0, placed, step):
            block = slice(first, min(first + step, placed))
            upstream = dy[slots[block] // k].to(torch.float32)
            d_rows[block] = upstream * flat[slots[block], None].to(torch.float32)
            d_weights[slots[block]] = _lane_sum(rows[block].to(torch.float32) * upstream)
    return d_rows, d_weights.view(weights.shape)


def _lane_sum(values: torch.Tensor) -> torch.Tensor:
    """Σ over columns: lane l adds columns l, l + LANES, ... ascending; then half onto half."""
    lanes = torch.zeros(len(values), LANES, dtype=torch.float32, device="cpu")
    for first in range(0, values.shape[1], LANES):
        part = values[:, first : first + LANES]
        lanes[:, : part.shape[1]] += part
    return halves(lanes, 1)
