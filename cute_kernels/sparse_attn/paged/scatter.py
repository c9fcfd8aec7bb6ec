"""Rows of keys and values to the slots of paged caches, by torch's ops, on any GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv_cache(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write rows to the slots of caches [pages, rows, Hkv, ..]; negative slots are skipped.

    The host reads no slot.  A row that is skipped repeats the write of the first row that is not,
    the same bytes to the same slot; if all are skipped, slot 0 is written with what it holds.
    """
    used = slot_mapping >= 0
    # [1]: index of the first row that is written.
    first = used.to(torch.int32).argmax(0, keepdim=True)
    index = torch.where(used, torch.arange(len(used), device=used.device), first)
    slots = slot_mapping.long()[index].clamp(min=0)
    any_used = used.any()
    page_size = k_cache.shape[1]
    place = slots // page_size, slots % page_size
    for rows, cache in ((key, k_cache), (value, v_cache)):
        cache.index_put_(place, torch.where(any_used, rows[index], cache[0, 0]))
