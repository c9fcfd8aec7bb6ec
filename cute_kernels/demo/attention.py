"""Causal attention through ``ck.block_sparse_attention``, one sequence at a time without padding.

The op promises a query row's bits for keys at their positions.  In a batch with left padding a
key's column is not its position, so each sequence is cut out of its padding and attended alone:
the queries at positions first..length-1, the keys at 0..length-1.  Its gradients, which are sums
over its queries and keys, then depend on no neighbour and on no padding either.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from ..integrations import transformers as integration

#: The name under which transformers finds this attention.
NAME = "cute_kernels_demo"


def register() -> None:
    """Makes the name known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, real_columns)


def real_columns(
    batch_size: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    **_: object,
) -> list[slice]:
    """transformers' mask interface: per sequence the columns of the key buffer that are real.

    Args:
        batch_size, kv_length: B and S of the key buffer.
        attention_mask: bool [B, S], each sequence's real columns next to each other; None: all.
    """
    if attention_mask is None:
        return [slice(0, kv_length)] * batch_size
    first = attention_mask.int().argmax(1).tolist()
    count = attention_mask.sum(1).tolist()
    return [slice(at, at + length) for at, length in zip(first, count, strict=True)]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: list[slice],
    *,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: causal, padding on either side, key cache.

    Args:
        query: [B, H, T, 64], the last T columns of the buffer.
        key, value: [B, G, S, 64], H a multiple of G; S >= T counts cache and padding.
        attention_mask: What `real_columns` made.

    Returns:
        ([B, T, H, 64], None); rows of padding are 0.
    """
    cached = key.shape[2] - query.shape[2]
    # unbind: its gradient is a stack, where that of an index adds zeros of the whole batch.
    parts = zip(query.unbind(), key.unbind(), value.unbind(), attention_mask, strict=True)
    outputs = [_alone(module, q, k, v, real, cached, scaling) for q, k, v, real in parts]
    return torch.stack(outputs), None


def _alone(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    real: slice,
    cached: int,
    scaling: float,
) -> torch.Tensor:
    """query [H, T, D], key and value [G, S, D] of one sequence -> [T, H, D]."""
    heads, rows, dim = query.shape
    first, end = max(real.start - cached, 0), real.stop - cached
    if first >= end:
        return query.new_zeros(rows, heads, dim)
    cut = (query[None, :, first:end], key[None, :, real], value[None, :, real])
    out, _ = integration.attention(module, *cut, None, scaling=scaling)
    return F.pad(out[0], (0, 0, 0, 0, first, rows - end))
