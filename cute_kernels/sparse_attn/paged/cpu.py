"""The CPU backend of paged caches: pages are gathered, each sequence is a dense forward."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ...schedulers.masks.mask import BlockMask
from ...schedulers.masks.rules import Band
from .. import cpu, masks
from ..masks import LoweredMask, Window
from ..tensors import PagedOptions
from . import checks


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    *options: object,
) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, Dv], lse [Hq, T]); options: `PagedOptions`."""
    scale, window, softcap, sinks, out = PagedOptions(*options)
    tokens, heads, _ = q.shape
    tables, keys, starts = checks.values(
        block_table, seqlens_k, cu_seqlens_q, tokens, k_cache.shape[:2], window[0]
    )
    out = q.new_empty(tokens, heads, v_cache.shape[3]) if out is None else out
    lse = q.new_full((heads, tokens), -math.inf, dtype=torch.float32)
    for n, (pages, length) in enumerate(zip(tables, keys, strict=True)):
        rows = slice(starts[n], starts[n + 1])
        if rows.start == rows.stop:
            continue
        mask = _mask(rows.stop - rows.start, length, window)
        first = checks.first_seen(length, rows.stop - rows.start, window[0])
        k, v = (_gathered(cache, pages, length, first) for cache in (k_cache, v_cache))
        out_rows, lse_rows = cpu.forward(q[rows][None], k, v, mask, scale, softcap, sinks)
        out[rows], lse[:, rows] = out_rows[0], lse_rows[0]
    out[starts[-1] :] = 0
    return out, lse


def _gathered(cache: Tensor, pages: list[int], length: int, first: int) -> Tensor:
    """[1, length, Hkv, ..]: the rows of a sequence, in the order of its positions.

    Those before ``first`` are zeros, and ``pages`` begin with the one that has it.
    """
    page_size = cache.shape[1]
    skipped = first // page_size * page_size
    seen = cache[pages].flatten(0, 1)[first - skipped : length - skipped]
    return torch.cat([cache.new_zeros(first, *cache.shape[2:]), seen])[None]


# A few: the lists of a prefill of 128k tokens have 12 MB.
@functools.lru_cache(maxsize=16)
def _mask(rows: int, keys: int, window: Window) -> LoweredMask:
    """Lowered band of the last ``rows`` of ``keys`` positions."""
    first, (left, right) = keys - rows, window
    low, high = (None if left is None else first - left), (None if right is None else first + right)
    return masks.lower(BlockMask.from_rule(Band(low, high), rows, keys, device="cpu"))


def write_kv_cache(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write rows to the slots of caches [pages, rows, Hkv, ..]; negative slots are skipped."""
    pages, page_size = k_cache.shape[:2]
    checks.slots(slot_mapping, pages * page_size)
    used = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[used].long()
    place = slots // page_size, slots % page_size
    k_cache[place], v_cache[place] = key[used], value[used]
