"""Causal attention through ``ck.matmul``, a query row's bits the same in rollout and in training.

For each sequence and key head: scores = q Kᵀ, weights = causal softmax, out = weights V.  The key
at position p of its sequence is always at slot p of a buffer of ``capacity`` slots (zeros
elsewhere), so both products have one shape however many keys the cache holds and however much
padding the batch has, and the weight of a slot that the row may not see is exactly 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import cute_kernels as ck

from . import rows

#: The name under which transformers finds this attention.
NAME = "cute_kernels_demo"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: causal, left padding, key cache.

    Args:
        query: [B, H, T, D], the last T tokens of each sequence.
        key, value: [B, G, S, D], H a multiple of G; S >= T counts cache and padding.
        attention_mask: Not read: position_ids say what is padding.
        position_ids: int64 [B or 1, T], the position of each query token; negative ones are left
            padding, whose outputs are 0.

    Returns:
        ([B, T, H, D], None).
    """
    capacity = module.config.max_position_embeddings
    lengths = (position_ids[:, -1] + 1).expand(query.shape[0]).tolist()
    outputs = [
        _one_sequence(query[b], key[b], value[b], length, capacity, scaling)
        for b, length in enumerate(lengths)
    ]
    return torch.stack(outputs).transpose(1, 2).contiguous(), None


def _one_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    length: int,
    capacity: int,
    scaling: float,
) -> torch.Tensor:
    """query [H, T, D], key and value [G, S, D] of a sequence of ``length`` tokens -> [H, T, D]."""
    heads, tokens, dim = query.shape
    groups = key.shape[0]
    real = min(tokens, length)
    if real <= 0:
        return torch.zeros_like(query)
    first = length - real  # the position of the first real query
    q, top = query[:, tokens - real :], first
    if torch.is_grad_enabled():
        # dK and dV add over query rows: these too sit at their positions, in fixed slots.
        q, top = _slots(q, first, capacity), 0
    keys = _slots(key[:, -length:], 0, capacity)
    values = _slots(value[:, -length:], 0, capacity)
    positions = torch.arange(top, top + q.shape[1], device=q.device).repeat(heads)
    q = q.reshape(groups, -1, dim)
    scores = torch.cat([ck.matmul(q[g], keys[g].mT) for g in range(groups)])
    weights = rows.causal_softmax(scores, positions, scaling).chunk(groups)
    out = torch.cat([ck.matmul(weights[g], values[g]) for g in range(groups)])
    out = out.view(heads, -1, dim)[:, first - top : length - top]
    return F.pad(out, (0, 0, tokens - real, 0))


def _slots(x: torch.Tensor, first: int, capacity: int) -> torch.Tensor:
    """x [H, T, D] at slots first..first+T of [H, capacity, D], zeros elsewhere."""
    return F.pad(x, (0, 0, first, capacity - first - x.shape[1]))
