"""``flex_attention`` of torch, its arguments and layout, on ``ck.block_sparse_attention``."""

from __future__ import annotations

import weakref

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, ShapeError, expected
from ..schedulers.masks.mask import BlockMask
from ..sparse_attn.api import block_sparse_attention

_converted: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod=None,
    block_mask=None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float = 0.0,
    return_lse: bool = False,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A drop-in for ``torch.nn.attention.flex_attention.flex_attention``.

    Args:
        query: [B, Hq, Sq, D]; key: [B, Hkv, Sk, D]; value: [B, Hkv, Sk, Dv]; as in
            ``block_sparse_attention`` otherwise.  Hkv < Hq only with ``enable_gqa``.
        score_mod: None; a soft cap is ``softcap``.
        block_mask: torch's BlockMask or ours, or None.  The mask_mod of torch's is evaluated once
            per BlockMask, in its partial blocks, and kept as bits.
        scale, return_lse: As in ``flex_attention``.
        softcap, **options: As in ``block_sparse_attention`` (schedule, deterministic).

    Returns:
        [B, Hq, Sq, Dv] (a view of [B, Sq, Hq, Dv]); with ``return_lse`` also fp32 [B, Hq, Sq].

    Raises:
        ArgumentTypeError: a ``score_mod``.  ShapeError: GQA without ``enable_gqa``.  And what
        ``block_sparse_attention`` and ``BlockMask.from_flex`` raise.
    """
    if score_mod is not None:
        want = "None (a score_mod is arbitrary code; softcap= is built in)"
        raise ArgumentTypeError(expected("score_mod", want, type(score_mod).__name__))
    if "kernel_options" in options:
        want = "no options of another kernel"
        raise ArgumentValueError(expected("kernel_options", want, options["kernel_options"]))
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if not enable_gqa and q.shape[2] != k.shape[2]:
        want = f"{q.shape[2]} heads like query, or enable_gqa=True"
        raise ShapeError(expected("key", want, k.shape[2]))
    results = block_sparse_attention(
        q, k, v, mask_of(block_mask), scale=scale, softcap=softcap, return_lse=return_lse, **options
    )
    return (results[0].transpose(1, 2), results[1]) if return_lse else results.transpose(1, 2)


def mask_of(block_mask) -> BlockMask | None:
    """Our mask for torch's, made once per object; ours and None as they are."""
    if block_mask is None or isinstance(block_mask, BlockMask):
        return block_mask
    if block_mask not in _converted:
        _converted[block_mask] = BlockMask.from_flex(block_mask)
    return _converted[block_mask]
