"""Replacements of ``demo.attention._alone`` whose bits follow the batch: mutants, to be caught."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.integrations import transformers as integration


def _allowed(query, key, real, cached):
    """Bool [T, S]: causal in buffer columns, padding out of sight (but of its own rows)."""
    rows, columns = cached + torch.arange(query.shape[1])[:, None], torch.arange(key.shape[1])
    seen = (columns <= rows) & (columns >= real.start) & (columns < real.stop)
    return seen | (columns == rows)


def padding_left_in_place(module, query, key, value, real, cached, scaling):
    """Keys at their columns of the buffer, padding masked: the integration used as it is."""
    mask = _allowed(query, key, real, cached)[None, None]
    batch = query[None], key[None], value[None]
    return integration.attention(module, *batch, mask, scaling=scaling)[0][0]


def sdpa_on_padded_keys(module, query, key, value, real, cached, scaling):
    """torch's own attention, over the whole buffer."""
    mask = _allowed(query, key, real, cached)
    batch = query[None], key[None], value[None]
    out = F.scaled_dot_product_attention(*batch, mask, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


def keys_split_for_one_query(module, query, key, value, real, cached, scaling):
    """Two halves of the keys, joined by their log-sum-exps when there is one query, as in decoding
    kernels that split the keys to fill the machine."""
    q = query[None].transpose(1, 2)
    k, v = (t[None, :, real].transpose(1, 2) for t in (key, value))
    if query.shape[1] > 1 or k.shape[1] < 2:
        return _cut(q, k, v, real, cached, scaling)
    half = k.shape[1] // 2
    parts = [
        ck.block_sparse_attention(q, k[:, part], v[:, part], scale=scaling, return_lse=True)
        for part in (slice(0, half), slice(half, None))
    ]
    weights = torch.stack([lse[0, :, 0] for _, lse in parts]).softmax(0)[..., None]
    outs = torch.stack([out[0, 0].float() for out, _ in parts])
    return (weights * outs).sum(0, keepdim=True).to(query.dtype)


def schedule_by_padding(module, query, key, value, real, cached, scaling):
    """Another order of the gradients' sums when there is padding."""
    q, k, v = (t[None].transpose(1, 2) for t in (query, key, value))
    schedule = "spt" if real.stop == key.shape[1] else "left_to_right"
    return _cut(q, k[:, real], v[:, real], real, cached, scaling, schedule)


def _cut(q, k, v, real, cached, scaling, schedule="auto"):
    first, end = max(real.start - cached, 0), real.stop - cached
    if first >= end:
        return torch.zeros_like(q[0])
    options = {"causal": True, "scale": scaling, "schedule": schedule}
    out = ck.block_sparse_attention(q[:, first:end], k, v, **options)[0]
    return F.pad(out, (0, 0, 0, 0, first, q.shape[1] - end))
