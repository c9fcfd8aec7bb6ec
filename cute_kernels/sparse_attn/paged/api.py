"""``ck.paged_attention`` and ``ck.write_kv_cache``: keys and values in pages."""

from __future__ import annotations

from typing import Literal, overload

import torch

from .. import checks as attention_checks
from . import checks, op


@overload
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    softcap: float = ...,
    sinks: torch.Tensor | None = ...,
    layout: str = ...,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
) -> torch.Tensor: ...


@overload
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    softcap: float = ...,
    sinks: torch.Tensor | None = ...,
    layout: str = ...,
    return_lse: Literal[True],
    out: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    layout: str = "NHD",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`block_sparse_attention` of the last tokens of sequences whose keys are in pages.

    Decode rows, chunks of prefill, whole prompts and speculative rows, in any mixture.

    Args:
        q: [T, Hq, D]; bf16 or fp16; any strides.  D is 64, 96, 128, 192 or 256.
        k_cache, v_cache: [pages, page_size, Hkv, D], [pages, page_size, Hkv, Dv] in the layout
            "NHD"; the dtype and device of ``q``; rows contiguous, other strides any.  Pages of 16,
            32, 64, 128 or 256 keys.  Hkv divides Hq, at most 64 query heads each.  Dv is D, but
            128 for D = 192.
        block_table: int32 [N, P]; key j of sequence n is row j % page_size of page
            block_table[n, j // page_size].  Entries of pages of which no query sees a key are not
            read: behind a sequence's last page, and left of its queries' windows.
        seqlens_k: int32 [N]; keys of each sequence, those of its queries included.
        cu_seqlens_q: int32 [N + 1], ascending from 0 to at most T: the queries of sequence n are
            the tokens from cu_seqlens_q[n] to cu_seqlens_q[n + 1], of which there may be none.
            They are its last tokens.
        scale, softcap, sinks: As in `block_sparse_attention`.
        causal: Also require key position <= query position; unlike there the default.
        window_size: (left, right): how many tokens before and behind itself a query sees; None:
            all of its sequence.
        layout: "NHD", or "HND": caches are [pages, Hkv, page_size, D or Dv].
        return_lse: Also return the log-sum-exp of each row.
        out: [T, Hq, Dv], contiguous, the dtype of the result, memory of its own: where the result
            is written.

    Returns:
        out [T, Hq, Dv], the dtype of ``q``; with ``return_lse`` also lse, fp32 [Hq, T], natural
        logarithm, a sink included.  Tokens behind the last sequence are 0 with an lse of -inf.

    Guarantees:
        ``run_to_run``, ``batch_invariant``, ``schedule_invariant``.  A row has the bytes that it
        has in one `block_sparse_attention` call over the keys of its sequence: whatever else is in
        the batch, whichever pages hold the keys, however a prefill is cut into chunks.  What pages
        hold behind the end of a sequence or left of its queries' windows, NaN included, reaches
        nothing.  (NaN or Inf in V of a key that one query sees may reach others of its sequence.)

    On a GPU the host reads no number of the three lists: nothing waits, and a CUDA graph may hold
    the call, whose replays read other lists of as many sequences.  Lists are trusted there: page
    numbers outside the caches, more keys than a row of ``block_table`` has pages for, more queries
    than keys, and starts that do not ascend are errors that nothing reports; they may read memory
    outside the caches.  On the CPU they are refused.  On SM90 caches whose other strides or
    pointer are no multiples of 16 bytes are copied in each call.

    There is no gradient: inputs that require one are refused while gradients are recorded, and so
    are forward-mode differentiation and vmap.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError, AliasError: an
            argument is wrong; the message names it.
        UnsupportedTransformError: an input requires a gradient; jvp; vmap.
        BackendUnavailable: the device has no backend of this op.

    Example:
        >>> caches = [torch.randn(4, 16, 2, 64).bfloat16() for _ in 'kv']  # 4 pages of 16 tokens
        >>> q, table = torch.randn(1, 8, 64).bfloat16(), torch.tensor([[2, 0]], dtype=torch.int32)
        >>> lengths = torch.tensor([20], dtype=torch.int32)
        >>> ck.paged_attention(q, *caches, table, lengths, torch.arange(2, dtype=torch.int32)).shape
        torch.Size([1, 8, 64])
    """
    attention_checks.flags(causal=causal, return_lse=return_lse)
    left, right = attention_checks.window(window_size)
    scale, softcap = attention_checks.factors(scale, softcap)
    tensors = q, k_cache, v_cache, block_table, seqlens_k, cu_seqlens_q
    operands = *tensors, scale, left, 0 if causal else right, softcap, sinks, layout
    if out is None:
        result, lse = op.paged_attention(*operands)
    else:
        checks.attention(*operands)
        inputs = [t for t in (*tensors, sinks) if t is not None]
        checks.out(out, q, v_cache.shape[3], k_cache.dtype, *inputs)
        result, lse = out, op.paged_attention_out(out, *operands)
    return (result, lse) if return_lse else result


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: str = "NHD",
) -> None:
    """Write keys and values of tokens to their slots of paged caches, in place.

    Args:
        key, value: [T, Hkv, D], [T, Hkv, Dv]; the dtype and device of the caches; any strides.
        k_cache, v_cache, layout: As in `paged_attention`; no two elements share an address.
        slot_mapping: int32 or int64 [T]: page * page_size + row in the page; negative: the token
            is skipped.

    Guarantees:
        Bytes are copied; no other slot changes.

    On a GPU the host reads no slot: nothing waits, and CUDA graphs may hold the call.  Slots are
    trusted there: each has to be below pages * page_size, and be given once (which of two rows
    stays is not said).  On the CPU such slots are refused.

    There is no gradient: inputs that require one are refused while gradients are recorded.

    Raises:
        As `paged_attention`.

    Example:
        >>> key, caches = torch.randn(3, 2, 64).half(), torch.zeros(2, 4, 16, 2, 64).half()
        >>> ck.write_kv_cache(key, key, *caches, torch.tensor([0, 1, 16]))
        >>> torch.equal(caches[0][1, 0], key[2])
        True
    """
    checks.caches(k_cache, v_cache, layout)
    checks.written(key, value, k_cache, v_cache, slot_mapping, layout)
    if layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    op.write_kv_cache(key, value, k_cache, v_cache, slot_mapping)
