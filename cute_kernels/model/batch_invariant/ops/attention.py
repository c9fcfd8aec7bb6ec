"""The override of scaled_dot_product_attention.

A call knows columns of a key buffer and no positions: padding, a pack, or a cache that dropped its
oldest keys may lie in front.  So blocks of 128 keys are counted from the first key that a row sees,
and a row's bits are a function of its query and of the keys it sees.

bf16 and fp16 with heads of up to 256 are `ck.block_sparse_attention`.  All else (fp32, larger
heads, masks of numbers) is made of products of 128 keys in ascending order, fp32 throughout.
Dropout is torch's composition, whose products are ours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....errors import ArgumentValueError
from ....runtime.torch_ops import own_result
from ....schedulers.masks.mask import BlockMask
from ....sparse_attn import api
from ....sparse_attn.config import VALUE_DIMS
from .. import checks, mode
from . import attention_by_products

_HALF = (torch.bfloat16, torch.float16)


def why_attention(
    q, k, v, mask=None, dropout=0.0, is_causal=False, *, scale=None, enable_gqa=False
) -> str | None:
    """Return the reason of an attention: None if bits depend on the keys that rows see alone."""
    reason = checks.tensors(q, k, v)
    if reason is None and mask is not None and mode.strict() and torch.compiler.is_compiling():
        if mask.dtype != torch.bool or _fits(q, k, v, enable_gqa):
            return None
        return "in a graph, a bool mask of fp32 or of heads above 256 counts columns, not keys seen"
    return reason


def attention(
    q, k, v, mask=None, dropout=0.0, is_causal=False, *, scale=None, enable_gqa=False
) -> torch.Tensor:
    """Compute softmax(scale q kᵀ + mask) v of q [B, H, L, D]."""
    scale = q.shape[-1] ** -0.5 if scale is None and q.shape[-1] else scale
    # Symbolic in a graph whose sizes vary; the graph is specialized to the number.
    scale = None if scale is None else float(scale)
    if dropout or scale is None or not _well_formed(q, k, v, mask, is_causal):
        return torch.ops.aten._scaled_dot_product_attention_math(
            q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if not scale > 0 or not _fits(q, k, v, enable_gqa) or not _selects(mask, q, k):
        return attention_by_products.attention(q, k, v, mask, is_causal, scale, enable_gqa)
    padded = _padded_head(q, v)
    # Zeros after a head add zeros to its scores, and columns of zeros to its output.
    widths = zip((q, k, v), (padded, padded, VALUE_DIMS[padded]), strict=True)
    heads = (F.pad(t, (0, wide - t.shape[-1])).transpose(1, 2) for t, wide in widths)
    out = _attend(*heads, mask, is_causal, scale)
    return own_result(out.transpose(1, 2)[..., : v.shape[-1]])


def _well_formed(q, k, v, mask, is_causal) -> bool:
    """Whether torch accepts these arguments; its composition raises for the others."""
    if mask is not None and (
        is_causal or not (mask.dtype == torch.bool or mask.is_floating_point())
    ):
        return False
    return q.dtype == k.dtype == v.dtype and min(t.dim() for t in (q, k, v)) >= 2


def _attend(q, k, v, mask, is_causal, scale) -> torch.Tensor:
    """Attention of q [B, L, H, D]; the mask is None or of bools."""
    (batch, rows, heads, _), columns = q.shape, k.shape[1]
    if mask is None and (not is_causal or rows == columns):
        return api.block_sparse_attention(q, k, v, causal=is_causal, scale=scale)
    if is_causal:
        # torch's causal mask begins at the first key, whatever the lengths are.
        end = torch.arange(1, rows + 1, dtype=torch.int32, device="cpu").clamp(max=columns)
        ranges = torch.stack((torch.zeros_like(end), end), -1).expand(batch, 1, rows, 2)
    else:
        mask_heads = 1 if mask.dim() < 3 or mask.shape[-3] == 1 else heads
        mask = mask.expand(batch, mask_heads, rows, columns)
        ranges = _runs(mask) if mask_heads == 1 else None
    if ranges is None:
        return api.block_sparse_attention(q, k, v, BlockMask.from_dense(mask), scale=scale)
    return api.sequence_attention(q, k, v, api.kv_ranges_from_first_key(ranges), scale=scale)


def _runs(mask: torch.Tensor) -> torch.Tensor | None:
    """Return the columns that each query sees; None where some have gaps between them."""
    try:
        return api.seen_columns(mask)
    except ArgumentValueError:
        if torch.compiler.is_compiling():
            raise
        return None


def _selects(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether a mask is of bools and broadcasts to [B, H, L, S]."""
    if mask is None:
        return True
    sizes = (*q.shape[:-1], k.shape[-2])
    return (
        mask.dtype == torch.bool
        and 2 <= mask.dim() <= len(sizes)
        and all(m in (1, n) for m, n in zip(mask.shape[::-1], sizes[::-1], strict=False))
    )


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool) -> bool:
    """Whether the kernels take these heads after padding."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or q.dtype not in _HALF:
        return False
    if not q.dtype == k.dtype == v.dtype or 0 in (q.shape[-1], v.shape[-1]):
        return False
    (batch, heads, _, width), (_, kv_heads, length, _) = q.shape, k.shape
    if k.shape != (batch, kv_heads, length, width) or v.shape[:-1] != k.shape[:-1]:
        return False
    shared = kv_heads == heads or (grouped and kv_heads and heads % kv_heads == 0)
    return bool(shared) and _padded_head(q, v) is not None


def _padded_head(q: torch.Tensor, v: torch.Tensor) -> int | None:
    """Smallest supported head size of q that these heads fit into, or None."""
    for dim, value_dim in VALUE_DIMS.items():
        if dim >= q.shape[-1] and value_dim >= v.shape[-1]:
            return dim
    return None
