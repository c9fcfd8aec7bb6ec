"""``flex_attention`` of torch, its arguments and layout, on ``ck.block_sparse_attention``."""

from __future__ import annotations

import weakref

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, ShapeError, expected
from ..runtime import checking
from ..runtime.torch_ops import own_result
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
    return_lse: bool = False,
    kernel_options: dict | None = None,
    *,
    return_aux: object = None,
    softcap: float = 0.0,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, object]:
    """A drop-in for ``torch.nn.attention.flex_attention.flex_attention``, in its argument order.

    Args:
        query: [B, Hq, Sq, D]; key: [B, Hkv, Sk, D]; value: [B, Hkv, Sk, Dv]; as in
            ``block_sparse_attention`` otherwise.  Hkv < Hq only with ``enable_gqa``.
        score_mod: None; a soft cap is ``softcap``.
        block_mask: torch's BlockMask or ours, or None.  The mask_mod of torch's is evaluated once
            per BlockMask, in its partial blocks, and kept as bits.
        scale, return_lse: As in ``flex_attention``.
        kernel_options: None or empty: they are options of torch's kernel.
        return_aux: None, or an ``AuxRequest`` without ``max_scores``, which no kernel here keeps.
        softcap, **options: As in ``block_sparse_attention`` (schedule, deterministic).

    Returns:
        [B, Hq, Sq, Dv] with the strides of [B, Sq, Hq, Dv]; with ``return_lse`` also fp32
        [B, Hq, Sq]; with ``return_aux`` an ``AuxOutput``, whose ``lse`` it is if requested.

    Raises:
        ArgumentTypeError: a ``score_mod``, or an argument of another type.  ArgumentValueError:
        ``kernel_options``, ``max_scores``, or ``return_lse`` beside ``return_aux``.  ShapeError:
        GQA without ``enable_gqa``.  And what ``block_sparse_attention`` and
        ``BlockMask.from_flex`` raise.
    """
    _check_options(score_mod, enable_gqa, return_lse, kernel_options, return_aux)
    for name, t in (("query", query), ("key", key), ("value", value)):
        checking.tensor(name, t)
        checking.rank(name, t, 4, "[B, H, S, D]")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if not enable_gqa and q.shape[2] != k.shape[2]:
        want = f"{q.shape[2]} heads like query, or enable_gqa=True"
        raise ShapeError(expected("key", want, k.shape[2]))
    with_lse = return_lse or getattr(return_aux, "lse", False)
    options |= {"scale": scale, "softcap": softcap, "return_lse": with_lse}
    results = block_sparse_attention(q, k, v, mask_of(block_mask), **options)
    out, lse = results if with_lse else (results, None)
    out = own_result(out.transpose(1, 2))
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse, max_scores=None)
    return (out, lse) if return_lse else out


def _check_options(score_mod, enable_gqa, return_lse, kernel_options, return_aux) -> None:
    """Refuse what torch's function takes and this one does not compute."""
    if score_mod is not None:
        want = "None (a score_mod is arbitrary code; softcap= is built in)"
        raise ArgumentTypeError(expected("score_mod", want, type(score_mod).__name__))
    for name, flag in (("enable_gqa", enable_gqa), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise ArgumentTypeError(expected(name, "True or False", repr(flag)))
    if kernel_options is not None and kernel_options != {}:
        want = "None (they are options of torch's kernel)"
        raise ArgumentValueError(expected("kernel_options", want, kernel_options))
    if return_aux is None:
        return
    from torch.nn.attention.flex_attention import AuxRequest

    if not isinstance(return_aux, AuxRequest):
        want = "None or a torch.nn.attention.flex_attention.AuxRequest"
        raise ArgumentTypeError(expected("return_aux", want, type(return_aux).__name__))
    if return_aux.max_scores:
        raise ArgumentValueError(expected("return_aux.max_scores", "False", True))
    if return_lse:
        want = "False beside return_aux, which requests it"
        raise ArgumentValueError(expected("return_lse", want, True))


def mask_of(block_mask) -> BlockMask | None:
    """Return our mask for torch's, made once per object; ours and None as they are."""
    if block_mask is None or isinstance(block_mask, BlockMask):
        return block_mask
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    if not isinstance(block_mask, FlexBlockMask):
        want = (
            "a BlockMask of torch or of cute_kernels, or None "
            "(cute_kernels.BlockMask.from_dense makes one of a bool tensor)"
        )
        raise ArgumentTypeError(expected("block_mask", want, type(block_mask).__name__))
    if block_mask not in _converted:
        _converted[block_mask] = BlockMask.from_flex(block_mask)
    return _converted[block_mask]
