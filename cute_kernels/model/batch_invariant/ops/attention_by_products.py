"""Attention made of products, for what the kernels of `block_sparse_attention` do not take.

Keys are cut into blocks of 128, zeros behind the last.  Per row, in fp32:

    s_j = scale q k_jᵀ + mask_j          scores of block j, -inf for a key that is masked
    m   = max over all s_j               exact, in any order
    l   = Σ_j (sum of e^(s_j - m))       a tree of 128, blocks ascending
    out = Σ_j e^(s_j - m) v_j / l        a product of K = 128, blocks ascending

Every product has one N and one K, and a block in which a row sees nothing adds zeros.  So a row's
bits do not follow the number of columns: padding behind it and a static cache's free slots do not
show.  Under a bool mask whose rows see one run of keys each, blocks are counted from the first key
that a row sees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ....errors import ArgumentValueError
from ....sparse_attn import api

_BLOCK = 128


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """Compute softmax(scale q kᵀ + mask) v, differentiable, in the dtype of ``q``."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    rows, columns = q.shape[-2], k.shape[-2]
    if is_causal:
        mask = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril()
    wide = q.float(), k.float(), v.float()
    classes = None if mask is None or is_causal else _classes(mask, q, k)
    if classes is None:
        return _blocks(*wide, mask, scale).to(q.dtype)
    out = wide[0].new_zeros((*q.shape[:-1], v.shape[-1]))
    mask = mask.expand(q.shape[0], 1, rows, columns)
    for batch, chosen, begin in classes:
        sequence = slice(batch, batch + 1)
        keys, values = (t[sequence, :, begin:] for t in wide[1:])
        part = _blocks(
            wide[0][sequence, :, chosen], keys, values, mask[sequence, :, chosen, begin:], scale
        )
        out[sequence, :, chosen] = part
    return out.to(q.dtype)


def _classes(mask: Tensor, q: Tensor, k: Tensor) -> list[tuple[int, Tensor, int]] | None:
    """Return (batch, rows, first column) of rows attended together; None: all, from column 0.

    Rows whose first keys lie a multiple of 128 apart have the same blocks.
    """
    if torch.compiler.is_compiling() or mask.dtype != torch.bool or q.dim() != 4:
        return None
    if mask.dim() < 2 or (mask.dim() > 2 and mask.shape[-3] != 1):
        return None
    try:
        dense = mask.expand(q.shape[0], 1, q.shape[-2], k.shape[-2])
        first, end = api.seen_columns(dense)[:, 0].unbind(-1)
    except (ArgumentValueError, RuntimeError):
        return None
    offset = torch.where(end > first, first % _BLOCK, 0)
    if not offset.any():
        return None
    return [
        (b, (row == begin).nonzero()[:, 0].to(q.device), begin)
        for b, row in enumerate(offset)
        for begin in row.unique().tolist()
    ]


def _blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute the formula at the top of this file on fp32 tensors."""
    columns = k.shape[-2]
    count = -(-columns // _BLOCK)
    filled = (0, 0, 0, count * _BLOCK - columns)
    keys, values = (F.pad(t, filled).split(_BLOCK, -2) for t in (k, v)) if count else ((), ())
    scores = [
        _masked(torch.matmul(q, part.mT) * scale, mask, columns, j * _BLOCK)
        for j, part in enumerate(keys)
    ]
    if not scores:
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))
    top = torch.stack([s.detach().amax(-1, keepdim=True) for s in scores]).amax(0)
    # The maximum of a row that sees nothing is -inf: any finite number serves.
    top = torch.where(top == -torch.inf, 0.0, top)
    out = total = 0.0
    for s, part in zip(scores, values, strict=True):
        power = torch.exp(s - top)
        total = total + power.sum(-1, keepdim=True)
        out = out + torch.matmul(power, part)
    return out / torch.where(total == 0, 1.0, total)


def _masked(scores: Tensor, mask: Tensor | None, columns: int, begin: int) -> Tensor:
    """Scores of the block of keys from ``begin`` on; -inf where there is no key."""
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], columns)[..., begin : begin + _BLOCK]
        missing = _BLOCK - mask.shape[-1]
        if mask.dtype == torch.bool:
            return scores.masked_fill(~F.pad(mask, (0, missing)), -torch.inf)
        return scores + F.pad(mask.float(), (0, missing), value=-torch.inf)
    place = torch.arange(begin, begin + _BLOCK, device=scores.device)
    return scores.masked_fill(place >= columns, -torch.inf)
