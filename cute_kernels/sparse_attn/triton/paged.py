"""Launch the Triton kernels of attention over paged caches.

Grids follow from sizes that the host knows, and all else is read on the device: a call waits for
nothing, and a CUDA graph that holds one reads other lengths, offsets and pages at each replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import log
from ..masks import band
from ..tensors import PagedOptions
from . import kernel_paged as kernels
from .launch import _compiled, _dims, _loadable, _options, _scores, _strides
from .plan import TRITON, Tile

_NAME = "paged_attention"
_WRITE = "write_kv_cache"
_DENSE = "contiguous"
#: Heads of a token that are copied at once.
_HEADS_AT_ONCE = 8
_COPY = Tile(1, 1, num_warps=4, num_stages=1, hip_stages=1)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    *options: object,
    interpret: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, Dv], lse fp32 [Hq, T]): operands as ``paged.op`` says, T > 0.

    Each row has the bytes of its row in this backend's ``block_sparse_attention`` over the keys of
    its sequence, gathered from their pages.  A row that sees no key is 0 with an lse of -inf or,
    with sinks, of its sink.  An entry of ``block_table`` outside the cache stands for a page of
    zeros.  Caches have strides of multiples of 16 and an address of 16 bytes; q is copied if its
    rows cannot be loaded in aligned pieces.

    Args:
        options: `PagedOptions`; ``out`` has a last stride of 1.
        interpret: For Triton's interpreter: fp32 operands, and the last rounding outside.
    """
    scale, window, softcap, sinks, out = PagedOptions(*options)
    tokens, heads, dim = q.shape
    dtype, plan, sequences = q.dtype, TRITON[dim], len(seqlens_k)
    q = _loadable(q[None], interpret, "q", _NAME)[0]
    k, v = (t.float() if interpret else t for t in (k_cache, v_cache))
    shape = tokens, heads, v.shape[3]
    result = torch.empty(shape, dtype=q.dtype, device=q.device)
    if out is not None and not interpret:
        result = out
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    group = heads // k.shape[2]
    lengths, offsets, table = (
        log.contiguous(_NAME, name, t, _DENSE)
        for name, t in (
            ("seqlens_k", seqlens_k),
            ("cu_seqlens_q", cu_seqlens_q),
            ("block_table", block_table),
        )
    )
    with torch.cuda.device_of(q):
        kernels.paged_forward_kernel[(tile_slots(tokens, sequences, group, dim) * k.shape[2],)](
            *(q, k, v, result, lse, table, lengths, offsets),
            None if sinks is None else sinks.float().contiguous(),
            *(_strides(q[None])[1:], _strides(k), _strides(v), _strides(result[None])[1:]),
            *(tokens, sequences, group, k.shape[2], k.shape[0], table.shape[1]),
            **dict(zip(("lo", "hi"), band(window), strict=True)),
            PAGE=k.shape[1],
            **_scores(scale, softcap, dtype, interpret),
            **_dims(q[None], v, plan),
            **_compiled(plan, plan.forward),
        )
    if interpret:
        result = result.to(dtype) if out is None else out.copy_(result)
    return result, lse


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Copy K and V of tokens [T, Hkv, ..] to their slots in the pages of a cache; on every GPU.

    slot_mapping: int64 or int32 [n], n <= T, of the first n tokens: page * page size + place in the
    page.  Negative slots and those beyond the cache are skipped; no two tokens may have one slot.
    """
    plan, slots = TRITON[key.shape[2]], log.contiguous(_WRITE, "slot_mapping", slot_mapping, _DENSE)
    if not len(slots):
        return
    keys, values = (
        _loadable(t[None], False, name, _WRITE) for name, t in (("key", key), ("value", value))
    )
    with torch.cuda.device_of(key):
        kernels.write_kv_kernel[(len(slots),)](
            *(keys, values, k_cache, v_cache, slots),
            *(_strides(keys)[1:], _strides(values)[1:], _strides(k_cache), _strides(v_cache)),
            *(k_cache.shape[2], k_cache.shape[0]),
            PAGE=k_cache.shape[1],
            **_dims(k_cache, v_cache, plan),
            BLOCK_H=_HEADS_AT_ONCE,
            **_options(plan, _COPY),
        )


def tile_slots(tokens: int, sequences: int, group: int, dim: int) -> int:
    """Bound of the row tiles of a batch for one KV head, whatever its lengths are.

    Sequence i begins at slot cu_seqlens_q[i] * group // rows + i; the last is that of the tokens
    of no sequence.
    """
    return tokens * group // TRITON[dim].forward.block_m + sequences + 1
